"""What `04_communication` and `05_throughput` count, read and check."""

import functools
import sys

import pytest
import torch
from training import batch, make_engine

from common.engines import STAGES
from common.loop import train_step
from common.ranks.collectives import Collectives
from course import figures
from course.pages import wire

kernel = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="the kernel is asked on Linux, and on CPU"
)


# ---- from rank to rank ------------------------------------------------------------------------------------------


def move(world, readable):
    """What this rank moves when it gathers 3 MB, and when it sends 1 MB to the next rank alone."""
    comm, whole = Collectives(), torch.ones(750_000, device=world.device)
    shard = whole.chunk(world.size)[world.rank]
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def to_the_next():
        works = [comm.group.send([shard.clone()], following, 7), comm.group.recv([shard], before, 7)]
        for work in works:
            work.wait()

    with pytest.MonkeyPatch.context() as patch:
        if not readable:
            patch.setattr(sys, "platform", "darwin")
        sockets = wire.Sockets(comm)
        return [sockets.moved(call) for call in (lambda: comm.all_gather(shard, whole).wait(), to_the_next)]


@kernel
def test_the_kernel_tells_what_went_to_which_rank(worlds):
    for rank, (gathered, passed_on) in enumerate(worlds(3).run(move, True)):
        others = [0 if to == rank else 1e6 for to in range(3)]
        assert gathered.to == pytest.approx(others, rel=0.01, abs=2000)
        assert gathered.metered == 2_000_000
        assert passed_on.to == pytest.approx([1e6 * (to == (rank + 1) % 3) for to in range(3)], rel=0.01, abs=2000)
        assert passed_on.metered == 0


def test_where_the_kernel_cannot_be_asked_the_meter_stands_in(worlds):
    gathered, passed_on = zip(*worlds(3).run(move, False), strict=True)
    assert gathered[0] == wire.Moved(None, 2_000_000)
    assert wire.from_to(gathered) == [[0 if to == rank else 1e6 for to in range(3)] for rank in range(3)]
    assert wire.from_to(passed_on) is None


def test_what_leaves_a_node_is_what_goes_to_ranks_of_others():
    ring = [[3 * (to == (rank + 1) % 4) for to in range(4)] for rank in range(4)]
    direct = [[int(to != rank) for to in range(4)] for rank in range(4)]
    assert wire.leaving_nodes(ring, 1) == wire.leaving_nodes(direct, 1) == [3, 3, 3, 3]
    assert wire.leaving_nodes(ring, 2) == [3, 3]
    assert wire.leaving_nodes(direct, 2) == [4, 4]


# ---- message by message -----------------------------------------------------------------------------------------


def write_down(world, stage):
    """The messages of a step, the step's bytes by phase, and how many buckets there are."""
    engine = make_engine(stage)
    inputs = batch(engine.module, world)
    engine.comm.traffic.reset()
    with wire.messages(engine.comm) as sent:
        train_step(engine, [inputs])
    train_step(engine, [inputs])  # no longer written down
    return sent, engine.predicted_wire_bytes_per_step(), len(engine.buckets)


@pytest.mark.parametrize("stage", STAGES)
def test_the_messages_of_a_step_add_up_to_what_is_predicted(worlds, stage):
    for sent, predicted, buckets in worlds(2).run(write_down, stage):
        by_collective = dict.fromkeys(predicted, 0)
        for message in sent:
            by_collective[message.collective] += message.sent
            assert message.sent == message.nbytes // 2 * (2 if message.collective == "all_reduce" else 1)
        assert by_collective == predicted
        assert [message.phase for message in sent] == sorted((message.phase for message in sent), key=wire.PHASES.index)
        assert stage == "stage3_param" or len(sent) == buckets * (1 + (stage != "stage0_ddp"))


# ---- from a trace -----------------------------------------------------------------------------------------------


def event(row, cat, name, begin, end):
    return {"ph": "X", "pid": 0, "tid": row, "cat": cat, "name": name, "ts": 1000 * begin, "dur": 1000 * (end - begin)}


def name_of(row, name):
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}


TRACE = {
    "traceEvents": [
        *(name_of(1, "compute"), name_of(2, "collectives"), name_of(3, "modules")),
        event(1, "cpu_op", "aten::ones", 0, 1),  # before the step
        event(1, "user_annotation", "backward", 5, 25),
        event(1, "cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 6, 24),
        event(1, "cpu_op", "aten::linear", 6, 12),
        event(1, "cpu_op", "aten::copy_", 8, 9),
        event(1, "user_annotation", "wait", 14, 20),
        event(1, "user_annotation", "step", 25, 30),
        event(1, "cpu_op", "aten::_fused_adamw_", 26, 29),
        event(2, "user_annotation", "reduce_scatter of bucket 0", 10, 20),
        event(2, "cpu_op", "aten::add_", 18, 19),
        event(3, "user_annotation", "backward of head", 6, 24),
    ]
}


def test_of_ranges_within_each_other_the_innermost_takes_the_time():
    parts = {"compute": 5, "copies": 1, "optimizer": 3, "waiting": 6, "between operations": 10}
    assert wire.time_on_compute(TRACE) == {0: pytest.approx(parts)}
    assert wire.time_of_collectives(TRACE) == {0: pytest.approx(10)}


def test_rows_begin_with_the_first_phase_and_name_phases_waits_and_collectives():
    rows = wire.step_rows(TRACE)
    assert sorted(rows[0, "compute"]) == [
        *((1, 7, "backward"), (3, 4, "backward")),
        *((9, 15, "waiting"), (21, 24, "step")),
    ]
    assert rows[0, "collectives"] == [(5, 15, "reduce_scatter")]
    figure = figures.beside({"a step": rows})
    assert figure.axes[0].get_xlabel() == "ms since the step began"


# ---- the checks -------------------------------------------------------------------------------------------------

N, M = 4, 4e6
RING = [[3.001e6 * (to == (rank + 1) % N) for to in range(N)] for rank in range(N)]
DIRECT = [[1.001e6 * (to != rank) for to in range(N)] for rank in range(N)]
COUNTS = {
    "reduce-scatter": DIRECT,
    "all-reduce": [[2 * count for count in row] for row in DIRECT],
    "gloo's reduce-scatter": [[2 * count for count in row] for row in RING],
}
STEP = [
    *(wire.Message("backward", "reduce_scatter", f"bucket {k}", 2_000_000, 1_500_000) for k in range(2)),
    *(wire.Message("step", "all_gather", f"bucket {k}", 2_000_000, 1_500_000) for k in range(2)),
]
MEDIANS = {40_000: 3 * (1e-3 + 10_000 * 1e-9), 8_000_000: 7e-3, 16_000_000: 3 * (1e-3 + 4_000_000 * 1e-9)}
LINE = {2: 0.030, 8: 0.060, 16: 0.110}


def said(capsys, check, answer, *args):
    check(answer, *args)
    return capsys.readouterr().out.splitlines()


def law(collective, n, m):
    return (2 if collective in ("all-reduce", "gloo's reduce-scatter") else 1) * (n - 1) / n * m


def leaving(way, n, p, m):
    return (n - 1) / n * m if way == "ring" else p * (n - p) / n * m


def ring_seconds(n, m):
    return (n - 1) * (1e-3 + m / n * 1e-9)


SENT = functools.partial(wire.check_sent, counts=COUNTS, nbytes=M)
MULTIPLE = functools.partial(wire.check_multiple, sent=STEP, counts=COUNTS, unit=3e6)
LEAVING = functools.partial(wire.check_leaving, counts={"ring": RING, "point to point": DIRECT}, nbytes=M)
RING_TIME = functools.partial(wire.check_ring_time, medians=MEDIANS, n=N)
HIDDEN = functools.partial(wire.check_hidden, steps={"stage1_os": (20.0, 0.4)})
MESSAGES = functools.partial(wire.check_messages, counted={(0, 5): 5, (1, 5): 10, (2, 5): 10})
BATCH = functools.partial(wire.check_batch, medians=LINE)


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (SENT, law),
        (MULTIPLE, 3),
        (LEAVING, leaving),
        (RING_TIME, ring_seconds),
        (HIDDEN, lambda ms, share: ms * (1 - share)),
        (MESSAGES, lambda stage, buckets: buckets * (1 if stage == 0 else 2)),
        (BATCH, lambda batch: 0.020 + 0.005 * batch),
        (functools.partial(wire.check_apart, ratio=1.1, interval=(0.9, 1.3)), False),
        (functools.partial(wire.check_apart, ratio=1.2, interval=(1.1, 1.3)), True),
    ],
)
def test_what_is_right_is_solved(capsys, check, answer):
    lines = said(capsys, check, answer)
    assert not [line for line in lines if "not" in line]
    assert "solved" in lines[-1]


@pytest.mark.parametrize(
    ("check", "answer", "hint"),
    [
        (SENT, lambda name, n, m: n / (n - 1) * law(name, n, m), "a rank keeps its own part"),
        (SENT, lambda name, n, m: (n - 1) / n * m, "you left out a half"),
        (SENT, lambda name, n, m: m, "in each a rank keeps its own part"),
        (SENT, lambda name, n, m: n * law(name, n, m), "what all ranks send together"),
        (SENT, lambda name, n, m: m / n, "what goes to one other rank"),
        (MULTIPLE, 2, "look at its picture"),
        (MULTIPLE, 1, "its all-gather of parameters"),
        (MULTIPLE, 4, "only the reduce-scatter doubles"),
        (MULTIPLE, 2.5, "2.5 times by your formula"),
        (LEAVING, lambda way, n, p, m: p * (n - 1) / n * m, "only the last rank of a node"),
        (LEAVING, lambda way, n, p, m: (n - p) / n * m, "each of them sends"),
        (LEAVING, lambda way, n, p, m: m, "a rank keeps its own part"),
        (LEAVING, lambda way, n, p, m: p * (n - 1) / n * m, "a part stays in the node"),
        (RING_TIME, lambda n, m: ring_seconds(n, m) / (n - 1), "N-1 rounds"),
        (RING_TIME, lambda n, m: n * ring_seconds(n, m), "a round sends M/N"),
        (HIDDEN, lambda ms, share: ms * share, "that is what is hidden"),
        (HIDDEN, lambda ms, share: ms, "lies beside computation"),
        (MESSAGES, lambda stage, buckets: buckets, "parameters in another"),
        (MESSAGES, lambda stage, buckets: 2 * buckets, "is one call"),
        (BATCH, lambda batch: 0.01 * batch, "should pass through it"),
        (functools.partial(wire.check_apart, ratio=1.1, interval=(0.9, 1.3)), True, "0.90 to 1.30, and 1 lies within"),
    ],
)
def test_a_known_mistake_gets_its_sentence(capsys, check, answer, hint):
    wrong = [line for line in said(capsys, check, answer) if "not yet" in line]
    assert [line for line in wrong if hint in line]


def test_a_machine_out_of_sorts_is_told_from_a_wrong_formula(capsys):
    medians = {**MEDIANS, 8_000_000: 30e-3}
    *_, last = said(capsys, functools.partial(wire.check_ring_time, medians=medians, n=N), ring_seconds)
    assert "measure again" in last
    *_, last = said(capsys, functools.partial(wire.check_batch, medians={**LINE, 16: 0.5}), lambda b: 0.02 + 0.005 * b)
    assert "measure again" in last


def test_without_the_kernels_counters_a_question_says_that_it_cannot_be_checked(capsys):
    counts = {"reduce-scatter": DIRECT}
    (line,) = said(capsys, functools.partial(wire.check_multiple, sent=STEP, counts=counts, unit=3e6), 3)
    assert "nothing to check it by" in line
