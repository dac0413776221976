"""DeepSpeed's words: in a script write `from common.words import deepspeed` for `import deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", ...)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

It is started by torchrun, as these engines are. `keys.py` says of every key of the JSON what becomes of it here.
"""

from common.words.deepspeed import comm, ops, utils, zero
from common.words.deepspeed.engine import Engine
from common.words.deepspeed.initialize import add_config_arguments, initialize
from common.words.taking import init_distributed

DeepSpeedEngine = Engine

__all__ = [
    "DeepSpeedEngine",
    "Engine",
    "add_config_arguments",
    "comm",
    "init_distributed",
    "initialize",
    "ops",
    "utils",
    "zero",
]


def __getattr__(name):
    raise AttributeError(f"DeepSpeed's {name!r} is not here: common.words.deepspeed has {', '.join(__all__)}")
