"""Before training: a model leaves the meta device, and every parameter gets its first values."""

import torch
from torch import nn

from common.engine.tensors import checksum


class InitialValues:
    """Where parameters and buffers get their first values: from the model as it was built, or from `init`.

    Args:
        module: its parameters on the meta device make room for others, which have a shape, but no storage yet.
        param_groups: dicts, which follow.
        init: see `EngineBase`.
        comm: its `Collectives`.

    Attributes:
        filled: what all ranks must agree on: (what it is, its checksum, how to mend a difference).
    """

    def __init__(self, module, param_groups, init, comm):
        self._module, self._init, self._comm = module, init, comm
        self.filled = []
        self._missing = {name for name, parameter in module.named_parameters() if parameter.is_meta}
        real = {}  # meta parameter -> the one in its place: what was one object stays one object
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if parameter not in real:
                        nothing = torch.empty((), dtype=parameter.dtype, device=comm.device)
                        real[parameter] = nn.Parameter(nothing.expand(parameter.shape), parameter.requires_grad)
                    part._parameters[name] = real[parameter]
        for group in param_groups:
            group["params"] = [real.get(parameter, parameter) for parameter in group["params"]]

    def of(self, bucket):
        """The first values of a bucket's parameters, unrounded: a flat tensor, padded with zeros."""
        dtype = bucket.kind.dtype
        exact = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        whole = torch.zeros(bucket.padded_numel, dtype=exact, device=self._comm.device)
        with torch.no_grad():
            for name, parameter in bucket.members.items():
                if name in self._missing:
                    self._fill(f"parameter {name!r}", name, bucket.view(whole, name))
                else:
                    bucket.view(whole, name).copy_(parameter)
        return whole

    def place_buffers(self):
        """Put buffers of the group's device in the places of meta ones."""
        for module_name, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self._comm.device)
                    qualified = f"{module_name}.{name}" if module_name else name
                    self._fill(f"buffer {qualified!r}", qualified, module._buffers[name])

    def _fill(self, what, name, tensor):
        self._init(name, tensor)
        if not self._comm.simulated:
            self.filled.append((what, checksum(tensor), "init= must fill it alike on every rank"))


def adopt_states(optimizer, buckets):
    """Move the states that an optimizer makes with its first breath, such as Adagrad's, to where their pieces lie."""
    for piece in (piece for bucket in buckets for piece in bucket.pieces):
        piece.adopt(optimizer.state.get(piece.master, {}))
