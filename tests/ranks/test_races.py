"""On CUDA no race shows in vector clocks, and each wait is needed. This needs no GPU, and does not replace one."""

import ast
import contextlib
import functools
import importlib
import itertools

import pytest
import torch
import torch.distributed as dist
from fake_gpu import CUDA, Devices, Gpu, OnAStreamOfItsOwn, with_streams
from places import ROOT
from planting import running
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import UNFUSED, find_engine
from trap_models import WIDTH, Net

from common.engine.mixed_precision import LossScaler
from common.models.recompute import run_blocks
from common.ranks.lanes import StreamLane
from common.tiers.activations import HostActivations

# Calls that wait or make others wait. Each mutant leaves out one of them.
WAITS = {"wait", "wait_on_host", "wait_event", "wait_stream", "record_stream", "wait_for_caller", "result", "let_go"}
OF_EVENTS = ("done.record()", "self._event.synchronize()")  # other calls of these names concern no stream
FILES = [
    "common/tensors.py",
    "common/ranks/lanes.py",
    "common/ranks/collectives.py",
    *(f"common/engine/{name}.py" for name in ("accumulation", "base", "bucket", "master_weights")),
    *(f"common/tiers/{name}.py" for name in ["bus", "memory", "activations"]),
    *(f"offload/{name}.py" for name in ["cpu", "nvme", "stepping", "sub_group", "disk", "swap"]),
    *("stage3_param/engine.py", "zeropp/engine.py", "zeropp/transports.py", "zeropp/hybrid.py", "zeropp/chain.py"),
]


def straight():
    """Uses nothing twice: the fake does not know on which stream autograd accumulates gradients."""
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 9), torch.nn.Tanh(), torch.nn.Linear(9, WIDTH, bias=False))


def interrupt(gpu, engine):
    """A backward that fails in the middle, and the zero_grad() after it."""

    def fail(gradient):
        raise KeyboardInterrupt

    x = torch.randn(2, 3, WIDTH).to(CUDA).requires_grad_()
    loss = with_streams(gpu, engine(x).square().mean())
    x.register_hook(fail)
    with contextlib.suppress(KeyboardInterrupt):
        engine.backward(loss)
    engine.zero_grad()


def work_beside(gpu, engine):
    """A user's work on a module's stream, such as preparing a batch: new memory needs no wait."""
    for module in engine.module.modules():
        if isinstance(module, OnAStreamOfItsOwn):
            with gpu.on(module.stream):
                torch.zeros(2, 3, WIDTH, device=CUDA)


class Saving(HostActivations):
    """Makes the fake GPU known in hooks of operations, too."""

    def __init__(self, gpu, engine):
        self._gpu = gpu
        super().__init__(engine)

    def pack_hook(self, tensor):
        with Devices(self._gpu):
            return super().pack_hook(tensor)


def train(gpu, name, options, checkpoint, micro_batches=2, precision="fp32", beside=False, host_activations=False):
    """A few steps of a small model on the fake GPU: accumulated, interrupted, evaluated, saved and loaded.

    With `beside`, each block runs on its own stream; with `host_activations`, block inputs go to the host.
    """
    torch.manual_seed(0)
    model = Net(block=functools.partial(OnAStreamOfItsOwn, gpu, straight)) if beside else Net()
    engine = find_engine(name)(model.to(CUDA), UNFUSED, bucket_mb=1e-4, precision=precision, **options)
    if host_activations:
        model.run = functools.partial(run_blocks, kind="non-reentrant", saving=Saving(gpu, engine))
    if precision == "fp16":
        engine.loss_scaler = LossScaler(scale=2.0**30, window=2)
    for step in range(4):
        for micro_batch in range(micro_batches):
            held = engine.no_sync() if step == 1 and micro_batch == 0 else contextlib.nullcontext()
            with held:
                engine.backward(with_streams(gpu, engine(torch.randn(2, 3, WIDTH).to(CUDA)).square().mean()))
            work_beside(gpu, engine)
        engine.step()
        work_beside(gpu, engine)
        if step == 1:
            interrupt(gpu, engine)
            with torch.no_grad():
                assert engine(torch.randn(2, 3, WIDTH)).device == CUDA  # like DDP, it moves a loader's batch
        if step == 2 and engine.comm.size == 1:  # then one rank's files are all files
            engine.save(checkpoint)
            engine.load(checkpoint)
    books = engine.accounting
    held, predicted = (counts.get("host_state_bytes") for counts in (books.measured(), books.predicted()))
    assert held in (None, predicted)  # pinned memory is in powers of two
    engine.full_state_dict()


SPREAD = {"parameters": "cpu", "gradients": "device", "optimizer": "nvme"}
MIXED = {"parameters": "nvme", "gradients": "cpu", "optimizer": "device"}
SCENES = {  # what is trained: the engine's name and its options
    "stage0_ddp": ("stage0_ddp", {}),
    "stage1_os": ("stage1_os", {}),
    "stage2_grad": ("stage2_grad", {}),
    "stage3_param": ("stage3_param", {}),
    "offload": ("offload", {}),
    "offload, half": ("offload", {"ratio": 0.5}),
    "offload, delayed": ("offload", {"delayed_update": True}),
    "infinity, disk": ("offload.nvme", {"tiers": "nvme", "sub_group_mb": 1e-4}),
    "infinity, host": ("offload.nvme", {"tiers": "cpu", "sub_group_mb": 1e-4}),
    "infinity, device": ("offload.nvme", {"tiers": "device"}),
    "infinity, spread": ("offload.nvme", {"tiers": SPREAD, "sub_group_mb": 1e-4}),
    "infinity, mixed": ("offload.nvme", {"tiers": MIXED, "sub_group_mb": 1e-4}),
    "zeropp": ("zeropp", {}),
    "zeropp, two nodes": ("zeropp", {"ranks_per_node": 1, "error_feedback": True}),
    "zeropp, copies": ("zeropp", {"quantize_weights": False, "quantize_gradients": False}),
    "hybrid": ("zeropp.hybrid", {"ranks_per_node": 1}),
    "hybrid, deferred": ("zeropp.hybrid", {"ranks_per_node": 1, "defer_all_reduce": True}),
}
WAYS = {  # further options of the engine, and of `train`
    "beside": ({}, {"beside": True}),
    "beside, bf16": ({}, {"beside": True, "precision": "bf16"}),
    "fp32": ({}, {}),
    "bf16, clipped": ({"clip_norm": 0.1}, {"precision": "bf16"}),
    "fp16": ({}, {"precision": "fp16"}),
    "activations on the host": ({}, {"host_activations": True}),
    "alone, saved and loaded": ({}, {}),
    "one backward, NCCL's order": ({"deterministic": False}, {"micro_batches": 1}),
}


def races(scene, way, folder):
    """The races in a scene, a sentence for each."""
    (name, options), (of_engine, training) = SCENES[scene], WAYS[way]
    if "nvme" in str(options.get("tiers")):
        options = {**options, "path": folder}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1 if "alone" in way else 2)
    try:
        with Gpu() as gpu:
            train(gpu, name, options | of_engine, folder / "checkpoint", **training)
        return gpu.races
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("way", WAYS)
def test_nothing_races(tmp_path, scene, way):
    assert races(scene, way, tmp_path) == []


def test_a_lane_waits_for_what_was_queued_before_it_and_the_caller_at_the_end_for_the_lane():
    with Gpu() as gpu:
        lane, compute, ended = StreamLane(), gpu.default, []
        queued = compute.tick()
        lane.submit(lambda: ended.append(gpu.current().tick()))
        compute.tick()  # the computation that overlaps with it
        assert gpu.streams[-1].clock[compute] == queued
        lane.finish()
        assert gpu.host.clock[gpu.streams[-1]] == ended[0]


# ---- mutants ------------------------------------------------------------------------------------------------------

# Waits that no scene needs, and why they stay.
EXPLAINED = {
    "self.in_flight.pop(0).wait()": "bounds how much memory is under way; the lane keeps the order without it",
    "self.handle.wait()": "of a sum that only the lane reads; errors of the lane are raised there",
    "after.wait_on_host()": "a buffer comes back here when all is done with it: see `faults.toml`",
    "self._written.pop().wait()": "what is left when an engine saves or ends, which waits for a file and for no memory",
}


class Without(ast.NodeTransformer):
    """Removes the call at one place: `handle.wait()` becomes `handle`."""

    def __init__(self, place):
        self.place = place

    def visit_Call(self, node):
        self.generic_visit(node)
        if at(node) != self.place:
            return node
        return node.func.value if isinstance(node.func, ast.Attribute) else node.args[0]


def at(node):
    return node.end_lineno, node.end_col_offset


def waits_of(file):
    """Every call in a file that waits, in textual order: (file, line and source; place)."""
    source = (ROOT / file).read_text()
    calls = sorted((node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)), key=at)
    return [(f"{file}:{at(node)[0]} {ast.get_source_segment(source, node)}", at(node)) for node in calls if waits(node)]


def waits(call):
    return getattr(call.func, "attr", getattr(call.func, "id", None)) in WAITS or ast.unparse(call) in OF_EVENTS


def without(file, place):
    """A context in which the functions of a module run without the call at that place."""
    tree = ast.fix_missing_locations(Without(place).visit(ast.parse((ROOT / file).read_text())))
    module = importlib.import_module(file[:-3].replace("/", "."))
    return running(module, compile(tree, str(ROOT / file), "exec"))


MUTANTS = [(file, *wait) for file in FILES for wait in waits_of(file)]


@pytest.mark.parametrize(("file", "what", "place"), [pytest.param(*mutant, id=mutant[1]) for mutant in MUTANTS])
def test_each_wait_is_needed(tmp_path, file, what, place):
    tries = itertools.product(WAYS, SCENES)
    with without(file, place):
        found = any(fails(scene, way, tmp_path / f"{scene}, {way}") for way, scene in tries)
    reason = EXPLAINED.get(what.split(" ", 1)[1])
    if not found and reason:
        pytest.skip(reason)
    assert found, f"nothing needs {what}"


def fails(scene, way, folder):
    """Whether something races or is refused in a scene."""
    folder.mkdir()
    try:
        return races(scene, way, folder)
    except Exception as error:
        return str(error)
