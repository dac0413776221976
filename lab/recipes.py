# ruff: noqa: PLC0415 - a recipe imports its own libraries, which may be absent
"""`python -m lab.recipes`: public training recipes by every engine, compared with their libraries' own DDP to the bit.

Recipes are written as their libraries teach them, around tiny models with random weights. The classes that a recipe
trains with come from `Words`: the stock ones, or those with an engine; nothing else differs. All losses and the last
weights are compared with the stock run's, and, as engines sum a clipping norm in float64, with one whose norms are too.
"""

import contextlib
import importlib
import importlib.metadata
import os
import tempfile
from collections import defaultdict
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader

from common.data import load_text
from common.engines import ENGINES
from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table, say
from common.outputs import asked, check_clone, one_line_errors, parser_of, tell
from common.ranks.world import LocalWorld

RANKS, STEPS = 2, 6
BATCH, SAMPLES = 2, 2 * RANKS * STEPS
EQUAL, EXACT = "equal bits", "equal bits, norms in float64"
OFF = {"quantize_weights": False, "quantize_gradients": False}
WAYS = {**{name: (name, {}) for name in ENGINES}, "zeropp, not quantized": ("zeropp", OFF)}
QUIET = {"use_cpu": True, "bf16": False, "report_to": "none", "save_strategy": "no", "logging_steps": 1}
USUAL = {**QUIET, "max_steps": STEPS, "learning_rate": 1e-3, "per_device_train_batch_size": BATCH, "max_length": 64}
SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}


class Words:
    """The classes that a recipe trains with: stock if `engine` is None, else with that engine."""

    def __init__(self, engine=None, options=None):
        self.engine, self.options = engine, options
        self.chosen = {} if engine is None else {"engine": engine, "engine_options": options}

    def accelerator(self):
        library = importlib.import_module("accelerate" if self.engine is None else "interop.accelerate")
        return library.Accelerator(cpu=True, **self.chosen)

    def trainer(self, kind, *inputs, **named):
        if self.engine is not None:
            kind = type(kind.__name__, (importlib.import_module("interop.transformers").ByEngine, kind), {})
        return kind(*inputs, **self.chosen, **named)

    def strategy(self):
        own = self.engine and importlib.import_module("interop.lightning").ZeroStrategy
        return own(self.engine, **self.options) if own else "ddp"


# ---- the recipes: the losses of a rank's steps, and the last weights -------------------------------------------------


def sft(words, folder):
    """Fine-tuning of a Llama on text, by trl."""
    from datasets import Dataset
    from transformers import ByT5Tokenizer
    from trl import SFTConfig, SFTTrainer

    data, arguments = Dataset.from_dict({"text": lines()}), SFTConfig(folder, **USUAL)
    return fit(words.trainer(SFTTrainer, llama(), args=arguments, train_dataset=data, processing_class=ByT5Tokenizer()))


def dpo(words, folder):
    """Direct preference optimization of a Llama, by trl: to go on with a line is preferred to the line reversed."""
    from datasets import Dataset
    from transformers import ByT5Tokenizer
    from trl import DPOConfig, DPOTrainer

    prompts, chosen = lines()[:-1], lines()[1:]
    data = Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": [line[::-1] for line in chosen]})
    given = {"args": DPOConfig(folder, **USUAL), "train_dataset": data, "processing_class": ByT5Tokenizer()}
    return fit(words.trainer(DPOTrainer, llama(), ref_model=llama(), **given))


def lora(words, folder):
    """PEFT's adapters in a frozen T5; the optimizer is given all parameters."""
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers import T5Config, T5ForConditionalGeneration, get_linear_schedule_with_warmup

    accelerator = words.accelerator()
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=256, decoder_start_token_id=0, **sizes))
    model = get_peft_model(model, LoraConfig(task_type=TaskType.SEQ_2_SEQ_LM, r=4, lora_alpha=8, lora_dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = get_linear_schedule_with_warmup(optimizer, 2, RANKS * STEPS)
    text = torch.tensor(load_text()[: 32 * SAMPLES].copy()).long().view(-1, 32)
    loader = DataLoader(text, batch_size=BATCH, shuffle=True)
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
    losses = []
    for batch in loader:
        loss = model(input_ids=batch, labels=batch.flip(1)).loss
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    return losses, accelerator.get_state_dict(model)


def ema(words, folder):
    """Lightning's moving average of the weights of its demo module, which has the average at the end."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import EMAWeightAveraging
    from lightning.pytorch.demos.boring_classes import BoringModel

    class Noted(BoringModel):
        def training_step(self, batch, batch_idx):
            made = super().training_step(batch, batch_idx)
            losses.append(made["loss"].item())
            return made

    module, losses = Noted(), []
    how = {"accelerator": "cpu", "devices": RANKS, "max_steps": STEPS, "limit_val_batches": 0}
    Trainer(strategy=words.strategy(), callbacks=[EMAWeightAveraging(decay=0.9)], **how, **SILENT).fit(module)
    return losses, module.state_dict()


def diffusion(words, folder, gathers=False):
    """A UNet of diffusers learns to predict noise, is clipped, and averaged after each step."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel

    accelerator = words.accelerator()
    model = UNet2DModel(sample_size=16, block_out_channels=(32, 32, 32, 32), layers_per_block=1)
    noises = DDPMScheduler(num_train_timesteps=100)
    average = EMAModel(model.parameters(), use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999))
    rates = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=RANKS * STEPS)
    loader = DataLoader(torch.rand(SAMPLES, 3, 16, 16) * 2 - 1, batch_size=BATCH, shuffle=True)
    model, optimizer, loader, rates = accelerator.prepare(model, optimizer, loader, rates)
    losses = []
    for clean in loader:
        noise, times = torch.randn_like(clean), torch.randint(0, 100, (len(clean),))
        loss = nn.functional.mse_loss(model(noises.add_noise(clean, noise, times), times).sample, noise)
        losses.append(loss.item())
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        with accelerator.engine.gathered() if gathers and words.engine else contextlib.nullcontext():
            average.step(model.parameters())
    averaged = {f"average {number}": weights for number, weights in enumerate(average.shadow_params)}
    return losses, accelerator.get_state_dict(model) | averaged


def gathered(words, folder):
    """The same with one line more: the average is taken within `accelerator.engine.gathered()`."""
    return diffusion(words, folder, gathers=True)


def detection(words, folder):
    """A DETR over a small ResNet, whose loss counts the boxes of all ranks; images have unequal numbers of them."""
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    accelerator = words.accelerator()
    net = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "num_labels": 5, "auxiliary_loss": True}
    backbone = ResNetConfig(out_features=["stage2"], **net)
    model = DetrForObjectDetection(DetrConfig(backbone_config=backbone, **sizes))
    data = []
    for number in range(SAMPLES):
        boxes = torch.rand(1 + number % 4, 4) * 0.4 + 0.1  # centers, widths and heights, as parts of the image
        data.append((torch.randn(3, 32, 32), {"class_labels": torch.arange(len(boxes)), "boxes": boxes}))
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=lambda items: [*zip(*items, strict=True)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for pixels, targets in loader:
        loss = model(pixel_values=torch.stack(pixels), labels=list(targets)).loss
        losses.append(loss.item())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return losses, accelerator.get_state_dict(model)


RECIPES = {  # recipe: its libraries
    sft: ("trl", "transformers", "accelerate"),
    dpo: ("trl", "transformers", "accelerate"),
    lora: ("peft", "transformers", "accelerate"),
    ema: ("lightning",),
    diffusion: ("diffusers", "accelerate"),
    gathered: ("diffusers", "accelerate"),
    detection: ("transformers", "accelerate", "scipy"),
}


def fit(trainer):
    """Train by a Trainer."""
    trainer.train()
    weights = trainer.model.state_dict if getattr(trainer, "engine", None) is None else trainer.engine.full_state_dict
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], weights()


def lines():
    """Python's own source."""
    return [line for line in bytes(load_text()[:8192]).decode(errors="replace").splitlines() if line.strip()]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=384, **sizes))


# ---- runs ------------------------------------------------------------------------------------------------------------


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train, show and write the results."""
    options = asked(parser_of("lab.recipes", __doc__), arguments)
    check_clone("interop")
    tell(options, survey(), table)


def survey():
    """Train every recipe in every way: the JSON of `lab.recipes`."""
    rows = []
    with LocalWorld(RANKS, oversubscribe=True, log=os.devnull) as world:
        for recipe in RECIPES:
            stock = {EQUAL: world.run(on_rank, recipe), EXACT: world.run(on_rank, recipe, None, None, True)}
            ends = {way: verdict(world.run(on_rank, recipe, *chosen), stock) for way, chosen in WAYS.items()}
            losses = [losses for losses, _ in stock[EQUAL]]
            rows.append({"recipe": recipe.__name__, "what": recipe.__doc__, "losses": losses, "engines": ends})
            say(f"{recipe.__name__}: {'; '.join(dict.fromkeys(ends.values()))}")
    versions = {of: importlib.metadata.version(of) for of in sorted(set().union(*RECIPES.values()))}
    return {"world_size": RANKS, "hardware": hardware(torch.device("cpu")), "versions": versions, "rows": rows}


@contextlib.contextmanager
def as_by_torchrun(world):
    """In this context the environment variables are those that torchrun sets."""
    ranks = {"RANK": world.rank, "LOCAL_RANK": world.rank, "WORLD_SIZE": world.size, "LOCAL_WORLD_SIZE": world.size}
    told = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500, "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        yield


def on_rank(world, recipe, engine=None, options=None, exact=False):
    """The losses and last weights of a recipe, or why it is refused; `exact` sums a stock run's norms in float64."""
    if "accelerate" in RECIPES[recipe]:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)  # an earlier recipe's
        GradientState._reset_state()
    torch.manual_seed(0)
    clips = mock.patch.object(nn.utils, "clip_grad_norm_", clip_exactly if exact else nn.utils.clip_grad_norm_)
    try:
        with as_by_torchrun(world), clips, tempfile.TemporaryDirectory() as folder:
            losses, weights = recipe(Words(engine, options), folder)
    except InputError as error:
        return f"refused: {error}"
    return losses, {name: tensor.clone() for name, tensor in weights.items()}


def clip_exactly(parameters, max_norm, *_, **__):
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = sum(gradient.double().square().sum() for gradient in gradients).sqrt().float()
    for gradient in gradients if max_norm < float("inf") else ():
        gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def verdict(found, stock):
    """What `on_rank` returned on all ranks, beside the stock runs: EQUAL, EXACT, the difference, or the refusal."""
    if isinstance(found[0], str):
        return " / ".join(dict.fromkeys(found))
    for kind, expected in stock.items():
        pairs = [*zip(found, expected, strict=True)]
        losses = max(abs(a - b) for (ours, _), (theirs, _) in pairs for a, b in zip(ours, theirs, strict=True))
        names = found[0][1] | expected[0][1]
        weights = max((ours[name] - theirs[name]).abs().max() for (_, ours), (_, theirs) in pairs for name in names)
        if losses == weights == 0:
            return kind
    return f"losses off by {losses:.1e}, weights by {weights:.1e}"


def table(results):
    """A row for each recipe and verdict: which engines have it."""
    rows = []
    for row in results["rows"]:
        engines = defaultdict(list)
        for way, said in row["engines"].items():
            engines[said].append(f"`{way}`")
        what = [row["what"], *[""] * len(engines)]
        rows += [(what.pop(0), said, ", ".join(ways)) for said, ways in engines.items()]
    versions = ", ".join(f"{library} {version}" for library, version in results["versions"].items())
    note = f"{STEPS} steps on {results['world_size']} ranks, {results['hardware']}; {versions}"
    return Table("", ("recipe", "beside the stock run", "engines"), rows, words=(0, 1, 2), note=note)


if __name__ == "__main__":
    main()
