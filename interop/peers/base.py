"""What peers share: the part of an engine's API that does not depend on the library."""

import contextlib

import torch
from torch import nn

from common.measure.memory import storage_bytes
from common.tensors import tensors_of_state


class Peer:
    """A library behind an engine's API.

    Attributes:
        name: its name in tables.
        settings: how it is run, in one line.
        follows: the stage whose byte formulas apply to it.
        precisions: those that it runs in.
        module, optimizer, clip_norm: as an engine has them.
    """

    name = follows = settings = ""
    precisions = ("fp32",)
    _state_bytes = None

    @classmethod
    def versions(cls):
        """The libraries behind it: {name: version}."""
        return {"torch": torch.__version__}

    @classmethod
    def check_precision(cls, precision, why):
        """A NotImplementedError for a precision that is not among `precisions`; `why` says what the library lacks."""
        if precision not in cls.precisions:
            raise NotImplementedError(f"{cls.name} is run in {' and '.join(cls.precisions)} only: {why}")

    def train(self, mode=True):
        """Set the module's training mode."""
        self.module.train(mode)
        return self

    def eval(self):
        """Set the module's evaluation mode."""
        return self.train(False)

    def synchronize(self):
        """Return when the module's parameters may be read: a peer's step has waited for them."""

    @contextlib.contextmanager
    def gathered(self, *modules):
        """A context in which the weights of `modules` (all, if none is named) are whole: here they always are."""
        yield

    def note_states(self, parameters, gradients):
        """Count the tensors held just before an update, each storage once; None counts nothing."""
        self._state_bytes = {"parameters": storage_bytes(parameters), "gradients": storage_bytes(gradients)}

    def optimizer_tensors(self):
        """The tensors that the optimizer keeps between steps, a master included."""
        return tensors_of_state(self.optimizer)

    def model_state_bytes(self):
        """Bytes of model states on this rank, counted from live storages: parameters, gradients, optimizer.

        Parameters and gradients as they stood just before the last update, the optimizer's states as it left them.
        None before the first step.
        """
        if self._state_bytes is None:
            return None
        return {**self._state_bytes, "optimizer": storage_bytes(self.optimizer_tensors())}

    def full_state_dict(self):
        """The weights, on the CPU: here every rank has them all."""
        return {name: tensor.detach().cpu().clone() for name, tensor in self.module.state_dict().items()}

    def save(self, path, extra=None):
        """Not offered: a NotImplementedError."""
        raise NotImplementedError(f"{self.name} has a checkpoint format of its own, which the engines do not read")

    def load(self, path):
        """Not offered: a NotImplementedError."""
        raise NotImplementedError(f"{self.name} has a checkpoint format of its own and does not read the engines'")


def regroup(param_groups, names, model):
    """`param_groups`, or None, with new parameters in place of the old ones, {old parameter: its name}."""
    if param_groups is None:
        return None
    now = dict(model.named_parameters())
    return [{**group, "params": [now[names[parameter]] for parameter in group["params"]]} for group in param_groups]


def blocks(module):
    """The elements, with parameters, of the outermost ModuleLists and Sequentials."""
    is_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for child in module.children():
        if not is_list or isinstance(child, nn.ModuleList):
            yield from blocks(child)
        elif any(True for _ in child.parameters()):
            yield child
