"""Peers, the alternative libraries: each follows torch's DDP, holds what it should, and reports what it lacks."""

import contextlib
import functools
import importlib.util

import pytest
import torch
import torch.distributed as dist
from matrix import CELLS, Cell, as_judged
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from training import ADAMW, BUCKET_MB, batch, same_bits, train_step
from verdicts import passes

from common import models
from common.engines import find_engine
from interop import museum, peers
from interop.peers.base import Peer
from lab.compare import relative_difference

# Bytes per parameter of (parameters, gradients, optimizer) in fp32 with Adam, averaged over n ranks.
HOLDS = {
    peers.ZeroRedundancy: lambda n: (4, 4, 8 / n),
    peers.FSDP2: lambda n: (4 / n, 4 / n, 8 / n),
    peers.FSDP2KeepParameters: lambda n: (4 / n, 4 / n, 8 / n),
    peers.DeepSpeed1: lambda n: (4, 4 / n, 12 / n),  # fp32 masters, too; the gradient's shard is kept
    peers.DeepSpeed2: lambda n: (4, 4 / n, 12 / n),
    peers.DeepSpeed3: lambda n: (4 / n, 4 / n, 12 / n),
}
NEED_EVERY_PARAMETER = (peers.DeepSpeed1, peers.DeepSpeed2)
missing = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def case(peer, *others):
    """A test's case, skipped if the peer's library is not installed."""
    mark = missing if issubclass(peer, peers.DeepSpeed1) else ()
    return pytest.param(peer, *others, marks=mark, id="-".join([*others[:1], peer.name]))


every_peer = pytest.mark.parametrize("peer", [case(peer) for peer in HOLDS])


@pytest.fixture(scope="module", autouse=True)
def ranks_that_deepspeed_changed_end_here(worlds):
    yield
    worlds.close()


def make(peer, model="gpt-tiny", **options):
    return peer(models.build(model), ADAMW, init=models.initial_values(0), bucket_mb=BUCKET_MB, **options)


def train(world, peer, model="gpt-tiny", **options):
    engine = make(peer, model, **options)
    losses = [train_step(engine, world, step) for step in range(10)]
    held = engine.model_state_bytes() if peer is not peers.TorchDDP else None
    return engine.full_state_dict(), losses, held


@every_peer
def test_each_rank_holds_the_states_of_a_stage_and_has_whole_weights_in_fp32(worlds, peer):
    weights, _, held = zip(*worlds(2).run(train, peer), strict=True)
    expected = models.build("gpt-tiny", device="cpu").state_dict()
    for state in weights:
        assert {name: value.shape for name, value in state.items()} == {k: v.shape for k, v in expected.items()}
        assert {value.dtype for value in state.values()} == {torch.float32}
    count = sum(parameter.numel() for parameter in models.build("gpt-tiny").parameters())
    for state, per_parameter in zip(("parameters", "gradients", "optimizer"), HOLDS[peer](2), strict=True):
        mean = sum(rank[state] for rank in held) / 2
        assert mean == pytest.approx(per_parameter * count, rel=5e-3)  # step counts


@pytest.mark.parametrize("cell", [Cell("gpt-tiny", "fp32", 2), Cell("gpt-tiny", "fp32", 3, "clipped")], ids=str)
@every_peer
def test_weights_losses_and_norms_are_the_baselines_but_for_rounding(worlds, tmp_path, peer, cell):
    """`make scores` runs the whole suite."""
    name = f"interop.peers:{peer.__name__}"
    assert passes(worlds, name, as_judged(name, cell), tmp_path)


@pytest.mark.parametrize("peer", [case(peer) for peer in HOLDS if peer not in NEED_EVERY_PARAMETER])
def test_parameters_that_a_rank_does_not_use_are_trained(worlds, tmp_path, peer):
    if issubclass(peer, peers.FSDP2) and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip(f"FSDP2 of torch {torch.__version__} cannot")
    name = f"interop.peers:{peer.__name__}"
    assert passes(worlds, name, as_judged(name, Cell("moe-tiny", "fp32", 2)), tmp_path)


def accumulated(world, peer, quiet):
    """Two steps of three micro-batches, the last of them reduced, after a micro-batch that is dropped."""
    engine = make(peer)
    for step in range(2):
        for micro in range(4):
            inputs, targets = batch(engine.module, world, 4 * step + micro)
            with engine.no_sync() if micro in (1, 2) or (quiet and micro == 0) else contextlib.nullcontext():
                engine.backward(models.loss(engine(inputs), targets) / 3)
            if micro == 0:
                engine.zero_grad()
        engine.step()
    return engine.full_state_dict()


@pytest.mark.parametrize("quiet", [False, True], ids=["", "from no_sync too"])
@every_peer
def test_no_sync_accumulates_and_zero_grad_drops(worlds, peer, quiet):
    if quiet and issubclass(peer, (peers.FSDP2, peers.DeepSpeed2)):
        pytest.skip(f"{peer.name} cannot drop what no_sync left: it says so, below")
    weights, reference = (worlds(2).run(accumulated, which, quiet)[0] for which in (peer, peers.TorchDDP))
    assert relative_difference(weights, reference) < 1e-4


@every_peer
def test_gathered_weights_are_whole(world, peer):
    engine = make(peer)
    train_step(engine, world)
    with engine.gathered(engine.module.blocks[0]):
        block = engine.module.blocks[0]
        seen = {name: p.detach().cpu().clone() for name, p in block.named_parameters(prefix="blocks.0")}
    train_step(engine, world, 1)
    again = make(peer)
    train_step(again, world)
    whole = again.full_state_dict()
    assert same_bits(seen, {name: value for name, value in whole.items() if name.startswith("blocks.0.")})


@pytest.mark.parametrize("peer", [case(peer) for peer in HOLDS if "bf16" in peer.precisions])
@pytest.mark.parametrize("model", ["gpt-tiny", "mlp"])  # integer inputs, floating inputs
def test_bf16_trains_fp32_weights_close_to_those_of_fp32(worlds, model, peer):
    weights, losses, _ = worlds(2).run(functools.partial(train, precision="bf16"), peer, model)[0]
    _, in_fp32, _ = worlds(2).run(train, peers.TorchDDP, model)[0]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert losses == pytest.approx(in_fp32, rel=1e-2)
    assert losses != in_fp32


# ---- a peer refuses what it does not do ---------------------------------------------------------------------------


def some_loss(engine):
    return engine(torch.zeros(2, 16, dtype=torch.long, device=next(engine.module.parameters()).device)).square().mean()


def two_reduced_backwards(peer):
    engine = make(peer)
    engine.backward(some_loss(engine))
    engine.backward(some_loss(engine))


def drop_what_no_sync_left(peer):
    engine = make(peer)
    with engine.no_sync():
        engine.backward(some_loss(engine))
    engine.zero_grad()


REFUSED = {
    "fp16": lambda peer: make(peer, precision="fp16"),
    "a group of its own": lambda peer: make(peer, process_group=dist.new_group()),
    "two reduced backwards": two_reduced_backwards,
    "drop what no_sync left": drop_what_no_sync_left,
    "unused parameters": lambda peer: make(peer, "moe-tiny"),
    "save": lambda peer: make(peer).save("nowhere"),
    "load": lambda peer: make(peer).load("nowhere"),
}
WHY = {
    ("fp16", peers.ZeroRedundancy): "zero_redundancy is run in fp32 only: .* no fp32 master",
    ("fp16", peers.FSDP2): "fsdp2 is run in fp32 and bf16 only: .* no loss scaling",
    ("fp16", peers.DeepSpeed3): "deepspeed3 is run in fp32 and bf16 only: ",
    ("a group of its own", peers.DeepSpeed2): "makes its data-parallel group itself",
    ("two reduced backwards", peers.DeepSpeed1): "a second backward replaces the gradient of the first",
    ("two reduced backwards", peers.DeepSpeed2): "a second backward replaces the gradient of the first",
    ("unused parameters", peers.DeepSpeed2): "ranks that use different parameters send buckets of different sizes",
    ("drop what no_sync left", peers.FSDP2): "cannot drop the whole gradients that no_sync",
    ("drop what no_sync left", peers.DeepSpeed2): "does not drop gradients that no_sync",
    ("save", peers.FSDP2): "a checkpoint format of its own",
    ("load", peers.DeepSpeed1): "a checkpoint format of its own",
}


@pytest.mark.parametrize(("peer", "what", "why"), [case(peer, what, why) for (what, peer), why in WHY.items()])
def test_a_peer_says_what_it_does_not_do(world, peer, what, why):
    with pytest.raises(NotImplementedError, match=why):
        REFUSED[what](peer)


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_without_deepspeed_its_peers_say_how_to_install_it(world):
    with pytest.raises(NotImplementedError, match=r"pip install 'zero-stages\[peers\]'"):
        make(peers.DeepSpeed2)


@every_peer
def test_a_peer_names_its_settings_and_versions(peer):
    assert peer.settings
    assert all(version[0].isdigit() for version in peer.versions().values())


@pytest.mark.parametrize("exhibit", museum.SHOWN["exhibits"], ids=lambda exhibit: exhibit["issue"])
def test_what_the_museum_shows_is_a_cell_of_the_matrix_and_an_engine(exhibit):
    assert exhibit["cell"] in map(str, CELLS)
    assert issubclass(find_engine(exhibit["engine"]), Peer)


@pytest.mark.parametrize(("peer", "times"), [(peers.FSDP2, 2), (peers.FSDP2KeepParameters, 1)])
def test_fsdp2_has_shards_between_steps_and_whole_parameters_meanwhile_if_it_keeps_them(world, peer, times):
    """The table "FSDP2 that keeps parameters" of stage 3's page."""
    engine = make(peer)
    shards = lambda: [isinstance(p, DTensor) for p in engine.module.parameters()]  # noqa: E731
    for _ in range(2):
        assert all(shards())
        with CommDebugMode() as sent:
            inputs, targets = batch(engine.module, world, 0)
            loss = models.loss(engine(inputs), targets)
            assert all(shards()) if times == 2 else not any(shards())
            engine.backward(loss)
            assert all(shards())
        engine.step()
    counts, ops = sent.get_comm_counts(), torch.ops.c10d
    assert counts[ops._allgather_base_] == times * counts[ops._reduce_scatter_base_] > 0
