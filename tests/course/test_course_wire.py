"""What `04_communication` and `05_throughput` count and read."""

import sys
from collections import Counter

import pytest
import torch
from training import batch, make_engine

from common.loop import train_step
from common.ranks.collectives import Collectives
from course import figures
from course.pages import hosts, wire

kernel = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="the kernel is asked on Linux, and on CPU"
)


# ---- from rank to rank ------------------------------------------------------------------------------------------


def move(world, readable):
    """The bytes that this rank moves to gather 3 MB, and to send 1 MB to the next rank alone."""
    comm, whole = Collectives(), torch.ones(750_000, device=world.device)
    shard = whole.chunk(world.size)[world.rank]
    following, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def to_the_next():
        for work in [comm.group.send([shard.clone()], following, 7), comm.group.recv([shard], before, 7)]:
            work.wait()

    with pytest.MonkeyPatch.context() as patch:
        if not readable:
            patch.setattr(sys, "platform", "darwin")
        sockets = wire.Sockets(comm)
        return [sockets.moved(call) for call in (lambda: comm.all_gather(shard, whole).wait(), to_the_next)]


@kernel
def test_the_kernel_tells_what_went_to_which_rank(worlds):
    for rank, moved in enumerate(worlds(3).run(move, True)):
        others, following = [1e6 * (to != rank) for to in range(3)], [1e6 * (to == (rank + 1) % 3) for to in range(3)]
        for found, expected in zip(moved, (others, following), strict=True):
            assert found.to == pytest.approx(expected, rel=0.01, abs=2000)
        assert [found.metered for found in moved] == [2_000_000, 0]


def test_the_meter_stands_in_if_the_kernel_cannot_be_asked(worlds):
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


def test_the_messages_of_a_step_add_up_to_what_is_predicted(world, stage):
    engine, by_collective = make_engine(stage), Counter()
    inputs = batch(engine.module, world)
    engine.comm.traffic.reset()
    with wire.messages(engine.comm) as sent:
        train_step(engine, [inputs])
    train_step(engine, [inputs])  # no longer written down
    for message in sent:
        by_collective[message.collective] += message.sent
        assert message.sent == message.nbytes // 2 * (2 if message.collective == "all_reduce" else 1)
    assert by_collective == engine.predicted_wire_bytes_per_step()
    phases = [wire.PHASES.index(message.phase) for message in sent]
    assert phases == sorted(phases)
    assert stage == "stage3_param" or len(sent) == len(engine.buckets) * (1 + (stage != "stage0_ddp"))


# ---- from a trace -----------------------------------------------------------------------------------------------


def event(row, cat, name, begin, end):
    return {"ph": "X", "pid": 0, "tid": row, "cat": cat, "name": name, "ts": 1000 * begin, "dur": 1000 * (end - begin)}


def name_of(row, name):
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": name}}


TRACE = {
    "traceEvents": [
        *map(name_of, (1, 2, 3), ("compute", "collectives", "modules")),
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


def test_the_innermost_of_nested_ranges_takes_the_time():
    parts = {"compute": 5, "copies": 1, "optimizer": 3, "waiting": 6, "between operations": 10}
    assert wire.time_on_compute(TRACE) == {0: pytest.approx(parts)}
    assert wire.time_of_collectives(TRACE) == {0: pytest.approx(10)}


def test_rows_begin_with_the_first_phase_and_name_phases_waits_and_collectives():
    rows = wire.step_rows(TRACE)
    assert sorted(rows[0, "compute"]) == [(1, 7, "backward"), (3, 4, "backward"), (9, 15, "waiting"), (21, 24, "step")]
    assert rows[0, "collectives"] == [(5, 15, "reduce_scatter")]
    assert figures.beside({"a step": rows}).axes[0].get_xlabel() == "ms since the step began"


def test_rows_of_a_trace_are_phases_waits_and_lanes_of_one_rank():
    events = [
        *map(name_of, (1, 2, 3), ("compute", "bus", "host")),
        event(1, "user_annotation", "step", 1, 5),
        event(1, "user_annotation", "wait", 2, 2.5),
        event(1, "user_annotation", "aten::add", 2.5, 2.6),
        *(event(1, "user_annotation", name, at, at + 1) for name, at in (("forward", 0), ("step", 7))),  # outside
        event(2, "user_annotation", "to_device of 0", 3, 3.1),
        event(2, "user_annotation", "wait", 2.9, 2.95),
        event(3, "user_annotation", "optimizer's step of 0", 2, 2.9),
    ]
    other = [{**one, "pid": 2} for one in events]
    assert hosts.rows_of({"traceEvents": events + other}) == {
        (0, "compute"): [(0, 4, "step"), (1, 1.5, "waiting")],
        (0, "collectives"): [],
        (0, "bus"): [(2, pytest.approx(2.1), "up the bus")],
        (0, "host"): [(1, 1.9, "the host's step")],
    }
