"""Shapes: of a model's parts as a paper's table has them, of a Hugging Face config.json, of a module, of a size."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from common import models
from common.engine.layout import FlatRange
from common.engine.units import make_units
from common.errors import InputError
from common.models.gpt import GPT
from common.models.llama import Llama
from common.models.lora import LoRAGPT
from common.models.moe import MoEGPT
from lab.simulate.own import PRESETS, model_of

ASPECT = 128  # width over layers, of a GPT of which only the number of parameters is known
SEQUENCE, VOCABULARY = 2048, 50257
LEAST, MOST = 1e6, 1e18  # of a size; whoever writes 7 or 40 means 7B and 40GB
KEYS = {  # of a config.json -> of `transformer`; the first that is there counts
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups"),
    "head": ("head_dim",),
    "ffn": ("moe_intermediate_size", "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner"),
    "vocabulary": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions"),
    "experts": ("num_local_experts", "num_experts"),
    "active": ("num_experts_per_tok",),
    "tied": ("tie_word_embeddings",),
    "window": ("sliding_window",),
}
CONFIGS = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "phi3", "gpt2")
# Keys of models that are others, unless they have these values.
OTHERS = {"n_routed_experts": None, "shared_expert_intermediate_size": None, "kv_lora_rank": None}
OTHERS |= {"use_sliding_window": False, "quantization_config": None, "mlp_only_layers": [], "decoder_sparse_step": 1}
GUESSED = {"kv_heads": "num_key_value_heads: as many as queries have are taken"}
GUESSED |= {"ffn": "intermediate_size: 8/3 of hidden_size is taken"}
DEFAULTS = {"mixtral": {"kv_heads": 8, "active": 2}, "mistral": {"kv_heads": 8}, "qwen3_moe": {"active": 8}}


@dataclass(frozen=True)
class Shape:
    """A model, as formulas see it: counts of parameters, and elements of activations for each token.

    Activations, arXiv 2205.05198, sec. 4.1: of what a block keeps for its backward tensor parallelism cuts a part; the
    rest, inputs of norms and of what is cut, is whole on each rank.
    """

    name: str
    parameters: float
    layers: int
    block: float  # parameters that are gathered together, in stage 3
    root: float = 0  # parameters that stay gathered throughout: embeddings, if the head is tied to them
    last: float = 0  # parameters of a unit after the blocks: an untied head
    largest: float = 0  # parameters of the largest tensor outside of the blocks
    trained: float | None = None  # None is all; this and the next three
    trained_block: float | None = None
    trained_root: float | None = None
    trained_last: float | None = None
    active: float | None = None  # parameters that a token is multiplied with; None is all
    tied: bool = False  # the head is the embedding
    heads: int = 0  # of queries; this and the next three are 0 if they are not known, or without limit
    kv_heads: int = 0
    positions: int = 0  # that are learned, so that a sample cannot be longer
    longest: int = 0  # sample that the model was made for
    window: int = 0  # tokens before a token that its attention reaches; 0 is all
    attention: float = 0  # width of all heads of a block
    width: int = 0
    vocabulary: int = 0
    sequence: int = SEQUENCE
    whole: float = 0  # elements that a block keeps for each token; this and the next two
    cut: float = 0
    working: float = 0  # and that its backward takes besides, cut
    weights: float = 0  # elements of gradients of a block that are not yet in a bucket
    sides: float = 0  # rows and columns of a block's matrices, added up: parameters of adapters for each of their rank
    guessed: str = ""  # what a config.json leaves out, in a sentence


def size_of(text):
    """Bytes, of "40GB"; parameters, of "70e9" or "70B"; else, or without a unit below a million, an InputError."""
    match = re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([KMBGT]?)B?", text.strip(), re.IGNORECASE)
    try:
        number = float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}[match[2].upper()]
    except (TypeError, ValueError):
        number = 0
    if not (0 if match and re.search("[a-zA-Z]$", text.strip()) else LEAST) < number <= MOST:
        raise InputError(f"{text!r} is no size; write 70e9, 70B or 40GB")
    return number


def of_size(text):
    """A GPT of so many parameters, ASPECT times as wide as it is deep; its heads, some ASPECT wide, come in eights."""
    if (parameters := size_of(text)) < LEAST:
        raise InputError(f"--params {text}: a million at least, such as 70M or 7B")
    layers = max(1, round((parameters / (12 * ASPECT**2)) ** (1 / 3)))
    rest = VOCABULARY / (24 * layers)  # 12 layers width² and an embedding are all of them
    width = max(1, round((rest**2 + parameters / (12 * layers)) ** 0.5 - rest))
    return replace(of_gpt(f"a GPT of {text}", parameters, layers, width), heads=8 * max(1, width // (8 * ASPECT)))


def of_gpt(name, parameters, layers, width, vocabulary=VOCABULARY, sequence=SEQUENCE):
    """A GPT-2 of so many parameters: its head is tied to the embedding, its feed-forward layers are four times as wide.

    A block keeps 16 numbers for each of its width: the inputs of two norms and what these make, query, key, value,
    attention's output, and both sides of the GELU.
    """
    root = min(vocabulary * width, parameters)
    return Shape(
        name,
        parameters,
        layers,
        block=(parameters - root) / layers,
        root=root,
        largest=root,
        tied=True,
        attention=width,
        width=width,
        vocabulary=vocabulary,
        sequence=sequence,
        whole=4 * width,
        cut=12 * width,
        working=4 * width,
        weights=5 * width**2,
        sides=16 * width,
    )


def transformer(
    name, *, layers, hidden, vocabulary, heads, ffn=None, kv_heads=None, head=None, experts=0, active=1, **others
):
    """A Llama, or a mixture of experts of its blocks: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    Args:
        ffn: width of a feed-forward layer (8/3 of `hidden`). heads, kv_heads: of queries, and of keys and values.
        head: features of a head. experts, active: in a block, and of them for a token; 0 is one feed-forward layer.
        others: tied, whether the head is the embedding (False); sequence, the usual length of a sample (SEQUENCE), and
            longest, the most; window, of attention (all).
    """
    kv_heads = kv_heads or heads
    if (hidden % heads and not head) or heads % kv_heads:
        raise InputError(
            f"{name}: {heads} heads do not divide {hidden}, or {kv_heads} heads of keys do not divide them"
        )
    if active > max(1, experts):
        raise InputError(f"{name}: {active} active of {experts} experts; a token meets {experts} at most")
    ffn, head = ffn or 8 * hidden // 3, head or hidden // heads
    queries, values = heads * head, kv_heads * head
    attention, expert = 2 * hidden * (queries + values), 3 * hidden * ffn
    block = attention + max(1, experts) * expert + experts * hidden + 2 * hidden
    embedding, tied = vocabulary * hidden, others.get("tied")
    routed = 2 * active * hidden if experts else 0  # what goes to the experts, and comes back
    return Shape(
        name,
        parameters=layers * block + (1 if tied else 2) * embedding + hidden,
        layers=layers,
        block=block,
        root=embedding if tied else hidden,
        last=0 if tied else embedding,
        largest=embedding,
        active=layers * (attention + (active if experts else 1) * expert) + embedding,
        tied=bool(tied),
        heads=heads,
        kv_heads=kv_heads,
        longest=others.get("longest") or others.get("sequence") or 0,
        window=others.get("window") or 0,
        attention=queries,
        width=hidden,
        vocabulary=vocabulary,
        sequence=others.get("sequence") or SEQUENCE,
        whole=4 * hidden + routed,
        cut=2 * queries + 2 * values + 4 * (active if experts else 1) * ffn,
        working=2 * ffn,
        weights=hidden * ffn,
        sides=4 * hidden + 2 * (queries + values) + 3 * max(1, experts) * (hidden + ffn),
    )


def with_adapters(shape, rank):
    """A frozen model of this shape; trained are adapters of a low rank beside each matrix of a block (LoRA)."""
    if rank > shape.width:
        raise InputError(f"--lora {rank}: {shape.name} is {shape.width} wide; give less, such as 16")
    added = rank * shape.sides
    frozen = {"trained_root": 0, "trained_last": 0, "largest": 0, "weights": added}
    trained = {"trained": shape.layers * added, "trained_block": added, **frozen}
    name, parameters = f"{shape.name} with adapters of rank {rank}", shape.parameters + shape.layers * added
    return replace(shape, name=name, parameters=parameters, block=shape.block + added, **trained)


def of_config(path):
    """The shape in a Hugging Face config.json, read as JSON: of a Llama, Qwen or Mixtral; or of a GPT-2."""
    try:
        config = json.loads(Path(path).read_text())
        name = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: {error}; give a Hugging Face config.json") from error
    if name not in CONFIGS:
        raise InputError(f"{path}: {name} is not known; known are {', '.join(CONFIGS)}")
    for key, usual in OTHERS.items():
        if config.get(key, usual) not in (usual, None):
            raise InputError(f"{path}: models with {key} are not known; give a shape by hand that is near")
    found = dict(DEFAULTS.get(name, {}))
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    for key, names in KEYS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        kind = bool if key == "tied" else int
        if value is not None and not (type(value) is kind and (key != "tied") <= value <= LEAST**2):
            raise InputError(f"{path}: {names[0]} is {value!r:.20}; give a whole number")
        found |= {} if value is None else {key: value}
    if missing := [KEYS[key][0] for key in ("layers", "hidden", "heads", "vocabulary") if key not in found]:
        raise InputError(f"{path} has no {', '.join(missing)}")
    positions = found.get("sequence", SEQUENCE)
    found["sequence"], found["longest"] = min(positions, 8192), positions  # what is trained, and the most
    if name == "gpt2":
        layers, width, vocabulary = found["layers"], found["hidden"], found["vocabulary"]
        if found.get("ffn", 4 * width) != 4 * width or width % found["heads"] or not found.get("tied", True):
            raise InputError(f"{path}: a GPT-2 here has a tied head, heads that divide n_embd, and n_inner 4 n_embd")
        parameters = 12 * layers * width**2 + (vocabulary + positions) * width
        gpt = of_gpt(name, parameters, layers, width, vocabulary, found["sequence"])
        return replace(gpt, heads=found["heads"], positions=positions)
    said = [f"{path} has no {usual}." for key, usual in GUESSED.items() if key not in found]
    return replace(transformer(name, **found), guessed=" ".join(said))


def of_model(name):
    """The shape of a preset, or, from its modules, of a GPT or Llama of the zoo or a landmark; else an InputError."""
    if name in PRESETS:
        return transformer(name, **PRESETS[name])
    model = model_of(name)
    if not isinstance(model, (GPT, Llama)) or isinstance(model, LoRAGPT):
        raise InputError(
            f"--model {name}: formulas know GPTs and Llamas; `python -m lab.simulate --model {name} --precision bf16 "
            "--hardware h100-80g` lets each engine take a step with it, and shows its peak and its time"
        )
    units = make_units(model, [], lambda name, parameter: parameter.dtype, 1, FlatRange)
    counts = {unit.name: sum(slot.numel for run in unit.buckets for slot in run.slots.values()) for unit in units}
    blocks = [counts[unit] for unit in counts if unit.startswith("blocks.")]
    parameters = models.count(model)
    vocabulary, width = model.wte.weight.shape
    attention, inside, gated = model.blocks[0].attention, model.blocks[0].mlp, isinstance(model, Llama)
    experts = len(inside.experts) if isinstance(model, MoEGPT) else 0
    ffn = inside.gate.out_features if gated else 4 * width
    return Shape(
        str(name),
        parameters,
        len(blocks),
        max(blocks),
        root=counts.get("", 0),
        last=max((counts[unit] for unit in counts if unit and not unit.startswith("blocks.")), default=0),
        largest=max(parameter.numel() for parameter in model.parameters()),
        active=parameters - len(blocks) * (experts - 1) * 8 * width**2 if experts else None,
        width=width,
        vocabulary=vocabulary,
        sequence=model.window - 1,
        whole=(6 if experts else 4) * width,
        cut=5 * width + 4 * ffn if gated else 4 * width + 2 * ffn,  # keys and values are spread over all heads
        working=2 * ffn if gated else ffn / max(1, experts / 2),
        weights=width**2 if gated else width * (width + ffn),
        tied=model.head.weight is model.wte.weight,
        heads=width // attention.head_width,
        kv_heads=attention.key.out_features // attention.head_width if gated else 0,
        positions=0 if gated else model.window - 1,
        longest=model.window - 1,
        attention=width,
        sides=sum(sum(p.shape) for p in model.blocks[0].parameters() if p.ndim == 2),
    )
