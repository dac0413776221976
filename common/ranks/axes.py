"""The axes of model parallelism beside an engine's data-parallel group.

With tensor or pipeline parallelism a rank holds a part of the model, and its engine's `process_group` has only the
ranks that hold the same part. What concerns the whole model is agreed on the other axes too: the norm of the gradient,
an overflow, how the engines were built.

    axis        the ranks of a group hold                     they send
    data        the same part of the model                    gradients, parameters: by the engine
    tensor      a piece of each matrix that is cut; the rest  activations: by the model, see `parallel.tensor`
    pipeline    layers that follow each other                 activations: by the schedule
    expert      other experts; it is carved out of data       tokens: by the model, see `parallel.expert`
"""

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.errors import InputError
from common.ranks.agreement import check_agreement
from common.ranks.collectives import Collectives
from common.tensors import host_value

ALIKE = "give tensor ranks the same random numbers: torch.manual_seed(seed + engine.rank)"


class Axes:
    """The axes beside the data-parallel one: what `EngineBase` takes as `model_parallel`.

    Args:
        tensor, pipeline: this rank's process group on that axis; None if the axis has one rank.
        expert: that of the data ranks in a row that hold different experts; see `parallel.expert`.
        whole: names of the parameters that all tensor ranks hold whole, such as norms, with equal values.
        deterministic: add in rank order with NCCL too. gloo always does.

    Attributes:
        tensor, pipeline: `Collectives`, each with a lane and a meter of its own; None for an axis of one rank.
        by_name: {"tensor" and "pipeline": the Collectives}, without axes of one rank.
        part: the name of this rank's part of the model, such as "tensor-0-of-2"; "" if there is one part.
        replica_stride: every so many ranks hold the same experts; 1 without an expert axis.
        experts, elsewhere: names of the parameters of this rank's experts, and of others': see `parallel.expert.split`.
        cuts: how parameters were cut, {name: `parallel.tensor.Cut`}: those that are not whole on the tensor axis, and
            stacks of experts.

    Source: Megatron-LM, arXiv 1909.08053, sec. 3; the names of axes are those of its successor, arXiv 2104.04473.
    """

    def __init__(
        self,
        tensor: dist.ProcessGroup | None = None,
        pipeline: dist.ProcessGroup | None = None,
        whole: Iterable[str] = (),
        deterministic: bool = False,
        expert: dist.ProcessGroup | None = None,
    ) -> None:
        self.tensor = Collectives(tensor, deterministic=deterministic) if tensor else None
        self.pipeline = Collectives(pipeline, deterministic=deterministic) if pipeline else None
        self.expert = Collectives(expert) if expert and dist.get_world_size(expert) > 1 else None
        self.replica_stride = self.expert.size if self.expert else 1
        self.experts, self.elsewhere = set(), set()
        self.whole, self.cuts = set(whole), {}
        named = ("tensor", self.tensor), ("pipeline", self.pipeline)
        self.by_name = {name: comm for name, comm in named if comm is not None}
        self.part = "-".join(f"{name}-{comm.rank}-of-{comm.size}" for name, comm in self.by_name.items())

    def cut_of(self, name: str) -> Any:
        """How a parameter is cut, for checkpoints; None if it is whole, [] if that is not known."""
        return None if self.tensor is None or name in self.whole else self.cuts.get(name, [])

    def mark(self, model: nn.Module) -> None:
        """Note on each parameter whether tensor ranks hold other pieces of it, for buckets of its kind."""
        for name, parameter in model.named_parameters():
            if self.tensor is not None:
                parameter.cut_on_tensor_axis = name not in self.whole
            elif hasattr(parameter, "cut_on_tensor_axis"):  # of an engine before
                del parameter.cut_on_tensor_axis
            parameter.replica_stride = self.replica_stride if name in self.experts else 1
            parameter.stack = 0, 1
            if self.expert is not None and name in self.cuts:
                parameter.stack = self.expert.rank, self.expert.size

    def check(self, model: nn.Module, comm: Collectives) -> None:
        """Refuse a data-parallel group, `comm`, that shares more than this rank with an axis; and unknown names."""
        names = {name for name, _ in model.named_parameters()}
        for unknown in sorted(self.whole - names):
            raise InputError(f"model_parallel= names {unknown!r}, which is no parameter of the model; leave it out")
        if self.expert is not None and self.tensor is not None:
            raise InputError("model_parallel= has a tensor and an expert axis, which are not combined; leave one out")
        if self.expert is not None:
            size, ranks = self.expert.size, dist.get_process_group_ranks(comm.group)
            if dist.get_process_group_ranks(self.expert.group) != ranks[comm.rank // size * size :][:size]:
                raise InputError("expert= is no group of neighbours in process_group=; lay that out as data x expert")
        groups = [set(dist.get_process_group_ranks(one.group)) for one in (comm, *self.by_name.values())]
        if len(set.union(*groups)) < sum(len(group) - 1 for group in groups) + 1:
            raise InputError(
                "process_group= and model_parallel= share ranks; give the group of the ranks that hold the same part "
                "of the model, such as mesh['data'].get_group() of a DeviceMesh"
            )

    @contextlib.contextmanager
    def share_errors(self) -> Iterator[None]:
        """If a block raises an InputError on all ranks of a data-parallel group, all ranks of all axes raise it."""
        caught = None
        try:
            yield
        except InputError as error:
            caught = error
        for comm in self.by_name.values():
            try:
                check_agreement(caught or [], comm, "what a part does alone")
            except InputError as error:
                caught = error
        if caught is not None:
            raise caught

    def agree(self, found: InputError | list[tuple], comm: Collectives, label: str = "the check of the model") -> None:
        """`check_agreement` over the data axis, and over the others of what the parts have in common."""
        with self.share_errors():
            self.agree_on_data_axis(found, comm, label)
        assert isinstance(found, list)  # an error has been raised
        apart = ("parameter ", "the gradient of ", "buffer ", "keep_fp32", "model_parallel")
        whole = {f"{kind}{name!r}" for kind in apart[:2] for name in self.whole}
        options = [line for line in found if not line[0].startswith(apart)]
        for axis, lines in ((self.tensor, [line for line in found if line[0] in whole]), (self.pipeline, [])):
            with self.share_errors():
                if axis is not None:
                    check_agreement(options + lines, axis, label)

    def agree_on_data_axis(self, found: InputError | list[tuple], comm: Collectives, label: str) -> None:
        """`check_agreement` over the data axis: on an expert's parameters, over its replicas."""
        if self.expert is None or isinstance(found, InputError):
            check_agreement(found, comm, label)
            return
        of_experts = [line[0].partition("'")[2].partition("'")[0] in self.experts for line in found]
        for group, wanted in ((comm, False), (comm.replicas(self.replica_stride), True)):
            check_agreement(
                [line for line, is_one in zip(found, of_experts, strict=True) if is_one == wanted], group, label
            )

    def number_of_save(self, comm: Collectives) -> int | None:
        """A number that all parts of a save share, and no other save has; None if there is one part."""
        number = random.SystemRandom().getrandbits(63) if self.by_name else None
        for axis in (comm, *self.by_name.values()) if self.by_name else ():
            number = axis.gather_objects(number, "the number of the save")[0]
        return number

    def combine(self, sums: Tensor, combine: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
        """The sum over all parts of the model of a data-parallel group's sums, a scalar tensor.

        In the order of the tensor ranks, then of the pipeline's; what tensor ranks hold whole counts once.

        Args:
            sums: [1], or with a tensor axis [2]: of parameters that are whole, and of those that are cut. With an
                expert axis [2], too: of other parameters, and of experts.
            combine: adds two numbers; for the infinity norm `torch.maximum`.

        Raises:
            InputError: on every rank: those of what is whole differ between tensor ranks.
        """
        total = sums[0] if self.expert is None else combine(*sums)
        if self.tensor is not None:
            everyones = self.tensor.everyones(sums, "the gradient norm")
            total, whole = everyones[0][0], everyones[:, 0].nan_to_num()
            for of_rank in everyones:
                total = combine(total, of_rank[1])
            total = total.masked_fill((whole != whole[0]).any(), -torch.inf)
        totals = total.view(1) if self.pipeline is None else self.pipeline.everyones(total.view(1), "the gradient norm")
        total, *others = totals.view(-1)
        for other in others:
            total = combine(total, other)
        if self.tensor is not None and host_value((totals == -torch.inf).any(), False):
            raise InputError(f"gradients of what tensor ranks hold whole differ; {ALIKE}")
        return total

    def maximum(self, tensor: Tensor, label: str) -> Tensor:
        """The element-wise maximum of a small tensor over all parts of the model."""
        for comm in self.by_name.values():
            tensor = comm.maximum(tensor, label)
        return tensor


def shape_in_files(parameter: Tensor) -> tuple[int, ...]:
    """Its shape as files have it: the pieces of a stack of experts lie end to end along the first dimension."""
    pieces = getattr(parameter, "stack", (0, 1))[1]
    return (*(size * pieces for size in parameter.shape[:1]), *parameter.shape[1:])


ALONE = Axes()  # there is no other axis
