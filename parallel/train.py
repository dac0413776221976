"""`python -m parallel`: train on several axes, and print what each rank holds and what it sends on each axis.

    python -m parallel --data 2 --tensor 2 --pipeline 2 --engine stage1_os
    python -m parallel --data 2 --expert 2

Ranks are laid out with tensor ranks in a row, then data ranks, then pipeline stages: a node's ranks share what sends
most. A GPT's head is not tied to its embedding if there are stages. Expert ranks are data ranks in a row: with
--expert E there are --data R replicas of each expert, and R x E ranks have samples of their own.
"""

import math
from collections import Counter
from functools import partial
from types import SimpleNamespace

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

from common import models
from common.data import Batches, load_text
from common.engine.mixed_precision import dtype_of
from common.engines import find_engine
from common.errors import InputError
from common.loop import train_step
from common.measure import tables
from common.measure.hardware import hardware
from common.models.recompute import KINDS
from common.outputs import asked, check_counts, one_line_errors, parser_of, write_json
from common.ranks.axes import Axes
from common.ranks.collectives import Collectives
from common.ranks.world import launch, torchrun_env
from parallel import expert, pipeline, tensor
from parallel.accounting import layers_of_experts, predicted
from parallel.activations import PartitionedActivations

AXES = ("data", "tensor", "pipeline", "expert")
WITH_EXPERTS = ("data", "expert")
SAID = ("", "predicted_")


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train, print and write what was measured."""
    parser = parser_of("parallel", __doc__)
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{axis}-parallel ranks")
    parser.add_argument("--engine", default="stage1_os", help="a package that exports Engine (default: %(default)s)")
    parser.add_argument("--model", help="a GPT or Llama of the zoo (default: gpt-nano; with --expert moe-nano)")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="samples per step in all (default: %(default)s)")
    help_text = "of a step on each data rank (default: two per stage; 1 without stages)"
    parser.add_argument("--micro-batches", type=int, metavar="K", help=help_text)
    parser.add_argument("--precision", default="fp32", help="fp32 (default), bf16 or fp16")
    parser.add_argument("--clip-norm", type=float, help="clip the gradient of the whole model to this norm")
    kind = {"nargs": "?", "const": KINDS[0], "metavar": "KIND"}
    help_text = f"recompute each block in backward: {KINDS[0]} (default) or {KINDS[1]}"
    parser.add_argument("--checkpoint-activations", **kind, help=help_text)
    parser.add_argument(
        "--partition-activations", action="store_true", help="P_a: checkpoints, each rank keeps its part"
    )
    parser.add_argument("--seed", type=int, default=0, help="for weights and samples (default: %(default)s)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than there are GPUs or CPUs")
    options = asked(parser, arguments)
    if options.micro_batches is None:
        options.micro_batches = 1 if options.pipeline == 1 else 2 * options.pipeline
    options.model = options.model or ("gpt-nano" if options.expert == 1 else "moe-nano")
    ranks = math.prod(getattr(options, axis) for axis in AXES)
    check(options, ranks)
    results = launch(train, options, nproc=ranks, oversubscribe=options.oversubscribe)
    if results is not None:
        if options.json:
            write_json(options.json, results)
        tables.show(table(results))


def check(options, ranks):
    """Refuse options that do not fit, before any rank is started."""
    check_counts(options, *AXES, "steps", "micro_batches")
    if torchrun_env() is not None and torchrun_env()[1] != ranks:
        raise InputError(f"the axes given have {ranks} ranks, and torchrun started {torchrun_env()[1]}")
    if options.expert > 1 and max(options.tensor, options.pipeline) > 1:
        raise InputError("--expert is not combined with --tensor, and untried with --pipeline; leave these out")
    find_engine(options.engine)
    dtype_of(options.precision)
    model, data = build(options), options.data * options.expert
    if options.batch < 1 or options.batch % (data * options.micro_batches):
        raise InputError(
            f"--batch {options.batch}: it cannot be divided into {options.micro_batches} micro-batches on each of "
            f"{data} data ranks"
        )
    if options.micro_batches < options.pipeline:
        raise InputError(
            f"--micro-batches {options.micro_batches}: 1F1B needs one for each of the {options.pipeline} stages"
        )
    if options.partition_activations and options.tensor == 1:
        raise InputError(
            "--partition-activations: all ranks of a tensor axis share what checkpoints save; add --tensor"
        )
    if max(options.tensor, options.pipeline) > 1 and not hasattr(model, "predict"):
        raise InputError(f"--model {options.model}: the zoo's GPTs and Llamas alone can be split")
    first = {axis: SimpleNamespace(rank=0, size=getattr(options, axis)) for axis in AXES[1:]}
    present = {axis: comm if comm.size > 1 else None for axis, comm in first.items()}
    keep_part(model, SimpleNamespace(**present, cuts={}, experts=set()))


def build(options):
    """The whole model, on the meta device."""
    return models.build(options.model, checkpoint_activations=options.checkpoint_activations)


def keep_part(model, axes):
    """Leave of a model what this rank of the axes holds."""
    if axes.pipeline is not None:
        pipeline.untie(model)
        pipeline.keep_stage(model, axes.pipeline)
    if axes.tensor is not None:
        tensor.split(model, axes)
    if axes.expert is not None:
        expert.split(model, axes)


def train(world, options):
    """Train; return on rank 0 what all ranks held and sent in the last step."""
    names = WITH_EXPERTS if options.expert > 1 else ("pipeline", "data", "tensor")  # the last one's are neighbours
    mesh = init_device_mesh(world.device.type, [getattr(options, axis) for axis in names], mesh_dim_names=names)
    axes = Axes(**{axis: mesh[axis].get_group() for axis in names if axis != "data" and getattr(options, axis) > 1})
    model, init, loss_of = build(options), models.initial_values(options.seed), models.loss
    keep_part(model, axes)
    if axes.tensor is not None:
        init, loss_of = tensor.cut_init(init, axes), tensor.VocabParallelLoss(axes)
    if options.partition_activations:
        model.checkpoint_activations = model.checkpoint_activations or KINDS[0]
        model.saving = PartitionedActivations(axes)
    engine = find_engine(options.engine)(
        model,
        partial(torch.optim.AdamW, lr=1e-3, fused=True),
        init=init,
        precision=options.precision,
        clip_norm=options.clip_norm,
        process_group=mesh["data"].get_group() if axes.expert is None else None,  # else all ranks are data ranks
        model_parallel=axes,
        bucket_mb=0.5,
    )
    samples = options.batch // engine.world_size // options.micro_batches
    schedule, comms, layers = None, {"data": engine.comm, **axes.by_name}, layers_of_experts(model)
    if axes.expert is not None:
        comms["expert"] = axes.expert
    if axes.pipeline is not None:
        stage = pipeline.Stage(engine, samples)
        mean = pipeline.mean(loss_of, options.micro_batches)
        schedule = Schedule1F1B(stage, options.micro_batches, mean, scale_grads=False)
    batches, losses = Batches(load_text(), model.window, options.batch, options.seed), []
    for number in range(options.steps):
        for comm in comms.values():
            comm.traffic.reset()
        for layer in layers:
            layer.routed.clear()
        windows = batches.of(number, engine.rank, engine.world_size).to(world.device)
        if schedule is None:
            parts = [model.inputs_and_targets(part) for part in windows.chunk(options.micro_batches)]
            loss, _ = train_step(engine, parts, no_sync=True, loss_of=loss_of)
            losses.append(loss.item())
        else:
            inputs, targets = model.inputs_and_targets(windows)
            of_parts = []  # of the last stage
            schedule.step(*[inputs][: stage.is_first], target=targets if stage.is_last else None, losses=of_parts)
            engine.step()
            losses.append(sum(loss.item() for loss in of_parts))
    own = {
        "rank": dict(zip(names, mesh.get_coordinate(), strict=True)),
        "parameters": models.count(engine.module),
        "model_state_bytes": engine.model_state_bytes(),
        "predicted_model_state_bytes": engine.predicted_model_state_bytes(),
        "wire_bytes_per_step": {axis: comm.traffic.by_collective() for axis, comm in comms.items()},
        "predicted_wire_bytes_per_step": predicted(engine, samples, options.micro_batches),
        "routed": sum((layer.routed for layer in layers), Counter()),
        "losses": losses,
    }
    if engine.updates == 0:
        raise InputError(
            f"--steps {options.steps}: every gradient overflowed in fp16, and each lowers the loss scale; take more"
        )
    rows = Collectives().gather_objects(own)
    ends = [row.pop("losses") for row in rows if row["rank"].get("pipeline", 0) == options.pipeline - 1]
    kept = ("engine", "model", "batch", "precision", "checkpoint_activations", "partition_activations")
    return {
        **{name: getattr(options, name) for name in (*AXES, "micro_batches", *kept)},
        "hardware": hardware(world.device),
        "losses": [sum(of_step) / len(ends) for of_step in zip(*ends, strict=True)],
        "rows": rows,
    }


def table(results):
    """A line for each rank: its place, what it holds, what it sends on each axis; predictions that differ beside."""
    lines, axes = [], AXES[:3] if results["expert"] == 1 else WITH_EXPERTS
    tokens = {"tokens out": "sent", "tokens in": "received"} if results["expert"] > 1 else {}
    for row in results["rows"]:
        pairs = [[sum(row[f"{said}model_state_bytes"].values()) for said in SAID]]
        for axis in axes:
            pairs.append([sum(row[f"{said}wire_bytes_per_step"].get(axis, {}).values()) for said in SAID])
        cells = [", ".join(map(str, row["rank"].values())), f"{row['parameters']:,}"]
        cells += [f"{found:,}" + f" (predicted {told:,})" * (found != told) for found, told in pairs]
        lines.append(cells + [f"{row['routed'][name]:,}" for name in tokens.values()])
    layout = " x ".join(f"{results[axis]} {axis}" for axis in axes)
    losses = ", ".join(f"{loss:.4f}" for loss in results["losses"])
    places = ", ".join(results["rows"][0]["rank"])
    header = (places, "parameters", "model states", *(f"sent on {axis} axis" for axis in axes), *tokens)
    caption = f"bytes, sent in a step; as predicted, if no prediction stands beside. Losses: {losses}"
    if tokens:
        again = ", recomputation" if results["checkpoint_activations"] else ""
        caption += f"\ntokens: to other ranks and from them; each goes there and back in forward{again} and backward"
    return tables.Table(f"{results['engine']}: {results['model']}, {layout}", header, lines, caption=caption)
