"""What DeepSpeed has and its words here have not: each name, and each argument, is refused by name."""

from common.errors import InputError

DATA_PARALLEL = "engines are data-parallel alone"
INSTEAD = {  # name -> what to write
    "init_inference": "train here, and serve the file that interop.export writes elsewhere",
    "PipelineModule": DATA_PARALLEL,
    "pipe": DATA_PARALLEL,
    "tp_model_init": DATA_PARALLEL,
    "moe": "write the experts in your model",
    "checkpointing": "checkpoint activations in the model: torch.utils.checkpoint",
    "OnDevice": "build the model with torch.device('meta'), and give an engine init=",
    "safe_get_full_fp32_param": "read the weight within zero.GatheredParameters",
    "safe_set_full_fp32_param": "write the weight within zero.GatheredParameters(..., modifier_rank=0)",
    "safe_get_full_grad": "register_hook() of the parameter sees this rank's gradient, before the mean",
    "set_z3_leaf_modules": "leave it out: a block is gathered as a whole, with the experts in it",
    "LRRangeTest": "write a scheduler of torch's, and pass lr_scheduler=",
    "OneCycle": "torch.optim.lr_scheduler has OneCycleLR; pass lr_scheduler=",
}


def missing(module):
    """A `__getattr__` for one of the modules here."""

    def refuse(name):
        instead = INSTEAD.get(name, "see interop/DEEPSPEED.md")
        raise AttributeError(f"DeepSpeed's {module}.{name} is not here: {instead}")

    return refuse


def refuse_arguments(word, instead, **given):
    """An InputError names an argument that asks for something: one that is not None, false, 0 or empty."""
    for name, value in given.items():
        if value:
            raise InputError(f"{word}({name}={value!r}) is refused: {instead}")
