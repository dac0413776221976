"""Pipeline parallelism: a rank holds consecutive blocks, and micro-batches go from one stage to the next and back.

The schedule is torch's, from `torch.distributed.pipelining`: `Stage` lets an engine be one of its stages. Each backward
of the schedule is one of the engine's; with stages 0 and 1 only that of the last micro-batch reduces. Stages 2 and 3
reduce in every one, as they keep no whole gradient, and stage 3 gathers as often.

    axes = Axes(pipeline=mesh["pipeline"].get_group())
    keep_stage(model, axes.pipeline)
    engine = Engine(model, ..., process_group=mesh["data"].get_group(), model_parallel=axes)
    stage = Stage(engine, samples)
    schedule = Schedule1F1B(stage, micro_batches, mean(loss_of, micro_batches), scale_grads=False)
    schedule.step(inputs)                                on the first stage
    schedule.step(target=targets, losses=losses)         on the last stage
    schedule.step()                                      on the others
    engine.step()

Source: GPipe, arXiv 1811.06965; 1F1B: Megatron-LM, arXiv 2104.04473, sec. 2.2.
"""

from contextlib import nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from common.engine import EngineBase
from common.errors import InputError
from common.models.recompute import run_blocks


def untie(model):
    """Give a GPT's head a weight of its own: tied, it would be on the first and on the last stage."""
    if model.head.weight is model.wte.weight:
        tied = model.wte.weight
        model.head.weight = nn.Parameter(tied.detach().clone(), tied.requires_grad)


def keep_stage(model, comm):
    """Leave of a zoo model's blocks those of this pipeline rank, in place; the first also embeds, the last predicts.

    Parameters keep their names. If the ranks do not divide the layers, embedding and head may count as one each: BLOOM
    (arXiv 2211.05100, sec. 3.4) has 70 layers on 12 stages, 5 on the first and on the last.

    Raises:
        InputError: the ranks do not divide the layers, or the head is tied to the embedding.
    """
    layers, first, last = len(model.blocks), comm.rank == 0, comm.rank == comm.size - 1
    ends = 1 if layers % comm.size else 0
    each, rest = divmod(layers + 2 * ends, comm.size)
    if rest or each <= ends:
        raise InputError(f"{comm.size} pipeline ranks do not divide the {layers} layers")
    if model.head.weight is model.wte.weight:
        raise InputError(
            "the head is tied to the embedding, and they are on different stages; write pipeline.untie(model)"
        )
    own = range(layers)[max(0, comm.rank * each - ends) : (comm.rank + 1) * each - ends]
    for number in set(range(layers)) - set(own):
        model.blocks[number] = nn.Identity()  # keeps the others' names
    for name in (() if first else ("wte", "wpe")) + (() if last else ("ln_f", "norm_f", "head")):
        if hasattr(model, name):
            delattr(model, name)
    model.forward = partial(_forward, model, [model.blocks[number] for number in own], first, last)


def _forward(model, blocks, first, last, x):
    x = run_blocks(blocks, model.embed(x) if first else x, model.checkpoint_activations, model.saving)
    return model.predict(x) if last else x


def mean(loss_of, micro_batches):
    """`loss_of(outputs, targets)` over the number of micro-batches: a schedule finds no gradients to divide."""
    return lambda outputs, targets: loss_of(outputs, targets) / micro_batches


class _Forward(nn.Module):
    """An engine's forward, as the module of a stage. A schedule finds no parameter whose gradient it could divide."""

    def __init__(self, engine):
        super().__init__()
        self.run = (engine,)  # not a submodule

    def forward(self, *inputs):
        return self.run[0](*inputs)


class Stage(PipelineStage):
    """An engine as a stage of torch's schedules for one stage per rank, such as Schedule1F1B and ScheduleGPipe.

    Args:
        engine: built with `model_parallel`, its model from `keep_stage`.
        samples: in a micro-batch.

    Raises:
        InputError: it is no engine, or has no pipeline axis; or a stage has nothing to train, on all ranks.
    """

    def __init__(self, engine, samples):
        if not isinstance(engine, EngineBase) or engine.axes.pipeline is None:
            raise InputError("a stage runs an engine built with model_parallel=Axes(pipeline=group), not its module")
        with engine.axes.share_errors():
            engine.guards.gradients()
        self.engine, comm, model = engine, engine.axes.pipeline, engine.module
        block = next(block for block in model.blocks if not isinstance(block, nn.Identity))
        shape = samples, model.window - 1, block.attention.out.out_features
        first, last = comm.rank == 0, comm.rank == comm.size - 1
        x = torch.empty(shape, dtype=engine.dtype, device="meta", requires_grad=True)
        tokens = torch.empty(shape[:2], dtype=torch.int64, device="meta")
        out = x.new_empty((*shape[:2], len(model.head.weight)), requires_grad=True) if last else x
        super().__init__(
            _Forward(engine), comm.rank, comm.size, engine.comm.device, tokens if first else x, out, group=comm.group
        )

    def forward_one_chunk(self, fwd_chunk_id, args, *others, **named):
        """Run the forward of a micro-batch; called by the schedule. torch 2.11 refuses inputs with gaps."""
        args = [one.clone(memory_format=torch.contiguous_format) for one in args]
        return super().forward_one_chunk(fwd_chunk_id, tuple(args), *others, **named)

    def backward_one_chunk(self, bwd_chunk_id, loss=None, full_backward=True, last_backward=False):
        """Run the backward of a micro-batch as one of the engine's; called by the schedule."""
        outputs = [loss] if self.is_last else self.fwd_cache[bwd_chunk_id][0]
        with nullcontext() if last_backward else self.engine.no_sync(), self.engine.receiving_gradients(outputs):
            loss = self.engine.scaled(loss) if self.is_last else None
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def get_fwd_send_ops(self, fwd_chunk_id):
        """The messages with a micro-batch's activations, counted."""
        return self._count("send activations", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id):
        """The messages with the gradients of these, counted."""
        return self._count("send gradients", super().get_bwd_send_ops(bwd_chunk_id))

    def _count(self, what, operations):
        for operation in operations:
            self.engine.axes.pipeline.traffic.record(what, operation.tensor.nbytes, operation.tensor.nbytes)
        return operations
