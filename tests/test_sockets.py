"""The process's own sockets: how much may be under way between ranks of one machine."""

import contextlib
import os
import socket
import sys

import pytest
import torch
from harness import STAGES, make_engine

from common import bench, peers
from common.sockets import SEND_BUFFER, keep_messages_in_cache, own_sockets
from common.world import World

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


def test_little_is_under_way_on_this_machine():
    with connection("127.0.0.1", "127.0.0.1") as (near, far, listener):
        before = send_buffer(listener)
        keep_messages_in_cache()
        assert send_buffer(near) == send_buffer(far) == 2 * SEND_BUFFER
        assert send_buffer(listener) == before


def test_connections_to_other_machines_and_other_sockets_stay_as_they_are():
    one, other = socket.socketpair()
    with one, other, connection("127.0.0.1", "127.0.0.2") as (near, far, _):
        before = [send_buffer(each) for each in (one, other, near, far)]
        keep_messages_in_cache()
        assert [send_buffer(each) for each in (one, other, near, far)] == before
        near.sendall(b"still open")
        assert far.recv(10) == b"still open"


def test_looking_at_sockets_leaves_them_blocking_where_a_default_timeout_is_set():
    with connection("127.0.0.1", "127.0.0.1") as (near, *_):
        socket.setdefaulttimeout(30)
        try:
            keep_messages_in_cache()
        finally:
            socket.setdefaulttimeout(None)
        assert os.get_blocking(near.fileno())


def connections():
    for own in own_sockets():
        with contextlib.suppress(OSError):  # not connected
            if own.family != socket.AF_UNIX and own.getpeername():
                yield own


def buffers_after(world, build, *args):
    """The send buffers of this rank when something was built. Other tests may have built engines in this world."""
    for own in connections():
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 * SEND_BUFFER)
    build(*args)
    return [send_buffer(own) for own in connections()]


def contend(everyone):
    """Build DDP as the bench does."""
    case = bench.Case("gpt-tiny", "fp32", 2, batch=2, bucket_mb=1, small_send_buffers=everyone)
    bench._enter(World(0, 2, torch.device("cpu")), peers.TorchDDP, case)


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL chooses its own buffers")
@pytest.mark.parametrize("stage", STAGES)
def test_an_engine_limits_its_connections_to_other_ranks(worlds, stage):
    for buffers in worlds(3).run(buffers_after, make_engine, stage):
        assert len(buffers) >= 2
        assert set(buffers) == {2 * SEND_BUFFER}


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL chooses its own buffers")
@pytest.mark.parametrize("everyone", [False, True])
def test_the_bench_limits_those_of_libraries_where_asked(worlds, everyone):
    for buffers in worlds(2).run(buffers_after, contend, everyone):
        assert (set(buffers) == {2 * SEND_BUFFER}) == everyone
