"""One rank of several axes: its groups, its part of the model, and its step of torch's pipeline schedule."""

from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B

from common.errors import InputError
from common.ranks.axes import Axes
from parallel import pipeline
from parallel.accounting import predicted
from parallel.tensor import VocabParallelLoss


def groups_of(setting):
    """The data-parallel group and the `Axes` of the rank, in a simulated world.

    Tensor ranks are neighbours, then data ranks, as in `parallel.train`.

    Raises:
        InputError: the degrees do not divide the ranks.
    """
    tensor, stages = setting.tensor, setting.pipeline
    if setting.world_size % (tensor * stages):
        raise InputError(f"--tensor {tensor} --pipeline {stages}: {setting.world_size} ranks cannot be divided so")
    data = setting.world_size // (tensor * stages)
    rest, of_tensor = divmod(setting.rank, tensor)
    stage, of_data = divmod(rest, data)
    ranks = {
        "data": [(stage * data + other) * tensor + of_tensor for other in range(data)],
        "tensor": [(stage * data + of_data) * tensor + other for other in range(tensor)],
        "pipeline": [(other * data + of_data) * tensor + of_tensor for other in range(stages)],
    }
    made = {axis: dist.new_group(own) for axis, own in ranks.items() if axis == "data" or len(own) > 1}
    return made.pop("data"), Axes(**made)


def step_of(engine, setting, step):
    """`step`, or one that runs a stage of 1F1B; a micro-batch of it is one of the setting's."""
    if engine.axes.pipeline is None:
        return step
    if setting.accumulate < setting.pipeline:
        raise InputError(
            f"--accumulate {setting.accumulate}: 1F1B needs a micro-batch for each of {setting.pipeline} stages"
        )
    # torch's stages vote on how they learn of shapes, and read the result: a simulated one has no value.
    known = SimpleNamespace(item=lambda: 1)
    stage, schedules = pipeline.Stage(engine, setting.batch), []

    def run(engine, micro_batches, no_sync, loss):
        if not schedules:
            mean = pipeline.mean(loss, len(micro_batches))
            schedules.append(Schedule1F1B(stage, len(micro_batches), mean, scale_grads=False))
        inputs, targets = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
        with mock.patch.object(pipeline.Stage, "_warmup_backward_result", lambda *_, **__: known):
            schedules[0].step(*[inputs][: stage.is_first], target=targets if stage.is_last else None, losses=[])
        engine.step()

    return run


def loss_on(axes, loss):
    """The loss of a rank's logits."""
    return loss if axes.tensor is None else VocabParallelLoss(axes)


def counted(engine, setting):
    """What the rank sent on the other axes, and what was predicted, as lines of a row."""
    foreseen = predicted(engine, setting.batch, setting.accumulate)
    row = {}
    for axis, comm in engine.axes.by_name.items():
        row |= {
            f"{axis}_bytes_per_step": comm.traffic.by_collective(),
            f"predicted_{axis}_bytes_per_step": foreseen[axis],
        }
    return row
