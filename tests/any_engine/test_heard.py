"""An engine does what it is told, and what it reports is true: no option is accepted and ignored."""

import contextlib
import gc
import sys

import pytest
import torch
import torch.distributed as dist
from matrix import reduces_at_once
from training import batch_loss, claimed, inputs, make_engine, or_reason, zoo_engine
from trap_models import Net, loss
from trap_models import step as take_a_step

from common import models
from common.loop import sha256
from common.measure.memory import storage_bytes, storage_id
from common.models import count
from lab.sockets import bytes_sent_by_own_sockets

GRADIENT = 4 * count(models.build("gpt-nano"))  # bytes, in fp32
pytestmark = [pytest.mark.seven, pytest.mark.parametrize("size", [2])]
on_cpus = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="looks at gloo and its sockets"
)


@or_reason
def sends_in_backward(world, engine):
    """Bytes that the kernel saw this rank send in a forward and backward, with and without no_sync."""
    made, sent = make_engine(engine, "gpt-nano", bucket_mb=0.5), {}
    for step in range(2):  # the first sets up connections
        for quiet in (True, False):
            dist.barrier()
            before = bytes_sent_by_own_sockets()
            with made.no_sync() if quiet else contextlib.nullcontext():
                made.backward(batch_loss(made, world, step))
            made.synchronize()
            dist.barrier()
            sent[quiet] = bytes_sent_by_own_sockets() - before
        made.step()
    return sent[True], sent[False]


@on_cpus
def test_under_no_sync_no_gradient_is_sent(worlds, size, engine):
    if reduces_at_once(engine):
        pytest.skip("it says that every backward reduces")
    once = GRADIENT * (size - 1) / size  # one pass over the gradient
    for quiet, loud in claimed(worlds(size).run(sends_in_backward, engine)):
        said = f"a backward sends {quiet} bytes under no_sync, and {loud} without: was it heard?"
        assert min(quiet, once - (loud - quiet)) < 0.1 * once, said


class Scaled(Net):
    """Has a buffer that scales its output."""

    def __init__(self, scale):
        super().__init__()
        self.register_buffer("scale", torch.tensor(float(scale)))

    def forward(self, x):
        return super().forward(x) * self.scale.to(x.dtype)


@or_reason
def begins_with(world, engine):
    """Digests of a rank's initial values and of those that it starts with, or None if they are refused."""
    torch.manual_seed(world.rank)
    module = Scaled(world.rank + 1).to(world.device)
    given = sha256(module.state_dict())
    try:
        made = make_engine(engine, module)
    except NotImplementedError:
        raise
    except (RuntimeError, ValueError):
        return given, None
    made.eval()
    weights = sha256({name: value for name, value in made.full_state_dict().items()})
    made.train()
    take_a_step(made, inputs(world, 0))
    return given, weights, made.module.scale.item()


def test_ranks_with_different_initial_values_start_with_those_of_rank_0_or_are_refused(worlds, size, engine):
    ranks = claimed(worlds(size).run(begins_with, engine))
    refused = [rank[1] is None for rank in ranks]
    if not all(refused):
        assert not any(refused)
        weights, scales = zip(*(rank[1:] for rank in ranks), strict=True)
        assert set(weights) == {ranks[0][0]}, "ranks keep first weights of their own"
        assert set(scales) == {1.0}, "ranks keep buffers of their own"


@or_reason
def holds_before_a_step(world, engine):
    """Bytes of all of an engine's tensors after a second backward, and the bytes it reports."""
    before = storages()
    made = zoo_engine(world, engine, "gpt-nano", bucket_mb=0.1)
    made.backward(batch_loss(made, world, 1))
    made.synchronize()
    held = sum(nbytes for place, nbytes in storages().items() if place not in before)
    made.step()
    told = made.model_state_bytes() if hasattr(made, "model_state_bytes") else None
    if told is None:
        raise NotImplementedError("it tells no bytes: model_state_bytes()")
    if hasattr(made, "accounting"):  # ours: add bytes on the host, here the same memory, and in flight
        on_host = sum(made.accounting.measured().get("host_state_bytes", {}).values())
        told = {**told, "on the host": on_host, "in flight": storage_bytes(made.live()["buckets in flight"])}
    return held, sum(told.values())


def storages():
    """The storages of all tensors of this process, {place: bytes}."""
    gc.collect()
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, torch.nn.Parameter)]
    return {
        storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in tensors if tensor.layout is torch.strided
    }


@on_cpus
def test_an_engine_holds_no_more_than_it_reports(worlds, size, engine):
    for held, told in claimed(worlds(size).run(holds_before_a_step, engine)):
        assert held < 1.05 * told + GRADIENT / 4, f"{held} bytes are held, and {told} of them told"


@or_reason
def beside_each_other(world, engine, together):
    """Digests of two models with separate groups, trained interleaved or one after the other."""
    digests = []
    pairs = [(0, 1)] if together else [(0,), (1,)]
    for seeds in pairs:
        pair = [engine_with_groups(world, engine, seed) for seed in seeds]
        for index in range(3):
            losses = [loss(made(inputs(world, 10 * seed + index))) for seed, made in zip(seeds, pair, strict=True)]
            for made, one in zip(pair, losses, strict=True):
                made.backward(one)
            for made in pair:
                made.step()
        digests += [sha256(made.full_state_dict()) for made in pair]
    return digests


def engine_with_groups(world, engine, seed):
    torch.manual_seed(seed)
    module = Net().to(world.device)
    flat, others = ([p for p in module.parameters() if (p.ndim <= 1) == is_flat] for is_flat in (True, False))
    groups = [{"params": others, "weight_decay": 0.1 * seed}, {"params": flat, "lr": 3e-3 * (1 + seed)}]
    return make_engine(engine, module, param_groups=groups)


def test_two_engines_with_separate_groups_train_as_each_does_alone(worlds, size, engine):
    alone, woven = (claimed(worlds(size).run(beside_each_other, engine, together)) for together in (False, True))
    assert woven == alone
