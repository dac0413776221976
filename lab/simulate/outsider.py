"""The books of an engine that keeps none: what it holds by class, and what it sends, read from torch's operations."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from common.measure.timeline import PHASES
from common.measure.traffic import Traffic
from common.tensors import tensors_in, tensors_of_state

# What torch's names of operations have in them -> the meter's, and how often a rank sends its N-1 parts of N.
SENT = {
    "allreduce": ("all_reduce", 2),
    "allgather": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
}


class Outsider(TorchDispatchMode):
    """What `Moments` and a table ask of an engine, for one with `module` and `optimizer`, but no `live()` or `comm`.

    A context manager around what is to be counted. Collectives count by the law of common.measure.traffic; broadcasts
    and messages between two ranks do not.
    """

    def __init__(self, engine):
        super().__init__()
        self.engine, self.comm = engine, SimpleNamespace(traffic=Traffic())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        sent = next((SENT[kind] for kind in SENT if kind in function.__name__), None)
        if function.namespace == "profiler" and isinstance(args[0], str) and args[0] in PHASES:  # common.loop's labels
            self.comm.traffic.phase = args[0]
        elif function.namespace == "c10d" and sent is not None:
            group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
            whole = max(sum(tensor.nbytes for tensor in tensors_in(arg)) for arg in args)
            collective, times = sent
            self.comm.traffic.record(collective, times * whole * (group.size() - 1) // group.size())
        return function(*args, **(kwargs or {}))

    def live(self):
        """See `EngineBase.live`; what it has besides counts as activations."""
        parameters = list(self.engine.module.parameters())
        return {
            "parameters": list(map(_local, parameters)),
            "gradients": [_local(p.grad) for p in parameters if p.grad is not None],
            "optimizer": list(map(_local, tensors_of_state(self.engine.optimizer))),
        }


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
