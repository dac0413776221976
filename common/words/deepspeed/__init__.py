"""DeepSpeed's words: in a script write `from common.words import deepspeed` for `import deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", ...)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

It is started by torchrun, as these engines are. `keys.py` says of every key of the JSON what becomes of it here.
"""

from common.words.deepspeed import accelerator, comm, ops, runtime, utils, zero
from common.words.deepspeed.accelerator import get_accelerator
from common.words.deepspeed.comm import init_distributed
from common.words.deepspeed.engine import Engine
from common.words.deepspeed.initialize import add_config_arguments, initialize
from common.words.deepspeed.refusals import INSTEAD
from common.words.deepspeed.utils import log_dist, logger

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


def __getattr__(name):
    instead = INSTEAD.get(name, f"common.words.deepspeed has {', '.join(__all__)}")
    raise AttributeError(f"DeepSpeed's {name!r} is not here: {instead}")
