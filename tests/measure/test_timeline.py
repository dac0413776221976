"""The trace of a training step: valid, labelled, with communication that overlaps with computation."""

import functools
import json
import threading

import pytest
import torch
from commands import run
from traces import record
from training import batch, make_engine

from common import loop, models
from common.measure.timeline import PHASES, Recording, merge, overlap, rows
from common.ranks.lanes import Handle

pytestmark = pytest.mark.alone
needs_threads = pytest.mark.skipif(
    torch.cuda.is_available(), reason="on CUDA the lane is a stream; the merge of such a trace is tested without one"
)


@pytest.fixture(scope="module")
def traces(worlds, tmp_path_factory):
    """`traces(stage)`: the trace of a step on two ranks, recorded once."""

    @functools.cache
    def of(stage):
        path = tmp_path_factory.mktemp("trace") / f"{stage}.json"
        trace = worlds(2).run(record, stage, "gpt-nano", path)[0]
        assert json.loads(path.read_text()) == trace
        return trace

    return of


def ranges(trace, rank, *beginnings):
    """[(name, thread, begin, end)] of a rank's labels with these beginnings, by time."""
    found = [
        (event["name"], event["tid"], event["ts"], event["ts"] + event["dur"])
        for event in trace["traceEvents"]
        if event.get("cat") == "user_annotation" and event["pid"] == 2 * rank and event["name"].startswith(beginnings)
    ]
    return sorted(found, key=lambda one: one[2])


two_stages = pytest.mark.parametrize("stage", ["stage1_os", "stage3_param"])


@two_stages
def test_each_rank_has_rows_with_names_every_phase_and_every_part_of_the_model(traces, stage):
    trace = traces(stage)
    assert {(2 * rank, row) for rank in (0, 1) for row in ("modules", "compute")} <= rows(trace).keys()
    assert min(event["ts"] for event in trace["traceEvents"] if "ts" in event) == 0
    parts = ["wte", "wpe", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "ln_f", "head"]
    for rank in (0, 1):
        assert [name for name, *_ in ranges(trace, rank, *PHASES) if name in PHASES] == list(PHASES)
        assert [name for name, *_ in ranges(trace, rank, "forward of")] == [f"forward of {part}" for part in parts]
        backward = [name.removeprefix("backward of ") for name, *_ in ranges(trace, rank, "backward of")]
        assert backward[:6] == parts[:1:-1]
        assert set(backward[6:]) == {"wte", "wpe"}  # in the order autograd chooses


@two_stages
def test_the_ranges_of_a_row_nest_or_follow_each_other(traces, stage):
    for events in rows(traces(stage)).values():
        ends = []  # of the ranges around an event
        for event in events:
            begin, end = event["ts"], event["ts"] + event["dur"]
            ends = [around for around in ends if around > begin + 0.01]
            assert all(end <= around + 0.01 for around in ends)
            ends.append(end)


@needs_threads
@two_stages
def test_some_of_the_collectives_time_overlaps_with_computation(traces, stage):
    for _ in range(3):  # a system may once let a thread run after the other
        shares = overlap(traces(stage))
        assert shares.keys() == {0, 1}
        if all(0 < share < 1 for share in shares.values()):
            return
        traces.cache_clear()
    pytest.fail(f"{shares}: all collectives or none overlap with computation, three times")


@pytest.mark.parametrize("kind", ["non-reentrant", "reentrant"])
@pytest.mark.ranks(1)
def test_recomputation_shows_and_no_range_stays_open(world, tmp_path, kind):
    model = models.build("gpt-tiny", checkpoint_activations=kind)
    trace = record(world, "stage3_param", model, tmp_path / "trace.json")
    ((_, _, begin, end),) = [one for one in ranges(trace, 0, "backward") if one[0] == "backward"]
    again = [one for one in ranges(trace, 0, "forward of blocks.") if one[2] > begin]
    assert [name for name, *_ in again] == ["forward of blocks.1", "forward of blocks.0"]
    assert all(one[3] < end for one in again)


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.ranks(1)
def test_a_recording_leaves_no_hook_behind(world):
    engine = make_engine("stage1_os")
    before = count_hooks(engine.module)
    recording = Recording(engine)
    recording.start()
    loop.train_step(engine, [batch(engine.module, world)])
    recording.stop()
    assert count_hooks(engine.module) == before


# ---- traces made by hand, also of CUDA --------------------------------------------------------------------------


def event(pid, tid, cat, name, begin, end):
    return {"ph": "X", "pid": pid, "tid": tid, "cat": cat, "name": name, "ts": begin, "dur": end - begin}


def exported_on_cuda(base=0):
    """What the profiler exports on a rank: the host launches kernels, which run later on two streams."""
    host, compute, lane = 4711, 7, 13
    return {
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "M", "pid": host, "tid": 0, "name": "process_name", "args": {"name": "python"}},
            event(host, host, "user_annotation", "backward", 0, 10),
            event(host, host, "user_annotation", "reduce_scatter of bucket 0", 2, 3),
            event(host, host, "cpu_op", "aten::mm", 3, 9),
            event(0, compute, "kernel", "gemm", 100, 140),
            event(0, lane, "gpu_user_annotation", "reduce_scatter of bucket 0", 120, 160),
            event(0, lane, "kernel", "ncclDevKernel_ReduceScatter", 120, 160),
            {"ph": "s", "id": 3, "pid": host, "tid": host, "cat": "ac2g", "name": "ac2g", "ts": 2},
            event("Spans", "PyTorch Profiler", "Trace", "PyTorch Profiler (0)", -5, 200),
            event(-1, 0, "overhead", "Activity Buffer Request", -3, -2),
        ],
    }


def test_on_cuda_a_ranks_gpu_is_a_process_and_the_lanes_stream_has_its_name():
    trace = merge([exported_on_cuda(), exported_on_cuda()])
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 0, GPU", 2: "rank 1", 3: "rank 1, GPU"}
    of_a_rank = ((0, "compute"), (1, "stream 7"), (1, "collectives, stream 13"))
    assert rows(trace).keys() == {(2 * rank + gpu, row) for rank in (0, 1) for gpu, row in of_a_rank}
    assert overlap(trace) == {0: 0.5, 1: 0.5}  # kernels are computation


def test_ranks_keep_their_own_arrows_and_their_clocks_are_brought_to_one_base():
    trace = merge([exported_on_cuda(base=1_790_857_026_000_000_000), exported_on_cuda(base=1_790_857_026_000_005_000)])
    arrows = [event for event in trace["traceEvents"] if event["ph"] == "s"]
    assert len({arrow["id"] for arrow in arrows}) == 2
    assert [arrow["ts"] for arrow in arrows] == [2, 7]


def test_waiting_is_no_computation_and_time_counts_once():
    host, lane = 10, 11
    events = [
        event(host, host, "user_annotation", "backward", 0, 100),
        event(host, host, "cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 0, 90),
        event(host, host, "cpu_op", "aten::mm", 0, 20),
        event(host, host, "cpu_op", "aten::t", 5, 10),
        event(host, host, "user_annotation", "wait", 40, 80),
        event(host, lane, "user_annotation", "all_gather of blocks.1", 10, 50),
        event(host, lane, "cpu_op", "aten::copy_", 30, 40),
    ]
    assert overlap(merge([{"traceEvents": events}])) == {0: 0.25}


def test_a_wait_shows_in_the_trace():
    release = threading.Event()
    with torch.profiler.profile() as profiler:
        threading.Timer(0.02, release.set).start()
        Handle((), lambda buffers: release.wait()).wait()
    (wait,) = [event for event in profiler.events() if event.name == "wait"]
    assert wait.cpu_time_total > 10_000  # microseconds


# ---- the option of the commands ---------------------------------------------------------------------------------


def test_a_command_writes_a_trace_of_two_steps_and_prints_the_overlap(tmp_path):
    path = tmp_path / "trace.json"
    options = ("--nproc", 2, "--oversubscribe", "--model", "gpt-tiny", "--steps", 5, "--trace", path)
    done = run("-m", "stage2_grad", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert "collectives overlapped with computation" in done.stdout
    trace = json.loads(path.read_text())
    names = [name for name, *_ in ranges(trace, 1, *PHASES) if name in PHASES]
    assert names == 2 * list(PHASES)  # the first step's all-gather overlaps with the second step
