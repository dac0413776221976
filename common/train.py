"""The training command of every stage: `python -m stage2_grad`, alone or under torchrun."""

import importlib
import json
import os
import statistics
import time
from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from common import models, optim, outputs
from common.checkpoint import runs
from common.checkpoint.runs import OPTIONS
from common.data import Batches, load_text
from common.engine.mixed_precision import dtype_of
from common.engines import find_engine
from common.errors import InputError
from common.generate import generate
from common.loop import choose_exact_kernels, finish, sha256, train_step
from common.measure import tables
from common.measure.hardware import cpus, hardware
from common.measure.memory import Timeline
from common.measure.timeline import Recording, overlap
from common.ranks.agreement import together
from common.ranks.nodes import check_ranks_per_node
from common.ranks.world import launch, torchrun_env
from common.report import lines_of
from common.tiers.activations import HostActivations, predicted_moves

WARM_UP = 2  # steps that a throughput does not count
TRACED = 2  # steps in a trace: collectives that the first leaves in flight overlap with the second


@outputs.one_line_errors()
def main(package, arguments=None, add_own=None):
    """Entry of `python -m <package>`: parse the arguments, train, print what was measured.

    Args:
        package: the name of a package that exports `Engine`.
        add_own: `add_own(parser)` adds this package's own options, and returns a function from the parsed options to
            the engine's name and its keyword arguments, {name: value}; that raises InputError for invalid options.
    """
    parser = outputs.parser_of(package, importlib.import_module(package).__doc__)
    add_arguments(parser)
    runs.add_arguments(parser)
    outputs.add_options(parser, OPTIONS["engine"])
    own = add_own(parser) if add_own else lambda options: (package, {})
    options = outputs.asked(parser, arguments)
    runs.check_arguments(options)
    engine, options.own = own(options)
    command(_train_and_report, engine, options, options=options)


def add_arguments(parser):
    """The arguments that the training commands share."""
    for group in ("batches", "checkpoints", "training"):
        outputs.add_options(parser, OPTIONS[group])
    bucket_mb = 25.0 if torch.cuda.is_available() else 0.5  # small models on CPUs have several all the same
    parser.set_defaults(nproc=default_nproc(), bucket_mb=bucket_mb)
    # Defaults for options that not all commands have.
    parser.set_defaults(engines="stage0_ddp", optimizer="adamw", save=None, trace=None, generate=None, own={})


def default_nproc():
    """One rank per GPU, or two on the CPU."""
    return torch.cuda.device_count() or min(2, cpus())


def command(function, *args, options):
    """Validate the options and run `function(world, *args)` on every rank."""
    check_options(options)
    asked = {name: getattr(options, name) for name in ("nproc", "oversubscribe", "ranks_per_node")}
    return launch(function, *args, forward_signals=options.save is not None, **asked)


def check_options(options):
    """Validate the options as far as possible before any rank is started."""
    model = build_model(options)
    dtype_of(options.precision)
    for name in options.engines.split(","):
        find_engine(name)
    outputs.check_counts(options, "steps")
    if options.optimizer == "muon" and not optim.split(model)[0]:
        raise InputError(f"--optimizer muon: no layer of {options.model} has a matrix; choose a gpt or llama model")
    if not 0 <= options.lr < float("inf"):
        raise InputError(f"--lr {options.lr}: give a finite learning rate of 0 or more")
    if options.clip_norm is not None and not options.clip_norm > 0:
        raise InputError(f"--clip-norm {options.clip_norm}: give a norm above 0")
    if not options.bucket_mb > 0:
        raise InputError(f"--bucket-mb {options.bucket_mb}: a bucket needs a size above 0")
    outputs.check_name("--data", options.data)
    if options.trace and options.steps < WARM_UP + TRACED + 1:
        raise InputError(
            f"--steps {options.steps}: a trace needs {WARM_UP + TRACED + 1}: {WARM_UP} to warm up, {TRACED} in the "
            "trace, and a last one whose memory is counted"
        )
    ranks = max(1, rank_count(options))
    make_batches(options).check(ranks)
    if options.ranks_per_node is not None:
        check_ranks_per_node(options.ranks_per_node, ranks)
    if options.accumulate < 1 or options.batch % (options.accumulate * ranks):
        raise InputError(
            f"--accumulate {options.accumulate}: a global batch of {options.batch} cannot be divided into that many "
            f"micro-batches over {ranks} ranks; choose a positive divisor of the samples per rank"
        )
    if options.offload_activations and options.checkpoint_activations is None:
        raise InputError("--offload-activations moves what checkpoints save to the host; add --checkpoint-activations")
    if options.no_sync and options.accumulate == 1:
        raise InputError("--no-sync has no effect on a step of one micro-batch; add --accumulate")
    if options.generate == "":
        raise InputError("--generate '': the model needs a first byte to continue; give a prompt")
    if options.generate is not None and not getattr(model, "predicts_text", False):
        raise InputError(f"--generate: {options.model} does not predict text; choose a gpt, llama, moe or lora model")


def rank_count(options):
    """The world size: torchrun's, or --nproc."""
    told = torchrun_env()
    return options.nproc if told is None else told[1]


def build_model(options):
    """The model that the options name, on the meta device."""
    return models.build(options.model, checkpoint_activations=options.checkpoint_activations)


def make_batches(options):
    """The global batches that the options name."""
    return Batches(load_text(options.data), build_model(options).window, options.batch, options.seed)


def choose_optimizer(options, module):
    """The factory that the options name, and what an engine is told of groups: {"param_groups": ...} or {}."""
    adamw = {"lr": options.lr, "fused": True}
    if options.optimizer == "adamw":
        return partial(torch.optim.AdamW, **adamw), {}
    matrices, rest = optim.split(module)
    groups = [{"params": matrices, "whole": True}, {"params": rest}]
    return partial(optim.MuonAdamW, muon={"lr": 20 * options.lr}, adamw=adamw), {"param_groups": groups}


def train(world, name, options, progress=None):
    """Train one engine and measure it.

    The last step runs under the memory timeline, and `--trace` records the two before it: none of these is timed.

    Args:
        name: a package that exports Engine, or a class with an engine's interface.
        progress: called with the number of steps done after each step.

    Returns:
        A row as `lab.compare` writes it, the final weights, and the timeline's samples.
    """
    make = find_engine(name) if isinstance(name, str) else name
    survives = runs.TrainingRun(options) if options.save else None
    with survives or nullcontext():
        if options.deterministic:
            choose_exact_kernels(world.device)
        module = build_model(options)
        optimizer, groups = choose_optimizer(options, module)
        taken = {name: getattr(options, name) for name in ("precision", "clip_norm", "bucket_mb", "deterministic")}
        engine = make(module, optimizer, init=models.initial_values(options.seed), **groups, **taken, **options.own)
        runs.begin_stream(options.seed, world.rank)
        ours = hasattr(engine, "comm")
        if ours and options.offload_activations:
            module.saving = HostActivations(engine)
        schedulers = [CosineAnnealingLR(engine.optimizer, options.steps)] if options.cosine else []
        batches = make_batches(options)
        if ours:
            runs.agree(engine, options, batches)
        if survives:
            survives.begin(engine, batches, schedulers)
        if survives and survives.message and world.rank == 0:
            tables.say(survives.message)
        run = _run_steps(world, engine, module, options, batches, progress, schedulers, survives)
    if run.skipped == options.steps:
        raise InputError(f"--steps {options.steps}: every gradient overflowed in fp16 and lowered the scale; take more")
    row = {"engine": getattr(name, "name", name), "losses": run.losses, "skipped_steps": run.skipped}
    if ours:
        row["losses"] = (survives.losses if survives else []) + runs.means(engine.comm, run.losses)
        row |= _counted(world, engine, module, options, run)
    timed = run.seconds[WARM_UP:]
    row["tokens_per_second"] = options.batch * (module.window - 1) / statistics.median(timed) if timed else None
    weights = engine.full_state_dict()
    row |= {"param_sha256": sha256(weights), "parameters": models.count(module)}
    if options.optimizer == "muon":
        whole = [bucket for bucket in engine.buckets if bucket.kind.whole]
        elements = sum(slot.numel for bucket in whole for slot in bucket.slots.values())
        row["padding"] = sum(bucket.padded_numel for bucket in whole) / elements
    if run.recording is not None:
        trace = run.recording.collect()
        with together(engine.comm, f"--trace {options.trace}"):
            if world.rank == 0:
                outputs.write_text(options.trace, json.dumps(trace))
        row["overlap"] = overlap(trace) if trace else None
    if options.generate is not None:
        row["generated"] = generate(engine, os.fsencode(options.generate), options.seed).decode(errors="replace")
    return row, weights, run.timeline.samples if run.timeline else []


def _counted(world, engine, module, options, run):
    """Bytes that the last step held, sent and moved, measured and predicted; for one of the stages' engines."""
    predicted = engine.accounting.predicted()
    measured = run.counted or dict.fromkeys(predicted)  # None if the run had no step left
    if options.offload_activations:
        moved = Counter(predicted.get("bus_bytes_per_step", {}))
        moved.update(predicted_moves(module, options.batch // world.size, engine.dtype))
        measured["bus_bytes_per_step"], predicted["bus_bytes_per_step"] = run.on_bus, dict(moved)
    row = {"peak_bytes": run.timeline and run.timeline.peak_bytes(), "wire_bytes_by_phase": run.by_phase}
    for name, counted in measured.items():
        row |= {name: counted, f"predicted_{name}": predicted[name]}
    return row


def _run_steps(world, engine, module, options, batches, progress, schedulers, survives):
    """Train, and return the measurements."""
    ours = hasattr(engine, "comm")
    run = SimpleNamespace(losses=[], seconds=[], skipped=0)
    run.counted = run.by_phase = run.on_bus = run.timeline = run.recording = None
    last = options.steps - 1
    traced = range(last - TRACED, last) if options.trace else ()
    for step in range(survives.step if survives else 0, options.steps):
        windows = batches.of(step, world.rank, world.size).to(world.device)
        micro_batches = [module.inputs_and_targets(part) for part in windows.chunk(options.accumulate)]
        if ours:
            engine.comm.traffic.reset()
        if ours and step == last:
            run.timeline = Timeline(engine)
        if step in traced[:1]:
            run.recording = Recording(engine)
            run.recording.start()
        began = time.perf_counter()
        with run.timeline or nullcontext():
            loss, result = train_step(engine, micro_batches, options.no_sync)
        if step not in traced[:-1]:  # else work in flight overlaps with the next step
            finish(world.device)
        if step in traced[-1:]:
            run.recording.stop()
        if step not in traced and run.timeline is None:
            run.seconds.append(time.perf_counter() - began)
        run.losses.append(loss.item())
        run.skipped += result.skipped
        if ours and not result.skipped:  # a skipped step sends no parameters
            run.counted, traffic = engine.accounting.measured(), engine.comm.traffic
            run.by_phase, run.on_bus = traffic.by_phase(), traffic.on_bus()
        for scheduler in schedulers:
            scheduler.step()
        if progress:
            progress(step + 1)
        if survives:
            survives.after_step(step + 1, run.losses)
    return run


def how(options):
    """A step's micro-batches and activation options, as a label of results."""
    kept = ("checkpoint_activations", "offload_activations", "accumulate", "no_sync")
    return {name: getattr(options, name) for name in kept}


def run_with_progress(world, name, options, place=""):
    """`train` with a progress bar on rank 0; `place` is which of several trainings this is.

    The bar shows no loss: during training a rank knows only its own, and a row has the mean.
    """
    with outputs.progress_bar(shown=world.rank == 0) as bar:
        task = bar.add_task(place + getattr(name, "name", name), total=options.steps)
        return train(world, name, options, lambda done: bar.update(task, completed=done))


def _train_and_report(world, package, options):
    try:
        row, _, _ = run_with_progress(world, package, options)
    except runs.Stopped as stop:
        if world.rank == 0:
            tables.say(stop)
        return
    if world.rank:
        return
    if options.json:
        asked = {"world_size": world.size, "model": options.model, "precision": options.precision, **how(options)}
        asked["optimizer"] = options.optimizer
        outputs.write_json(options.json, {**asked, "hardware": hardware(world.device), **row})
    title = f"{package}: {options.model} on {world.size} ranks"
    if row["model_state_bytes"] is None:
        tables.say(f"all {options.steps} steps were done before, and nothing was measured")
    else:
        tables.show(tables.Table(title, ("", "measured", "predicted"), lines_of(row, options.precision)))
    if "overlap" in row:
        shares = ", ".join(f"rank {rank} {share:.0%}" for rank, share in row["overlap"].items())
        tables.say(f"collectives overlapped with computation, in {options.trace}: {shares}")
    if "generated" in row:
        tables.say(row["generated"])
