"""A simulated rank: torch's fake process group and fake tensors, with an engine that knows of neither.

Shapes, storages, collectives and their order are those of a real rank on GPUs; no value is computed, and nothing is
sent. So a model that reads values in a step, by `.item()` for instance, cannot be simulated; in its `__init__` it may.
"""

import ast
import contextlib
import inspect
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import fake_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from common import models
from common.engine.accounting import STATES
from common.engine.mixed_precision import dtype_of
from common.errors import InputError
from common.measure.memory import high_water
from common.measure.timeline import PHASES
from common.measure.traffic import Traffic
from common.ranks import lanes
from common.ranks.nodes import check_ranks_per_node
from common.tensors import fake_tensors, tensors_of_state
from common.tiers.activations import HostActivations, predicted_moves
from lab.simulate import axes
from lab.simulate.clock import Clock, collective_of
from lab.simulate.hardware import Hardware
from lab.simulate.moments import Moments
from lab.simulate.own import Foreign, batch_of, loss_of, model_of, tokens_of
from parallel.activations import PartitionedActivations
from parallel.train import keep_part

NEED_VALUES = (
    fake_tensor.DataDependentOutputException,  # .item(), bool(tensor)
    fake_tensor.DynamicOutputShapeException,  # nonzero(), tensor[mask]
    fake_tensor.UnsupportedOperatorException,
)
UNCOMPILED = "fail_on_recompile"  # torch.compile aborts the process when it meets fake tensors, after a minute
ADAMW = partial(torch.optim.AdamW, lr=1e-3, fused=True)
SLACK = 0.01  # of the peak, within which the first step finds it


@contextlib.contextmanager
def simulated_world(size, rank=0, ranks_per_node=None, backend="nccl"):
    """In this context this process is one rank of a world, and tensors have no values.

    Collectives take the paths of a backend, "nccl" or "gloo". Without `ranks_per_node` all ranks share a node.

    Raises:
        InputError: `rank` is not below the world size, or a model reads values.
    """
    if size < 1 or not 0 <= rank < size:
        raise InputError(f"rank {rank} of {size}: give a world size of 1 or more, and a rank from 0 to one below it")
    per_node = check_ranks_per_node(size if ranks_per_node is None else ranks_per_node, size)
    shown_by = sys.excepthook  # torch puts the rank before each line, once for each group
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    sys.excepthook = shown_by
    try:
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(per_node)), _without_values(backend):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def simulated_group(backend):
    """The same within a real world: a group of as many ranks, over which nothing is sent. A collective."""
    group = dist.new_group(backend="fake")
    try:
        with _without_values(backend):
            yield group
    finally:
        dist.destroy_process_group(group)


@contextlib.contextmanager
def _without_values(backend):
    try:
        # A model's constants are real: they may be made before.
        values = fake_tensors(allow_non_fake_inputs=True)
        with mock.patch.dict(lanes.PATHS, fake=backend), values, torch.compiler.set_stance(UNCOMPILED):
            yield
    except (*NEED_VALUES, RuntimeError) as error:
        if UNCOMPILED in str(error):
            raise InputError(
                "torch.compile cannot be simulated: give the model, its step and its parts uncompiled"
            ) from error
        if not isinstance(error, NEED_VALUES) and "data is not allocated yet" not in str(error):  # of C++ code
            raise
        raise InputError(
            f"{_place(error)} reads a tensor's values, of which a simulated rank has none "
            f"({str(error).splitlines()[0]}); guard it, compute it from shapes, or leave out that input"
        ) from error


def _place(error):
    """The last line that an exception passed, "model.py:12 in forward", outside of torch and what follows it."""
    library = str(Path(torch.__file__).parent)
    passed = (f for f in traceback.extract_tb(error.__traceback__) if f.name != Outsider.__torch_dispatch__.__name__)
    frame = [f for f in passed if not f.filename.startswith(library)][-1]
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


attend, normalize = F.scaled_dot_product_attention, F.rms_norm


class Kernels:
    """In this context attention and norms take the kernels of a backend's devices.

    Fake tensors are a CPU's, whose attention with dropout keeps squares of the sequence, and whose RMSNorm keeps copies
    in fp32. A GPU's fused kernels keep neither, so under "nccl" dropout is left to attention's, and layer_norm, which
    keeps its input too, stands in for RMSNorm.

    Attributes:
        attention: the kernel of the last attention, "flash", "memory-efficient" or "math"; None if there was none.
    """

    def __init__(self, backend):
        self.attention = None
        taken = {"scaled_dot_product_attention": self.attend, "rms_norm": _normalize} if backend == "nccl" else {}
        self._patches = mock.patch.multiple(F, **taken) if taken else contextlib.nullcontext()

    def __enter__(self):
        self._patches.__enter__()
        return self

    def __exit__(self, *error):
        self._patches.__exit__(*error)

    def attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        """As F.scaled_dot_product_attention."""
        flash = torch.backends.cuda.flash_sdp_enabled() and query.itemsize == 2 and attn_mask is None
        self.attention = "flash" if flash else "memory-efficient"
        if not (flash or torch.backends.cuda.mem_efficient_sdp_enabled()):
            self.attention = "math"
            return attend(query, key, value, attn_mask, dropout_p, is_causal, **options)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return attend(query, key, value, attn_mask, 0.0, is_causal, **options)


def _normalize(x, shape, weight=None, eps=None):
    return F.layer_norm(x, shape, weight, None, eps or 1e-5)


# ---- engines of a user's own ----------------------------------------------------------------------------------


class Outsider(TorchDispatchMode):
    """What `Moments` and a table ask of an engine, for one with `module` and `optimizer`, but no `live()` or `comm`.

    A context manager around what is to be counted. Collectives count by the law of common.measure.traffic; broadcasts
    and messages between two ranks do not.
    """

    def __init__(self, engine):
        super().__init__()
        self.engine, self.comm = engine, SimpleNamespace(traffic=Traffic())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "profiler" and isinstance(args[0], str) and args[0] in PHASES:  # common.loop's labels
            self.comm.traffic.phase = args[0]
        elif function.namespace == "c10d":
            kind, _, sent = collective_of(function, args)
            if kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all"):
                self.comm.traffic.record(kind, int(sent))
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


# ---- a step ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is simulated."""

    engine: type  # with an engine's surface
    model: str  # what `model_of` knows
    world_size: int
    rank: int = 0
    ranks_per_node: int | None = None  # None is one node
    precision: str = "fp32"  # this and the next two are the engine's
    bucket_mb: float = 25.0
    clip_norm: float | None = None
    batch: int = 1  # samples of a rank's micro-batch
    sequence: int | None = None  # their length; None is the model's
    checkpoint_activations: str | None = None  # this and the next as the training commands have them
    offload_activations: bool = False
    accumulate: int = 1  # micro-batches of a step
    no_sync: bool = False  # only the last is reduced
    optimizer: Callable = ADAMW  # from parameters to an optimizer
    tensor: int = 1  # degrees of tensor and pipeline parallelism
    pipeline: int = 1
    partition_activations: bool = False  # P_a
    own: dict = field(default_factory=dict)  # what the engine takes besides
    backend: str = "nccl"  # whose paths its collectives take; or "gloo"
    hardware: Hardware | None = None  # whose time is counted; None counts none


def simulate(setting, step):
    """Train on fake tensors, and follow a step. In a real world a collective, in which each rank follows itself.

    Args:
        setting: a Setting.
        step: `step(engine, micro_batches, no_sync, loss)` trains one; common.loop's.

    Returns:
        A row: counts as the training commands have them, "attention", the name of its kernel, "peak_bytes", "peaks" by
        class, "worst", a Moment, and the "samples" of the timeline; with hardware its "time", see `Clock.found`, and a
        "trace".

    Raises:
        InputError: the setting is invalid, or the model reads values.
    """
    began = time.perf_counter()
    if dist.is_initialized():
        world = simulated_group(setting.backend)
    else:
        world = simulated_world(setting.world_size, setting.rank, setting.ranks_per_node, setting.backend)
    with world as group, Kernels(setting.backend) as kernels:
        engine, module = engine_of(setting, group)
        micro_batches = [batch_of(module, setting.batch, setting.sequence)] * setting.accumulate
        loss = loss_of if isinstance(module, Foreign) else models.loss
        books = engine if hasattr(engine, "accounting") else Outsider(engine)
        if books is engine:
            step, loss = axes.step_of(engine, setting, step), axes.loss_on(engine.axes, loss)

        def follow(**how):
            for comm in (books.comm, *(engine.axes.by_name.values() if books is engine else ())):
                comm.traffic.reset()
            with books if books is not engine else contextlib.nullcontext(), Moments(books, module, **how) as moments:
                step(engine, micro_batches, setting.no_sync, loss)
            return moments

        floor = follow(slack=SLACK).floor()  # a warm-up, too: with the first step the optimizer's states appear
        moments = follow(floor=floor)
        if moments.worst.nbytes < floor:  # the first step held more than those after it
            moments = follow()
        row = {"time": None, "trace": None, **counted(books, moments, setting, module)}
        if setting.hardware is not None:  # a step of its own: what follows memory makes no operations
            ranks_per_node = setting.ranks_per_node or setting.world_size
            with Clock(setting.hardware.shared_by(ranks_per_node), ranks_per_node, books.comm.traffic) as clock:
                step(engine, micro_batches, setting.no_sync, loss)
            ranks = setting.world_size // (setting.tensor * setting.pipeline)  # with samples of their own
            tokens = ranks * setting.batch * setting.accumulate * tokens_of(module, setting.sequence)
            row["time"] = clock.found(tokens, dtype_of(setting.precision).itemsize)
            row["trace"] = clock.trace(f"rank {setting.rank}, simulated")
        return row | {
            "parameters": models.count(module),
            "attention": kernels.attention,
            "peak_bytes": moments.peak_bytes(),
            "peaks": {name: moments.peak_of(name) for name in moments.samples[0][1]},
            "worst": moments.worst,
            "samples": moments.samples,
            "simulated_in_seconds": time.perf_counter() - began,
            "really_held_bytes": high_water(torch.device("cpu")),
        }


@torch.no_grad()
def _no_value(name, tensor):
    tensor.zero_()


def engine_of(setting, group=None):
    """The engine and its model, in a simulated world or over its group; an InputError names an unknown option."""
    for name in setting.own:
        if not takes(setting.engine, name):
            raise InputError(f"--with {name}: {setting.engine.__module__} takes no option of this name")
    module, own = model_of(setting.model, setting.checkpoint_activations), setting.own
    if setting.tensor * setting.pipeline > 1:
        if not hasattr(module, "predict") or group is not None:
            raise InputError(f"--tensor, --pipeline: {setting.model} cannot be split; the zoo's GPTs and Llamas can")
        data, others = axes.groups_of(setting)
        keep_part(module, others)
        own = {**own, "process_group": data, "model_parallel": others}
    engine = setting.engine(
        module,
        setting.optimizer,
        precision=setting.precision,
        bucket_mb=setting.bucket_mb,
        clip_norm=setting.clip_norm,
        init=_no_value if any(parameter.is_meta for parameter in module.parameters()) else None,
        **(own if group is None else {**own, "process_group": group}),
    )
    if setting.offload_activations:
        module.saving = HostActivations(engine)
    if setting.partition_activations:
        if setting.tensor == 1 or setting.checkpoint_activations is None:
            raise InputError(
                "--partition-activations: add --tensor, whose ranks save alike, and --checkpoint-activations"
            )
        module.saving = PartitionedActivations(engine.axes, module.saving if setting.offload_activations else None)
    return engine, module


def takes(engine, name):
    """Whether an engine has an option of this name."""
    return any(name in inspect.signature(kind.__init__).parameters for kind in engine.__mro__)


def counted(books, moments, setting, module):
    """What a step held, sent and moved, each with its prediction if the engine has one."""
    traffic = books.comm.traffic
    row = {"wire_bytes_by_phase": traffic.by_phase()}
    if isinstance(books, Outsider):
        row["model_state_bytes"] = {state: moments.peak_of(state) for state in STATES}
        return {**row, "wire_bytes_per_step": traffic.by_collective()}
    measured, predicted = books.accounting.measured(), books.accounting.predicted()
    if setting.offload_activations:
        moved = Counter(predicted.get("bus_bytes_per_step", {}))
        moved.update(predicted_moves(module, setting.batch * setting.accumulate, books.dtype))
        measured["bus_bytes_per_step"], predicted["bus_bytes_per_step"] = traffic.on_bus(), dict(moved)
    row |= axes.counted(books, setting)
    for name, count in measured.items():
        row |= {name: count, f"predicted_{name}": predicted[name]}
    return row


def own_options(pairs):
    """An engine's own options, {name: value}, from texts such as "hierarchical=False", or an InputError."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--with {pair}: write NAME=VALUE, hierarchical=False for instance")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[name] = value
    return found
