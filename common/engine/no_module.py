"""An engine is no nn.Module, and is tied to its ranks: who takes it for a model is told what to write."""

from common.errors import InputError


class Instead:
    """A name that an engine has not.

    Args:
        words: what to write in its place.
    """

    def __init__(self, words):
        self._words = words

    def __set_name__(self, owner, name):
        self._name = name

    def __get__(self, engine, owner=None):
        raise AttributeError(f"an engine has no {self._name!r}: {self._words}")


class NoModule:
    """What engines refuse."""

    parameters = Instead("write engine.module.parameters()")
    named_parameters = Instead("write engine.module.named_parameters()")
    state_dict = Instead("write engine.full_state_dict(), or engine.save(path)")
    load_state_dict = Instead("write engine.load(path), or engine.load_weights(file)")
    to = Instead("move the model before the engine is built; precision= of the engine is what casts it")

    def __reduce__(self):
        raise InputError(
            "an engine cannot be copied or pickled: it is one rank's part of several; copy engine.module within "
            "engine.gathered(), or write engine.save(path)"
        )
