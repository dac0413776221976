"""`python -m parallel`: train on up to three axes, and print what each rank holds and what it sends on each axis.

    python -m parallel --data 2 --tensor 2 --pipeline 2 --engine stage1_os

Ranks are laid out with tensor ranks in a row, then data ranks, then pipeline stages: a node's ranks share what sends
most. A GPT's head is not tied to its embedding if there are stages.
"""

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
from common.outputs import asked, check_counts, one_line_errors, parser_of, write_json
from common.ranks.axes import Axes
from common.ranks.collectives import Collectives
from common.ranks.world import launch, torchrun_env
from parallel import pipeline, tensor
from parallel.accounting import predicted
from parallel.activations import PartitionedActivations

AXES = ("pipeline", "data", "tensor")  # of the mesh: the last one's ranks are neighbours
SAID = ("", "predicted_")


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train, print and write what was measured."""
    parser = parser_of("parallel", __doc__)
    for axis in ("data", "tensor", "pipeline"):
        parser.add_argument(f"--{axis}", type=int, default=1, metavar="N", help=f"{axis}-parallel ranks")
    parser.add_argument("--engine", default="stage1_os", help="a package that exports Engine (default: %(default)s)")
    parser.add_argument("--model", default="gpt-nano", help="a GPT or Llama of the zoo (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="samples per step in all (default: %(default)s)")
    help_text = "of a step on each data rank (default: two per stage; 1 without stages)"
    parser.add_argument("--micro-batches", type=int, metavar="K", help=help_text)
    parser.add_argument("--precision", default="fp32", help="fp32 (default), bf16 or fp16")
    parser.add_argument("--clip-norm", type=float, help="clip the gradient of the whole model to this norm")
    parser.add_argument(
        "--partition-activations", action="store_true", help="P_a: checkpoints, each rank keeps its part"
    )
    parser.add_argument("--seed", type=int, default=0, help="for weights and samples (default: %(default)s)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than there are GPUs or CPUs")
    options = asked(parser, arguments)
    if options.micro_batches is None:
        options.micro_batches = 1 if options.pipeline == 1 else 2 * options.pipeline
    ranks = options.data * options.tensor * options.pipeline
    check(options, ranks)
    results = launch(train, options, nproc=ranks, oversubscribe=options.oversubscribe)
    if results is not None:
        if options.json:
            write_json(options.json, results)
        tables.show(table(results))


def check(options, ranks):
    """Refuse options that do not fit, before any rank is started."""
    check_counts(options, "data", "tensor", "pipeline", "steps", "micro_batches")
    if torchrun_env() is not None and torchrun_env()[1] != ranks:
        raise InputError(f"--data x --tensor x --pipeline is {ranks}, and torchrun started {torchrun_env()[1]} ranks")
    find_engine(options.engine)
    dtype_of(options.precision)
    model = models.build(options.model)
    if options.batch < 1 or options.batch % (options.data * options.micro_batches):
        raise InputError(
            f"--batch {options.batch}: it cannot be divided into {options.micro_batches} micro-batches on each of "
            f"{options.data} data ranks"
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
    first = {axis: SimpleNamespace(rank=0, size=getattr(options, axis)) for axis in ("tensor", "pipeline")}
    keep_part(
        model, SimpleNamespace(**{axis: comm if comm.size > 1 else None for axis, comm in first.items()}, cuts={})
    )


def keep_part(model, axes):
    """Leave of a model what this rank of the axes holds."""
    if axes.pipeline is not None:
        pipeline.untie(model)
        pipeline.keep_stage(model, axes.pipeline)
    if axes.tensor is not None:
        tensor.split(model, axes)


def train(world, options):
    """Train; return on rank 0 what all ranks held and sent in the last step."""
    mesh = init_device_mesh(world.device.type, [getattr(options, axis) for axis in AXES], mesh_dim_names=AXES)
    axes = Axes(**{axis: mesh[axis].get_group() for axis in ("tensor", "pipeline") if getattr(options, axis) > 1})
    model, init, loss_of = models.build(options.model), models.initial_values(options.seed), models.loss
    keep_part(model, axes)
    if axes.tensor is not None:
        init, loss_of = tensor.cut_init(init, axes), tensor.VocabParallelLoss(axes)
    if options.partition_activations:
        model.checkpoint_activations, model.saving = "non-reentrant", PartitionedActivations(axes)
    engine = find_engine(options.engine)(
        model,
        partial(torch.optim.AdamW, lr=1e-3, fused=True),
        init=init,
        precision=options.precision,
        clip_norm=options.clip_norm,
        process_group=mesh["data"].get_group(),
        model_parallel=axes,
        bucket_mb=0.5,
    )
    samples = options.batch // options.data // options.micro_batches
    schedule, comms = None, {"data": engine.comm, **axes.by_name}
    if axes.pipeline is not None:
        stage = pipeline.Stage(engine, samples)
        mean = pipeline.mean(loss_of, options.micro_batches)
        schedule = Schedule1F1B(stage, options.micro_batches, mean, scale_grads=False)
    batches, losses = Batches(load_text(), model.window, options.batch, options.seed), []
    for number in range(options.steps):
        for comm in comms.values():
            comm.traffic.reset()
        windows = batches.of(number, engine.rank, options.data).to(world.device)
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
        "rank": dict(zip(AXES, mesh.get_coordinate(), strict=True)),
        "parameters": models.count(engine.module),
        "model_state_bytes": engine.model_state_bytes(),
        "predicted_model_state_bytes": engine.predicted_model_state_bytes(),
        "wire_bytes_per_step": {axis: comm.traffic.by_collective() for axis, comm in comms.items()},
        "predicted_wire_bytes_per_step": predicted(engine, samples, options.micro_batches),
        "losses": losses,
    }
    if engine.updates == 0:
        raise InputError(
            f"--steps {options.steps}: every gradient overflowed in fp16, and each lowers the loss scale; take more"
        )
    rows = Collectives().gather_objects(own)
    ends = [row.pop("losses") for row in rows if row["rank"]["pipeline"] == options.pipeline - 1]
    asked_for = {name: getattr(options, name) for name in ("data", "tensor", "pipeline", "micro_batches")}
    return {
        **asked_for,
        **{name: getattr(options, name) for name in ("engine", "model", "batch", "precision", "partition_activations")},
        "hardware": hardware(world.device),
        "losses": [sum(of_step) / len(ends) for of_step in zip(*ends, strict=True)],
        "rows": rows,
    }


def table(results):
    """A line for each rank: its place, what it holds, what it sends on each axis; predictions that differ beside."""
    lines, axes = [], ("data", "tensor", "pipeline")
    for row in results["rows"]:
        held, foreseen = (sum(row[f"{said}model_state_bytes"].values()) for said in SAID)
        cells = [", ".join(map(str, row["rank"].values())), f"{row['parameters']:,}"]
        cells.append(f"{held:,}" if held == foreseen else f"{held:,} (predicted {foreseen:,})")
        for axis in axes:
            sent, to_send = (sum(row[f"{said}wire_bytes_per_step"].get(axis, {}).values()) for said in SAID)
            cells.append(f"{sent:,}" if sent == to_send else f"{sent:,} (predicted {to_send:,})")
        lines.append(cells)
    layout = " x ".join(f"{results[axis]} {axis}" for axis in axes)
    losses = ", ".join(f"{loss:.4f}" for loss in results["losses"])
    header = (", ".join(AXES), "parameters", "model states", *(f"sent on {axis} axis" for axis in axes))
    caption = f"bytes, sent in a step; as predicted, if no prediction stands beside. Losses: {losses}"
    return tables.Table(f"{results['engine']}: {results['model']}, {layout}", header, lines, caption=caption)
