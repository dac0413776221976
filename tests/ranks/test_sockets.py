"""The process's own sockets: how much may be in flight between ranks of one machine."""

import contextlib
import os
import socket
import sys

import pytest
import torch
import torch.distributed as dist

from common.ranks.sockets import SEND_BUFFER, own_sockets, small_send_buffers
from common.ranks.world import LocalWorld
from interop import peers
from lab import bench

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks for sockets in /proc")


@contextlib.contextmanager
def connection(here, there):
    """A TCP connection from one address to another."""
    listener = socket.create_server((there, 0))
    with listener, socket.create_connection(listener.getsockname(), source_address=(here, 0)) as near:
        far, _ = listener.accept()
        with far:
            yield near, far, listener


def send_buffer(one):
    return one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)


def test_little_is_in_flight_in_new_connections_within_this_machine_and_in_no_others():
    with contextlib.ExitStack() as stack:
        before = stack.enter_context(connection("127.0.0.1", "127.0.0.1"))[:2]
        default = send_buffer(before[0])
        with small_send_buffers():
            near, far, listener = stack.enter_context(connection("127.0.0.1", "127.0.0.1"))
            elsewhere, there, _ = stack.enter_context(connection("127.0.0.1", "127.0.0.2"))
            pair = [stack.enter_context(one) for one in socket.socketpair()]
            again = stack.enter_context(before[0].dup())  # an old connection under a new descriptor
        assert send_buffer(near) == send_buffer(far) == 2 * SEND_BUFFER != default
        assert send_buffer(again) == default  # that of another connection the kernel chooses anew
        assert 2 * SEND_BUFFER not in map(send_buffer, (listener, *pair, *before, again, elsewhere, there))
        elsewhere.sendall(b"still open")
        assert there.recv(10) == b"still open"


def test_looking_at_sockets_leaves_them_blocking_where_a_default_timeout_is_set():
    with connection("127.0.0.1", "127.0.0.1") as (near, *_):
        socket.setdefaulttimeout(30)
        try:
            list(own_sockets())
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(near.fileno())


def buffers(world):
    """The send buffers of gloo's connections from this rank; the store's connection is IPv6."""
    sizes = []
    for own in own_sockets():
        with contextlib.suppress(OSError):  # not connected
            if own.family == socket.AF_INET and own.getpeername():
                sizes.append(send_buffer(own))
    return sizes


class LibraryWithAGroup(peers.ZeroRedundancy):
    """A library that communicates over its own group."""

    def __init__(self, *args, **options):
        super().__init__(*args, process_group=dist.new_group(), **options)


gloo = pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL chooses its own buffers")


@gloo
@pytest.mark.parametrize("small", [True, False])
def test_a_world_limits_the_connections_between_its_ranks_unless_told_otherwise(small):
    with LocalWorld(3, oversubscribe=True, small_send_buffers=small) as world:
        for sizes in world.run(buffers):
            assert len(sizes) == 2
            assert {size == 2 * SEND_BUFFER for size in sizes} == {small}


@gloo
@pytest.mark.parametrize(
    "who, everyone, small",
    [("stage1_os", False, True), (LibraryWithAGroup, False, False), (LibraryWithAGroup, True, True)],
)
def test_the_bench_limits_those_of_libraries_if_asked(who, everyone, small):
    case = bench.Case("gpt-tiny", "fp32", 2, batch=2, bucket_mb=1, small_send_buffers=everyone)
    with contextlib.ExitStack() as stack:
        contestant = bench.Contestant(who)
        contestant.enter(case, stack)
        assert contestant.refusal is None
        for sizes in contestant.world.run(buffers):
            assert {size == 2 * SEND_BUFFER for size in sizes} == {small}
