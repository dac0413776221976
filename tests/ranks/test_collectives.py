"""The collectives: exact, asynchronous, counted. Each test runs one function on every rank of a world."""

import contextlib
import itertools
import os
import sys
import threading
import weakref
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import SEVEN, make_engine, train_step, zoo_engine
from worlds import open_traced

from common.errors import InputError
from common.ranks import collectives
from common.ranks.collectives import Collectives
from common.ranks.lanes import Handle, ThreadLane, backend_of
from common.ranks.nodes import groups_of
from lab.simulate.world import simulated_world
from lab.sockets import bytes_sent_by_own_sockets

SIZES = [1, 2, 3, 4, 8]
SHARD = 37  # elements: not a multiple of a vector register


def of_rank(rank, size, dtype=torch.float32):
    """A rank's input: values of several magnitudes, so that the order of additions shows in the bits."""
    generator = torch.Generator().manual_seed(rank)
    exponents = torch.randint(-6, 6, (size * SHARD,), generator=generator)
    return (torch.randn(size * SHARD, generator=generator) * 2.0**exponents).to(dtype)


def mean_in_rank_order(size, dtype=torch.float32):
    """The definition: one addition per rank, in rank order, in fp32; divided once, on the device; rounded once."""
    total = torch.zeros(size * SHARD)
    for rank in range(size):
        total += of_rank(rank, size, dtype).float()
    return (total.to("cuda" if torch.cuda.is_available() else "cpu") / size).cpu().to(dtype)


def part(tensor, rank, size):
    return tensor.view(size, -1)[rank]


# ---- what they compute ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{}, {"SEGMENT": 64, "CHUNK": 3}], ids=["at once", "bit by bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.ranks(*SIZES)
def test_reductions_add_in_rank_order_in_fp32_divide_once_and_round_once(world, dtype, sizes):
    comm, mean = Collectives(deterministic=True), mean_in_rank_order(world.size, dtype).to(world.device)
    own = of_rank(world.rank, world.size, dtype).to(world.device)
    with mock.patch.multiple(collectives, **sizes) if sizes else contextlib.nullcontext():
        reduced = own.clone()
        comm.all_reduce(reduced).wait()
        assert torch.equal(reduced, mean)
        apart = torch.empty(SHARD, dtype=dtype, device=world.device)
        comm.reduce_scatter(own.clone(), apart).wait()
        aliasing = part(own, world.rank, world.size)
        comm.reduce_scatter(own, aliasing).wait()
    assert torch.equal(apart, part(mean, world.rank, world.size))
    assert torch.equal(aliasing, apart)


@pytest.mark.parametrize("size", [3, 4, 8])
def test_another_order_of_additions_would_show(size):
    backwards = sum(of_rank(rank, size) for rank in reversed(range(size))) / size
    assert not torch.equal(backwards, mean_in_rank_order(size))


@pytest.mark.ranks(*SIZES)
def test_gathers_exchanges_and_broadcasts_deliver_every_ranks_values(world):
    comm, size, rank, last = Collectives(), world.size, world.rank, world.size - 1
    everyone = [of_rank(other, size).to(world.device) for other in range(size)]
    gathered = torch.cat([part(everyone[other], other, size) for other in range(size)])
    own, shard = everyone[rank].clone(), part(everyone[rank], rank, size).clone()
    apart, aliased, exchanged = torch.zeros_like(own), torch.zeros_like(own), torch.zeros_like(own)
    comm.all_gather(shard, apart).wait()
    part(aliased, rank, size).copy_(shard)
    comm.all_gather(part(aliased, rank, size), aliased).wait()
    collected = torch.zeros_like(own) if rank == last else None
    comm.gather(shard, collected, last).wait()
    for found in (apart, aliased, *([collected] if rank == last else [])):
        assert torch.equal(found, gathered)
    comm.all_to_all(own, exchanged).wait()
    assert torch.equal(exchanged, torch.cat([part(other, rank, size) for other in everyone]))
    parts = [
        torch.full((rank * other,), float(rank), device=world.device) for other in range(size)
    ]  # rank 0's are empty
    arrived = [torch.empty(rank * other, device=world.device) for other in range(size)]
    comm.exchange(parts, arrived).wait()
    assert [part.tolist() for part in arrived] == [[float(other)] * (rank * other) for other in range(size)]
    assert comm.traffic.by_collective().get("exchange", 0) == 4 * rank * (sum(range(size)) - rank)
    heard = own.clone()
    comm.broadcast(heard).wait()
    assert torch.equal(heard, everyone[0])
    objects = [{"rank": other, "text": "x" * 1000 * other, "none": None} for other in range(size)]
    assert comm.gather_objects(objects[rank]) == objects  # of any size


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "traced"])
def three_ranks(request, worlds):
    """A world of three ranks: where they trace their collectives, each group has a count of its own."""
    with open_traced(3) if request.param else contextlib.nullcontext(worlds(3)) as world:
        yield world


def in_subgroup(world, members):
    """Run collectives in a group whose ranks differ from the world's; return None outside of it."""
    group = dist.new_group(members)
    if world.rank not in members:
        return None
    comm = Collectives(group, deterministic=True)
    reduced = of_rank(comm.rank, comm.size).to(world.device)
    comm.all_reduce(reduced).wait()
    shard = torch.full((2,), float(world.rank), device=world.device)
    gathered = torch.empty(2 * comm.size, device=world.device)
    comm.all_gather(shard, gathered).wait()
    heard = torch.tensor([world.rank], device=world.device)
    comm.broadcast(heard).wait()
    return comm.rank, reduced.cpu(), gathered.tolist(), heard.item(), comm.gather_objects(world.rank)


@pytest.mark.parametrize("members", [[1, 2], [0, 2]], ids=str)
def test_in_a_subgroup_ranks_count_from_its_first_member(three_ranks, members):
    results = three_ranks.run(in_subgroup, members)
    for group_rank, member in enumerate(members):
        rank, reduced, gathered, heard, objects = results[member]
        assert rank == group_rank
        assert torch.equal(reduced, mean_in_rank_order(2))
        assert gathered == [members[0], members[0], members[1], members[1]]
        assert heard == members[0]
        assert objects == members


@pytest.mark.ranks(2, 3)
def test_the_maximum_is_the_same_on_every_rank_and_nan_if_any_value_is(world):
    comm, own = Collectives(), [float(world.rank == 1), -float(world.rank), 0.0 if world.rank else float("nan")]
    everyones = comm.maximum(torch.tensor(own, device=world.device))
    assert everyones[:2].tolist() == [1.0, 0.0]
    assert everyones[2].isnan()
    assert comm.traffic.by_collective() == {"all_gather": (world.size - 1) * 3 * 4}


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        pytest.param(torch.float16, 60000.0, id="fp16 before the sum, which would overflow"),
        pytest.param(torch.bfloat16, 2.0**-133, id="bf16 after it, as half the smallest number is nothing"),
        pytest.param(torch.float32, 2.0**-149, id="fp32 after it"),
    ],
)
def test_a_sum_in_nccls_order_is_divided_once_if_the_world_size_is_no_power_of_two(world, dtype, value):
    """With the backend's own reductions, of the same value on all ranks."""
    comm = Collectives()
    comm.ordered = False
    reduced = torch.full((world.size,), value, dtype=dtype, device=world.device)
    shard = torch.empty(1, dtype=dtype, device=world.device)
    comm.reduce_scatter(reduced.clone(), shard).wait()
    comm.all_reduce(reduced).wait()
    assert {*reduced.tolist(), *shard.tolist()} == {value}


@pytest.mark.parametrize(("size", "averages"), [(1, None), (2, True), (3, False), (8, True)])
def test_nccl_averages_if_that_rounds_no_shard(monkeypatch, size, averages):
    """If the world size is a power of two, 1/N times a shard is exact, and no kernel divides afterwards.

    One rank calls nothing.
    """
    operations = []
    for module, name in ((collectives.dist, "all_reduce"), (collectives, "REDUCE_SCATTER")):
        monkeypatch.setattr(module, name, lambda *args, group: operations.append(args[-1]))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        comm, reduced, shard = Collectives(), torch.ones(size), torch.ones(1)
        comm.backend = "nccl"
        comm.all_reduce(reduced).wait()
        comm.reduce_scatter(torch.ones(size), shard).wait()
    finally:
        dist.destroy_process_group()
    operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
    assert operations == [operation] * (0 if averages is None else 2)
    divided = torch.ones(1) / (size if averages is False else 1)
    assert {*reduced.tolist(), *shard.tolist()} == {divided.item()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL's two reductions may add in orders of their own")
@pytest.mark.ranks(3)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
def test_nccl_adds_16_bits_in_their_own_dtype_or_in_reduce_dtype_which_the_meter_counts(world, reduce_dtype):
    """The backend's own sums stand in for NCCL's."""
    comm, expected = Collectives(reduce_dtype=reduce_dtype), mean_in_rank_order(3, torch.bfloat16)
    comm.ordered = False
    reduced = of_rank(world.rank, 3, torch.bfloat16).to(world.device)
    shard = torch.empty(SHARD, dtype=torch.bfloat16, device=world.device)
    comm.reduce_scatter(reduced.clone(), shard).wait()
    comm.all_reduce(reduced).wait()
    assert torch.equal(shard, part(reduced, world.rank, 3))
    assert torch.equal(reduced.cpu(), expected) == (reduce_dtype is not None)
    each = 2 * SHARD * (4 if reduce_dtype else 2)
    assert comm.traffic.by_collective() == {"all_reduce": 2 * each, "reduce_scatter": each}


@pytest.mark.parametrize("name", SEVEN)
def test_bytes_sent_with_reduce_dtype_are_predicted(world, name):
    made = make_engine(name, precision="bf16", reduce_dtype=torch.float32)
    made.comm.ordered = False
    for step in range(2):
        made.comm.traffic.reset()
        train_step(made, world, step)
        assert made.comm.traffic.by_collective() == made.predicted_wire_bytes_per_step()


# ---- in flight --------------------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 8)
def test_many_in_flight_complete_in_the_order_of_the_calls(world):
    """Each gather forwards what the previous one received from the next rank; only the last is waited for."""
    comm, size = Collectives(), world.size
    links = [torch.zeros(size, device=world.device) for _ in range(101)]
    links[0] += torch.arange(size, device=world.device)
    following = (world.rank + 1) % size
    for before, link in itertools.pairwise(links):
        last = comm.all_gather(before[following : following + 1], link)
    last.wait()
    assert links[-1].tolist() == [(rank + 100) % size for rank in range(size)]


def two_users_of_a_group(world):
    """Two Collectives over one group, called alternately: their messages must not mix."""
    comms, tensors = [Collectives(), Collectives()], [torch.zeros(world.size, device=world.device) for _ in range(40)]
    for index, tensor in enumerate(tensors):
        last = comms[index % 2].all_gather(torch.full((1,), float(index), device=world.device), tensor)
    last.wait()
    return [tensor.tolist() for tensor in tensors]


def test_all_users_of_a_group_share_one_order(three_ranks):
    for received in three_ranks.run(two_users_of_a_group):
        assert received == [[float(index)] * 3 for index in range(40)]


@pytest.mark.skipif(sys.platform != "linux" or torch.cuda.is_available(), reason="reads /proc, about gloo")
@pytest.mark.ranks(4)
def test_gloos_own_threads_give_way_to_lanes(world):
    comm = Collectives()
    comm.ranks_per_node = 2
    comm.by_nodes()  # with separate groups, as in ZeRO++
    names = {int(thread.parent.name): thread.read_text() for thread in Path("/proc/self/task").glob("*/comm")}
    gloos = [thread for thread, name in names.items() if name == "gloo_tcp_loop\n"]
    assert {os.sched_getscheduler(thread) for thread in gloos} == {os.SCHED_BATCH}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the group is bound to a device that gloo does not have")
@pytest.mark.ranks(3)
def test_subgroups_are_not_split_from_a_default_group_that_is_bound_to_a_device(world):
    """A split in NCCL waits for all ranks, and those outside of the subgroup make no group."""
    part, device = dist.new_group([0, 1]), torch.device("cuda", 0)
    dist.group.WORLD.bound_device_id = device
    try:
        with mock.patch.object(dist.distributed_c10d, "_get_split_source") as split:
            if world.rank < 2:
                groups_of(Collectives(part), 1)
        assert dist.group.WORLD.bound_device_id == device and not split.called
    finally:
        dist.group.WORLD.bound_device_id = None


def test_wait_raises_what_the_lane_raised_and_nothing_runs_after_it():
    lane, ran = ThreadLane(), []
    before = lane.submit(lambda: ran.append("before"))
    failing = lane.submit(lambda: 1 / 0)
    after = lane.submit(lambda: ran.append("after"))
    before.wait()
    for handle in (failing, after, failing):
        with pytest.raises(ZeroDivisionError):
            handle.wait()
    assert ran == ["before"]


def test_a_lanes_thread_ends_when_the_lane_is_gone():
    lane = ThreadLane("short")
    lane.submit(lambda: None).wait()
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "short")
    del lane
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_a_handle_holds_its_buffers_while_the_work_runs_and_no_longer():
    lane, started, release = ThreadLane(), threading.Event(), threading.Event()
    buffer = torch.zeros(3)
    life = weakref.ref(buffer)

    def work(buffer):
        started.set()
        release.wait()

    handle = lane.submit(partial(work, buffer), buffer)
    started.wait()
    assert handle.buffers == (buffer,)
    del buffer
    release.set()
    handle.wait()
    assert handle.buffers == ()
    assert life() is None


BACKENDS = [("cpu:gloo,cuda:gloo", "gloo"), ("cpu:gloo", "gloo"), ("cuda:nccl", "nccl")]
BACKENDS += [("cpu:gloo,cuda:nccl", "nccl"), ("cpu:fake,cuda:fake,hpu:fake", "fake")]


@pytest.mark.parametrize(("config", "backend"), BACKENDS)
def test_the_backend_of_a_group_is_the_one_for_gpus(monkeypatch, config, backend):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert backend_of(None) == backend


def test_another_backend_is_an_input_error(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:mpi")
    with pytest.raises(InputError, match="backend is 'mpi'; make the group with 'nccl' or 'gloo'"):
        backend_of(None)


# ---- what an engine submits to the lane, and when --------------------------------------------------------------------


def log_runs(module, name, log):
    def after(module, args, output):
        output.grad_fn.register_prehook(lambda gradients: log.append(f"backward of {name}"))  # just before its kernel

    module.register_forward_pre_hook(lambda module, args: log.append(f"forward of {name}"))
    module.register_forward_hook(after)


def order_on_the_lane(world, stage):
    """What an engine submits to the lane, and when modules run, in its third step."""
    engine, log = zoo_engine(world, stage, "gpt-tiny", bucket_mb=0.005, steps=2), []
    engine.synchronize()
    submit = engine.comm._submit

    def logged(collective, tensor, label, *rest, **options):
        log.append(f"{collective} of {label}")
        return submit(collective, tensor, label, *rest, **options)

    engine.comm._submit = logged
    for number, block in enumerate(engine.module.blocks):
        log_runs(block, f"blocks.{number}", log)
    train_step(engine, world, 2)
    return log


def test_stage_3_submits_a_prefetch_before_the_unit_it_overlaps_with_queues_anything(world):
    # On CUDA the lane waits for all work queued so far, so the gather overlaps with that unit's kernels.
    log = order_on_the_lane(world, "stage3_param")
    gathers = [index for index, entry in enumerate(log) if entry == "all_gather of blocks.1"]
    assert gathers[0] < log.index("forward of blocks.0")
    gather = [index for index, entry in enumerate(log) if entry == "all_gather of blocks.0"][-1]
    assert gather < log.index("backward of blocks.1")
    # The block's own gradients leave before the next block's kernels are queued.
    assert log.index("reduce_scatter of blocks.1") < log.index("backward of blocks.0")


def test_stage_1_reduces_within_backward_and_gathers_bucket_by_bucket(world):
    log = order_on_the_lane(world, "stage1_os")
    assert log.index("reduce_scatter of bucket 0") < log.index("backward of blocks.0")
    gathers = [int(entry.split()[-1]) for entry in log if entry.startswith("all_gather of bucket")]
    assert gathers == sorted(gathers)
    assert len(gathers) > 2


class RecordingLane:
    """Runs nothing, and records the buffers it was given."""

    def __init__(self):
        self.held = []

    def submit(self, work, *buffers):
        self.held.append(buffers)
        return Handle(buffers, lambda buffers: None)


def test_a_receive_buffer_that_was_too_small_lives_until_its_reduction_ends(world):
    comm = Collectives(deterministic=True)
    comm.lane = lane = RecordingLane()
    comm.all_reduce(torch.zeros(64, device=world.device))
    small = comm.receive_buffer
    for numel in (128, 64):
        comm.all_reduce(torch.zeros(numel, device=world.device))
    held = [{buffer.untyped_storage()._cdata for buffer in buffers} for buffers in lane.held]
    first, last = (buffer.untyped_storage()._cdata for buffer in (small, comm.receive_buffer))
    assert [(first in storages, last in storages) for storages in held] == [(True, False), (False, True), (False, True)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL receives from all at once")
@pytest.mark.ranks(1, 2, 4)
def test_a_large_reduction_receives_into_one_segment_and_into_places_already_sent(world):
    comm = Collectives()
    values = torch.arange(world.size * 2**22, device=world.device) % 1000  # two segments per shard
    reduced = values * (world.rank + 1.0)
    comm.all_reduce(reduced).wait()
    assert torch.equal(reduced, values * (world.size + 1) / 2)
    assert comm.receive_buffer.nbytes == (collectives.SEGMENT if world.size > 1 else 0)


@pytest.mark.parametrize("ordered", [False, True])
def test_a_handle_holds_all_that_a_collective_reads_or_writes(world, ordered):
    comm = Collectives()
    comm.lane, comm.ordered = RecordingLane(), ordered
    for name in COLLECTIVES:
        handle = call(comm, name, torch.zeros(2 * world.size, device=world.device))
        assert len(handle.buffers) >= (2 if name in ("reduce_scatter", "all_gather", "all_to_all") else 1), name


# ---- the meter --------------------------------------------------------------------------------------------------

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast")


def law(name, size, rank, ring=False):
    """Bytes that a rank sends per byte of the tensor, times N to make it an integer."""
    shares = {"all_reduce": 2 * (size - 1), "broadcast": 0 if rank else size * (size - 1)}
    if ring:
        shares["broadcast"] = size * (rank < size - 1)
    return shares.get(name, size - 1)


def call(comm, name, tensor):
    """Start one collective over `tensor`."""
    shard = part(tensor, comm.rank, comm.size)
    arguments = {
        "reduce_scatter": (tensor, shard),
        "all_gather": (shard, tensor),
        "all_to_all": (tensor, torch.empty_like(tensor)),
    }
    return getattr(comm, name)(*arguments.get(name, (tensor,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.ranks(*SIZES)
def test_the_meter_counts_the_law_exactly(world, dtype):
    """Over 32 elements per rank. Integers have no mean."""
    comm = Collectives()
    for name in COLLECTIVES if dtype.is_floating_point else ("all_gather", "all_to_all", "broadcast"):
        comm.traffic.reset()
        call(comm, name, torch.zeros(32 * world.size, dtype=dtype, device=world.device)).wait()
        sent = law(name, world.size, world.rank, ring=not comm.point_to_point) * 32 * dtype.itemsize
        assert comm.traffic.by_collective() == ({name: sent} if sent else {})


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO as it is read here is Linux's")
@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL passes shared memory and links, not sockets alone")
@pytest.mark.parametrize("name", COLLECTIVES)
@pytest.mark.parametrize(("world", "megabytes"), [(2, 0.5), (2, 8), (3, 4), (4, 2)], indirect=["world"])
def test_the_meter_agrees_with_the_kernel(world, megabytes, name):
    """Reading the sockets leaves them as they were."""
    comm, tensor = Collectives(), torch.zeros(int(megabytes * 2**20) // 4 // world.size * world.size)
    call(comm, name, tensor).wait()
    dist.barrier()
    comm.traffic.reset()
    files = len(os.listdir("/proc/self/fd"))
    before = bytes_sent_by_own_sockets()
    assert len(os.listdir("/proc/self/fd")) == files
    call(comm, name, tensor).wait()
    dist.barrier()  # a rank that received everything has acknowledged it
    counted = comm.traffic.by_collective().get(name, 0)
    assert bytes_sent_by_own_sockets() - before == pytest.approx(counted, rel=0.01, abs=1000)


# ---- a simulated world runs both paths inline --------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_in_a_simulated_world_every_path_runs_and_the_meter_counts_the_law(monkeypatch, backend, deterministic):
    monkeypatch.setenv("ZERO_TRACE", "1")  # without effect: there is no rank to agree with
    with simulated_world(64, rank=3, backend=backend):
        comm, counted = Collectives(deterministic=deterministic), {}
        assert comm.simulated and comm.tracer is None
        for name in COLLECTIVES:
            comm.traffic.reset()
            handle = call(comm, name, torch.zeros(64 * 32))
            assert handle.buffers  # held as on a stream
            handle.wait()
            assert handle.buffers == ()
            counted[name] = comm.traffic.by_collective().get(name, 0)
        assert comm.maximum(torch.zeros(3)).shape == (3,)
    assert counted == {name: law(name, 64, 3, ring=backend == "nccl") * 32 * 4 for name in COLLECTIVES}
