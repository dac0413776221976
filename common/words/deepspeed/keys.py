"""What becomes of each key of DeepSpeed's JSON: *obeyed*, *harmless*, or *refused* by name.

A key is harmless if it cannot change a number here: it is accepted, and the engine lists it once. A refused key is
accepted with the values that ask for nothing. A key that is not in the table is refused, too.

Source: https://www.deepspeed.ai/docs/config-json/
"""

import difflib
from dataclasses import dataclass

from common.errors import InputError
from common.measure.tables import Table

OBEYED, HARMLESS, REFUSED = "obeyed", "harmless", "refused"
AUTO = "auto"


@dataclass(frozen=True)
class Key:
    """A key of the JSON.

    Attributes:
        name: with dots between the sections that it is in.
        kind: OBEYED, HARMLESS or REFUSED.
        words: what it becomes; why it changes nothing; or what to do instead.
        nothing: values of a refused key that ask for nothing. A section asks for nothing where "enabled" is false.
    """

    name: str
    kind: str
    words: str
    nothing: tuple = ()

    def asks_for_nothing(self, value):
        is_off = isinstance(value, dict) and (not value or value.get("enabled") is False)
        return is_off or value in self.nothing


def _all(prefix, kind, rows):
    return [Key(f"{prefix}{name}", kind, words) for name, words in rows.items()]


ZERO = "zero_optimization."
KEYS = [
    *_all(
        "",
        OBEYED,
        {
            "train_batch_size": "samples of a step; must be micro-batch x accumulation x ranks",
            "train_micro_batch_size_per_gpu": "samples of a micro-batch on a rank; what the loader gives",
            "gradient_accumulation_steps": "micro-batches of a step: backward() divides by it, step() counts them",
            "gradient_clipping": "clip_norm; 1.0 where it is left out, and 0 does not clip",
            "steps_per_print": "how often rank 0 prints the step, the rate and the loss scale",
            "optimizer.type": "Adam, AdamW, SGD, Adagrad and others of torch.optim that work element by element",
            "optimizer.params": "its arguments; Adam decouples weight decay unless adam_w_mode is false",
            "scheduler.type": "WarmupLR, WarmupDecayLR, WarmupCosineLR",
            "scheduler.params": "its arguments; the warm-up is logarithmic unless warmup_type is linear",
        },
    ),
    *_all("bf16.", OBEYED, {"enabled": "precision bf16"}),
    *_all(
        "fp16.",
        OBEYED,
        {
            "enabled": "precision fp16",
            "loss_scale": "a fixed scale; 0 adapts it",
            "initial_scale_power": "the first scale is 2 to this power",
            "loss_scale_window": "steps without an overflow after which it doubles",
            "hysteresis": "overflows after which it is halved",
            "min_loss_scale": "it is not halved below this",
        },
    ),
    *_all("fp16.", HARMLESS, {"auto_cast": "floating inputs are cast in any case"}),
    Key("fp16.consecutive_hysteresis", REFUSED, "pardons return after loss_scale_window good steps", (False,)),
    *_all(
        ZERO,
        OBEYED,
        {
            "stage": "the engine: stage0_ddp, stage1_os, stage2_grad or stage3_param",
            "offload_optimizer.device": "cpu: ZeRO-Offload, or in stage 3 a tier of ZeRO-Infinity; nvme: in stage 3",
            "offload_optimizer.nvme_path": "the folder of ZeRO-Infinity's files",
            "offload_param.device": "stage 3: the tier of parameters in ZeRO-Infinity, cpu or nvme",
            "offload_param.nvme_path": "the folder of ZeRO-Infinity's files",
            "cpu_offload": "offload_optimizer.device cpu, in DeepSpeed's older words",
            "reduce_bucket_size": "bucket_mb: 4 bytes for each of its elements; stage 3 has units instead",
            "sub_group_size": "ZeRO-Infinity: elements that are stepped at a time",
            "zero_hpz_partition_size": "ZeRO++: ranks of a node, each of which keeps a second shard",
            "zero_quantized_weights": "ZeRO++: parameters travel in 8 bits",
            "zero_quantized_gradients": "ZeRO++: gradients travel in 4 bits, in two hops",
        },
    ),
    *_all(
        ZERO,
        HARMLESS,
        {
            "contiguous_gradients": "gradients lie in buckets in any case",
            "overlap_comm": "collectives run beside the computation in any case",
            "allgather_partitions": "parameters are all-gathered in any case",
            "allgather_bucket_size": "gathered as they were reduced, bucket by bucket",
            "reduce_scatter": "gradients are reduce-scattered in any case; the sums are the same",
            "round_robin_gradients": "gradients leave in the order of backward",
            "ignore_unused_parameters": "unused parameters have zeros for gradients in any case",
            "elastic_checkpoint": "any stage at any world size reads a checkpoint",
            "load_from_fp32_weights": "masters are kept in fp32, and loaded as such",
            "stage3_prefetch_bucket_size": "the next unit is prefetched",
            "stage3_param_persistence_threshold": "small parameters are sharded, too",
            "stage3_max_live_parameters": "two units are live",
            "stage3_max_reuse_distance": "a unit is freed after its use, but for the one that ends the forward",
            "stage3_gather_16bit_weights_on_model_save": "save_16bit_model gathers them in any case",
            "stage3_gather_fp16_weights_on_model_save": "save_16bit_model gathers them in any case",
            "offload_optimizer.pin_memory": "memory is pinned where there is a GPU",
            "offload_optimizer.buffer_count": "how many buffers stand between the tiers is the engine's",
            "offload_optimizer.buffer_size": "how large they are is the engine's",
            "offload_optimizer.fast_init": "how states are built is the engine's",
            "offload_optimizer.pipeline_read": "reads run ahead in any case",
            "offload_optimizer.pipeline_write": "writes run behind in any case",
            "offload_optimizer.pipeline": "reads run ahead in any case",
            "offload_param.pin_memory": "memory is pinned where there is a GPU",
            "offload_param.buffer_count": "how many buffers stand between the tiers is the engine's",
            "offload_param.buffer_size": "how large they are is the engine's",
            "offload_param.max_in_cpu": "what is kept in memory is the engine's",
        },
    ),
    Key(f"{ZERO}offload_optimizer.ratio", REFUSED, "all of the optimizer is offloaded", (1, 1.0)),
    Key(f"{ZERO}cpu_offload_params", REFUSED, "write offload_param", (False,)),
    Key(f"{ZERO}zero_quantized_nontrainable_weights", REFUSED, "frozen parameters go as they are", (False,)),
    Key(f"{ZERO}mics_shard_size", REFUSED, "states are sharded over all ranks", (-1,)),
    Key(f"{ZERO}mics_hierarchical_params_gather", REFUSED, "states are sharded over all ranks", (False,)),
    *_all(
        "",
        HARMLESS,
        {
            "wall_clock_breakdown": "python -m stage3_param --trace records where the time goes",
            "memory_breakdown": "common.measure.memory's Timeline has bytes by class",
            "dump_state": "nothing is dumped",
            "zero_allow_untested_optimizer": "any optimizer that works element by element is taken",
            "zero_force_ds_cpu_optimizer": "the host steps by torch's own optimizers",
            "aio": "how a disk is read is the engine's",
        },
    ),
    *[
        Key(name, REFUSED, words, nothing)
        for name, words, nothing in [
            ("activation_checkpointing", "checkpoint activations in the model: torch.utils.checkpoint", ()),
            ("prescale_gradients", "gradients are added up, and then divided by the ranks", (False,)),
            ("gradient_predivide_factor", "gradients are added up, and then divided by the ranks", (1, 1.0)),
            ("sparse_gradients", "buckets hold dense gradients", (False,)),
            ("communication_data_type", "gradients travel in the precision of the parameters", (None,)),
            ("data_types", "gradients are accumulated in fp32", ({"grad_accum_dtype": "fp32"},)),
            ("amp", "write bf16 or fp16", ()),
            ("torch_autocast", "write bf16 or fp16", ()),
            ("tensorboard", "log what you need in your loop", ()),
            ("wandb", "log what you need in your loop", ()),
            ("csv_monitor", "log what you need in your loop", ()),
            ("comet", "log what you need in your loop", ()),
            ("flops_profiler", "torch.utils.flop_counter counts them", ()),
            ("curriculum_learning", "choose the samples in your loop", ()),
            ("data_efficiency", "choose the samples in your loop", ()),
            ("progressive_layer_drop", "drop layers in your model", ()),
            ("eigenvalue", "there is nothing of the kind here", ()),
            ("quantize_training", "there is nothing of the kind here", ()),
            ("compression_training", "there is nothing of the kind here", ()),
            ("sparse_attention", "write it in your model", ()),
            ("elasticity", "any world size reads a checkpoint; choose the batch yourself", ()),
            ("autotuning", "python -m common.plan says what fits", ()),
            ("pipeline", "engines are data-parallel alone", ()),
            ("tensor_parallel", "engines are data-parallel alone", ()),
            ("checkpoint", "checkpoints have one form", ()),
        ]
    ],
]
BY_NAME = {key.name: key for key in KEYS}
TAKES = {  # types of value -> how they are called, and the obeyed keys that take them, by the ends of their names
    (bool,): ("true or false", ("enabled", "cpu_offload", "zero_quantized_weights", "zero_quantized_gradients")),
    (str,): ("a text", ("type", "nvme_path")),
    (dict,): ("an object", ("params",)),
    (int,): ("a whole number", ("batch_size", "_gpu", "_steps", "_print", "_power", "_window", "hysteresis", "stage")),
    (int, float): ("a number", ("bucket_size", "group_size", "partition_size", "_clipping", "_scale")),
}
SECTIONS = {name.rsplit(".", depth)[0] for name in BY_NAME for depth in range(1, name.count(".") + 1)}


def table():
    """All keys, for a page."""
    rows = [(f"`{key.name}`", key.kind, key.words) for key in KEYS]
    return Table("", ("key", "here it is", "because, or as"), rows, words=(0, 1, 2))


def classified(config):
    """The keys of a configuration, checked.

    Args:
        config: DeepSpeed's JSON, as a dict.

    Returns:
        {name: value} of the keys that are obeyed, and the names of those that are harmless.

    Raises:
        InputError: a key is refused, or unknown; it names it.
    """
    obeyed, harmless = {}, []
    for name, value in _flat(config):
        key = BY_NAME.get(name)
        if key is None:
            like = difflib.get_close_matches(name, BY_NAME, 1)
            hint = f"; did you mean {like[0]!r}?" if like else "; leave it out"
            raise InputError(f"the configuration's {name!r} is unknown here{hint}")
        if key.kind == REFUSED and not key.asks_for_nothing(value):
            raise InputError(f"the configuration's {name!r}: {value!r} is refused: {key.words}")
        if key.kind == OBEYED and value is not None:
            check_value(name, value)
            obeyed[name] = value
        elif key.kind != OBEYED:  # an obeyed one that is null is as good as left out
            harmless.append(name)
    return obeyed, harmless


def check_value(name, value):
    """Refuse a value of another type than an obeyed key takes."""
    for types, (told, ends) in TAKES.items():
        if value != AUTO and name.endswith(ends):
            fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            if not fits or (int in types and not value >= 0):
                least = " from 0 on" if int in types else ""
                raise InputError(f"the configuration's {name!r} is {value!r}; give {told}{least}")


def _flat(section, prefix=""):
    """(dotted name, value) of each key of the table, however deep; of keys that are in none as far as sections go."""
    for name, value in section.items():
        if f"{prefix}{name}" in SECTIONS and isinstance(value, dict | None):
            yield from _flat(value or {}, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
