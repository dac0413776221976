"""DeepSpeed's API: in a script write `from interop import deepspeed` for `import deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", ...)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

torchrun starts the script, as for these engines. `keys.py` says what every key of the JSON does here.
"""

from interop.deepspeed import accelerator, comm, ops, runtime, utils, zero
from interop.deepspeed.accelerator import get_accelerator
from interop.deepspeed.comm import init_distributed
from interop.deepspeed.engine import Engine
from interop.deepspeed.initialize import add_config_arguments, initialize
from interop.deepspeed.refusals import INSTEAD, missing
from interop.deepspeed.utils import log_dist, logger

DeepSpeedEngine = Engine

__all__ = [
    "DeepSpeedEngine",
    "Engine",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]

_deeper = (ops.adam, runtime.dataloader, runtime.lr_schedules, runtime.utils)
for _module in (accelerator, ops, runtime, utils, zero, *_deeper):
    _module.__getattr__ = missing(_module.__name__.removeprefix(f"{__name__}."))  # the rest of DeepSpeed's


def __getattr__(name):
    instead = INSTEAD["missing"].get(name, f"interop.deepspeed has {', '.join(__all__)}")
    raise AttributeError(f"DeepSpeed's {name!r} is not here: {instead}")
