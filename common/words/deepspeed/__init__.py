"""DeepSpeed's words: in a script write `from common.words import deepspeed` for `import deepspeed`.

    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, config="ds_config.json", ...)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

It is started by torchrun, as these engines are. `keys.py` says of every key of the JSON what becomes of it here.
"""

from common.words.deepspeed import zero
from common.words.deepspeed.engine import Engine
from common.words.deepspeed.initialize import add_config_arguments, init_distributed, initialize

__all__ = ["Engine", "add_config_arguments", "init_distributed", "initialize", "zero"]
