"""What a rank of several axes sends in a step, by axis and collective, predicted from shapes and routed tokens."""

from collections import Counter

from torch import nn

from common.engine.layout import round_up
from common.models.recompute import KINDS
from parallel.activations import PartitionedActivations
from parallel.expert import ExpertParallel


def predicted(engine, samples, micro_batches=1):
    """Bytes that this rank sends in a step, {axis: {collective: bytes}}, around a zoo model.

    On the expert axis around any that `expert.split` takes, without checkpoints of its own.

    Args:
        engine: built with `model_parallel`; its last step says what the data axis sends. Its layers of experts have
            `routed` the tokens of one step.
        samples: in a micro-batch, on this data rank.
    """
    sent = {"data": engine.predicted_wire_bytes_per_step()}
    for name, on_axis in (("tensor", _on_tensor_axis), ("pipeline", _on_pipeline_axis)):
        comm = getattr(engine.axes, name)
        if comm is not None:
            found = on_axis(engine, comm, samples, micro_batches)
            columns = 1 + (name == "tensor")  # of the norm: whole and cut parameters
            found["all_gather"] += (comm.size - 1) * (8 * columns * engine.takes_norm + 4 * bool(engine.loss_scaler))
            sent[name] = _without_zeros(found)
    if engine.axes.expert is not None:
        sent["expert"] = _without_zeros(_on_expert_axis(engine, micro_batches))
    return sent


def layers_of_experts(model):
    """The layers whose experts `expert.split` has left to several ranks."""
    return [module for module in model.modules() if isinstance(module, ExpertParallel)]


def _without_zeros(found):
    return {collective: nbytes for collective, nbytes in sorted(found.items()) if nbytes}


def _activation(model, samples):
    """Elements between blocks, [samples, length, width]."""
    blocks = [block for block in model.blocks if not isinstance(block, nn.Identity)]
    return blocks, samples * (model.window - 1) * blocks[0].attention.out.out_features


def _on_tensor_axis(engine, comm, samples, micro_batches):
    model = engine.module
    (blocks, elements), others = _activation(model, samples), comm.size - 1
    share = round_up(elements, comm.size) // comm.size * engine.dtype.itemsize
    # In recomputation the first kind stops before a block's last sum, which nothing saves.
    again = {None: 0, KINDS[0]: 1, KINDS[1]: 2}[model.checkpoint_activations]
    sums = len(blocks) * (4 + again) + hasattr(model, "wte") + hasattr(model, "head")
    sent = Counter(all_reduce=micro_batches * sums * 2 * share * others)
    if model.checkpoint_activations and isinstance(model.saving, PartitionedActivations):
        sent["all_gather"] += micro_batches * len(blocks) * share * others
    sent["all_gather"] += micro_batches * 8 * getattr(model, "draws", False) * others  # a checksum of random streams
    if hasattr(model, "head"):  # the loss: two fp32 sums, and the largest logits
        tokens = samples * (model.window - 1)
        sent["all_reduce"] += micro_batches * 2 * 4 * round_up(2 * tokens, comm.size) // comm.size * others
        sent["all_gather"] += micro_batches * 4 * tokens * others
    return sent


def _on_pipeline_axis(engine, comm, samples, micro_batches):
    _, elements = _activation(engine.module, samples)
    each = micro_batches * elements * engine.dtype.itemsize
    return Counter(
        {
            "send activations": each * (comm.rank < comm.size - 1),
            "send gradients": each * (comm.rank > 0),
            "all_gather": 0,
        }
    )


def _on_expert_axis(engine, micro_batches):
    """This rank's tokens leave and their answers return; others' tokens come, and their answers leave here."""
    layers, others = layers_of_experts(engine.module), engine.axes.expert.size - 1
    checkpoints = getattr(engine.module, "checkpoint_activations", None)
    forwards = 1 if checkpoints is None else 2  # either kind recomputes a layer to its end
    widths = [getattr(layer, layer.library.router).weight.shape[1] for layer in layers]
    tokens = sum(layer.routed.total() * width for layer, width in zip(layers, widths, strict=True))
    numbers = micro_batches * sum(layer.number * others for layer in layers)  # int64, one for each of others' experts
    return {"all_to_all": forwards * 8 * numbers, "exchange": (forwards + 1) * engine.dtype.itemsize * tokens}
