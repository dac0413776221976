"""The contract of an engine, promise by promise, in every stage."""

import functools
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from optimizers import CountsInItsGroup, Estimates, ScheduleFree
from torch import nn
from torch.optim import lr_scheduler
from training import SEVEN, UNFUSED, make_engine, same_bits, small_engine, train_counted, train_step, zoo_engine
from training import inputs as inputs_of
from trap_models import WIDTH, Counting, FewRows, Net, loss, step

from common import models
from common.engine.units import is_freed
from common.errors import InputError
from common.loop import sha256


@functools.cache
def scheduled(world, engine):
    """Weights and rates under a scheduler that moves the betas as well; warnings are errors."""
    engine, rates = make_engine(engine, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2), precision="bf16"), []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = lr_scheduler.OneCycleLR(engine.optimizer, 1e-2, total_steps=6)
        for step in range(5):
            train_step(engine, world, step)
            scheduler.step()
            rates += scheduler.get_last_lr()
    return engine.full_state_dict(), rates


def test_a_scheduler_of_torchs_is_followed_in_all_that_it_sets_and_warns_of_nothing(world, stage):
    ours, expected = (scheduled(world, engine) for engine in (stage, "baseline:AverageAfterBackward"))
    assert same_bits(ours[0], expected[0])
    assert ours[1] == expected[1]


@functools.cache
def counted(world, engine, optimizer):
    """Weights and options after some steps of an optimizer that counts."""
    made = zoo_engine(world, engine, optimizer=optimizer, clip_norm=1.0, steps=5)
    made.synchronize()
    return made.full_state_dict(), {n: v for n, v in made.optimizer.param_groups[0].items() if n != "params"}


HYBRID = ("replicated:Pairs", 4)  # in two nodes


def in_all(*sizes):
    """A mark: the test runs in each of the seven engines at these world sizes, and in hybrid sharding."""
    ways = [*itertools.product(SEVEN, sizes), HYBRID]
    return pytest.mark.parametrize(("name", "world"), ways, indirect=["world"])


@in_all(1, 2, 3)
@pytest.mark.parametrize("optimizer", [CountsInItsGroup, ScheduleFree])
def test_an_optimizer_may_count_in_its_options(world, name, optimizer):
    """A step of several shards counts once."""
    ours, expected = (counted(world, one, optimizer) for one in (name, "baseline:AverageAfterBackward"))
    assert same_bits(ours[0], expected[0])
    assert ours[1] == expected[1]
    assert all(train_counted(world, name, optimizer=optimizer, clip_norm=1.0)[1].values())


@in_all(2, 3)
def test_what_an_optimizer_estimates_is_refused_by_name_when_it_first_differs(world, name):
    """On every rank, though a rank's own shards may come out alike. What the door sees of it is refused there."""
    made = make_engine(name, optimizer=functools.partial(Estimates, after=30))
    with pytest.raises(InputError, match=r"^'d' of group 0 .+ came out as .+ and .+ from (two shards|ranks)"):
        for index in range(40):
            train_step(made, world, index)
            made.synchronize()
    assert index == 30


@pytest.mark.parametrize("name", ["stage1_os", "stage2_grad"])
def test_ranks_that_step_one_shard_each_compare_what_it_made_of_options(world, name):
    with pytest.raises(InputError, match=r"'lr' of group 0 .+ came out as 0.1 and 0.05 from ranks 0 and 1:"):
        made = make_engine(name, optimizer=CountsInItsGroup, bucket_mb=25)
        assert len(made.buckets) == 1
        made.optimizer.param_groups[0]["step"] = world.rank
        train_step(made, world)


BEGIN = {
    "AdamW": UNFUSED,
    "Adagrad": functools.partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.3),  # has states when built
    "SGD": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),  # has no count
    "Rprop": torch.optim.Rprop,
}
LATER = ("blocks.1", "blocks.0.weight", "head.bias")  # frozen at first, some beside what is trained


def with_frozen(world, engine, frozen, optimizer, precision, bucket_mb):
    torch.manual_seed(0)
    module = Net(block=lambda: nn.Linear(WIDTH, WIDTH)).to(world.device)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(LATER)))
    return make_engine(engine, module, optimizer, precision=precision, bucket_mb=bucket_mb)


def states_taken_along(new, old):
    """What continue_from does, for a baseline."""
    for name, parameter in new.module.named_parameters():
        before = old.module.get_parameter(name)
        parameter.data.copy_(before.data)
        new.masters[parameter].data.copy_(old.masters.get(before, before).data)
        if before in old.masters:
            new.optimizer.state[new.masters[parameter]] = old.optimizer.state[old.masters[before]]


@functools.cache
def thawed(world, engine, optimizer, precision, bucket_mb, folder=None):
    """Weights after steps with frozen parameters and steps with all: in a row, and also by way of other states."""
    made = functools.partial(with_frozen, world, engine)
    old, new = made(True, BEGIN[optimizer], precision, bucket_mb), made(False, BEGIN[optimizer], precision, bucket_mb)
    for index in range(3):
        step(old, inputs_of(world, index))
    if folder is None:
        states_taken_along(new, old)
    else:
        new.continue_from(old)
        before = new.snapshot()
        step(new, inputs_of(world, 9))
        new.restore(before)
        loaded = made(False, BEGIN[optimizer], precision, bucket_mb)
        for index, path in enumerate((folder / "before a step", folder / "after one")):
            new.save(path)
            loaded.load(path)
            new, loaded = loaded, new
            step(new, inputs_of(world, 3 + index))
            assert new.model_state_bytes() == new.predicted_model_state_bytes()
        again = made(False, BEGIN[optimizer], precision, bucket_mb)
        again.continue_from(new)
        new = again
    for index in range(3 if folder is None else 5, 6):
        step(new, inputs_of(world, index))
    return new.full_state_dict()


@in_all(1, 2, 3)
@pytest.mark.parametrize("bucket_mb", [1e-4, 25])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", BEGIN)
def test_a_parameter_that_is_thawed_begins_as_torch_begins_it(world, tmp_path, name, optimizer, precision, bucket_mb):
    """Whatever else lies in its bucket: by continue_from, restore and load, before its first step and after it."""
    ours = thawed(world, name, optimizer, precision, bucket_mb, tmp_path)
    assert same_bits(ours, thawed(world, "baseline:AverageAfterBackward", optimizer, precision, bucket_mb))


def test_gradients_from_before_the_engine_do_not_count(world, stage):
    found = []
    for stale in (True, False):
        module = models.build("mlp")
        models.materialize(module, models.initial_values(0), world.device)
        for parameter in module.parameters() if stale else ():
            parameter.grad = torch.ones_like(parameter)
        engine = make_engine(stage, module, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
        train_step(engine, world)
        found.append(engine.full_state_dict())
    assert same_bits(*found)


def all_the_same(engine, state):
    """Whether every rank has the same bits."""
    return len(set(engine.comm.gather_objects(sha256(state)))) == 1


def recalibrated(module, world):
    """As torch's update_bn does, bypassing the engine."""
    module.train()
    for index in range(2):
        module(inputs_of(world, index))
    module.eval()


def in_part(module, world):
    module.blocks[1].train()
    module(inputs_of(world, 5))
    module.blocks[1].eval()


def of_one_rank(module, world):
    if world.rank == world.size - 1:
        module.blocks[1].mean.data.fill_(7.0)


@pytest.mark.ranks(3)
@pytest.mark.seven
@torch.no_grad()
def test_all_ranks_evaluate_by_the_buffers_of_rank_0_whichever_wrote_some(world, engine):
    """After each kind of write to a buffer, and when gathered() begins; within it each rank has its own."""
    made, seen = small_engine(world, engine, make=lambda: Net(block=Counting)), {}
    x = inputs_of(world, 0) * 0 + 1
    made.eval()(x)
    for write in (recalibrated, in_part, of_one_rank):
        write(made.module, world)
        seen[f"after {write.__name__}"] = made(x)
        sent = made.comm.traffic.by_collective().get("broadcast", 0)
        made(x)
        assert made.comm.traffic.by_collective().get("broadcast", 0) == sent  # nothing was written
        with made.gathered():
            seen[f"within gathered() after {write.__name__}"] = made(x)
            write(made.module, world)
            assert torch.equal(made(x), made.module(x))
        seen[f"when gathered() ended after {write.__name__}"] = made(x)
        write(made.module, world)
        seen |= {f"{name} after {write.__name__}": value for name, value in made.full_state_dict().items()}
    with made.gathered():
        for _ in range(3 - world.rank):
            made(x)
    assert all_the_same(made, seen)


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_are_broadcast_unless_told_otherwise(world, stage, broadcast_buffers):
    engine = make_engine(stage, "resnet-tiny", broadcast_buffers=broadcast_buffers)
    train_step(engine, world)
    engine.comm.traffic.reset()
    train_step(engine, world, 1)
    sent = engine.comm.traffic.by_collective()
    assert sent == engine.predicted_wire_bytes_per_step()
    assert ("broadcast" in sent) == (broadcast_buffers and world.rank == 0)
    assert not all_the_same(engine, {"mean": engine.module.bn.running_mean})  # each rank's batches since the broadcast


def lived(world, name, precision, folder, device="cpu", dtype=torch.float32):
    """The weights at the end of a life with every call, under these defaults of the user's."""
    sgd = functools.partial(torch.optim.SGD, lr=1e-2, momentum=0.9)  # torch's Adam keeps its count on that device
    torch.manual_seed(0)
    modules, xs = [Net().to(world.device) for _ in range(2)], [inputs_of(world, index) for index in range(3)]
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            made, other = (
                small_engine(world, name, precision, lambda module=module: module, optimizer=sgd, clip_norm=1.0)
                for module in modules
            )
            step(made, xs[0])
            made.save(folder)
            before = made.snapshot()
            step(made, xs[1])
            made.restore(before)
            made.load(folder)
            with made.gathered(write=True), torch.no_grad():
                for parameter in made.module.parameters():
                    parameter.mul_(1.5)
            made.backward(loss(made(xs[2])))
            with made.gradients(write=True) as gradients:
                for gradient in gradients.values():
                    gradient.mul_(2)
            made.step()
            made.load_weights({name: weight / 2 for name, weight in made.full_state_dict().items()})
            other.continue_from(made)
            step(other, xs[0])
            return other.full_state_dict()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", [*SEVEN, "replicated:Pairs"])
def test_the_users_defaults_change_nothing(world, tmp_path, name, precision):
    """On "meta", which stands for a GPU here, nothing would have a value."""
    plain = lived(world, name, precision, tmp_path / "plain")
    for default in ({"device": "meta"}, {"dtype": torch.bfloat16}, {"dtype": torch.float64}):
        assert same_bits(lived(world, name, precision, tmp_path / str(default), **default), plain), default


@pytest.mark.skipif(torch.cuda.is_available(), reason="messages of NCCL have no tags")
def test_the_users_own_messages_and_the_engines_do_not_mix(world, stage):
    """Ranks exchange messages while the engine's own, of the same size, are in flight."""
    torch.manual_seed(0)
    engine = make_engine(stage, nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), bucket_mb=1e-6)
    received, shard = [], torch.empty(engine.buckets[0].shard_numel, device=world.device)

    def exchange(module, args, output):
        sending = dist.isend(torch.full_like(shard, 100.0 + world.rank), 1 - world.rank)
        dist.recv(shard, 1 - world.rank)
        sending.wait()
        received.append(shard.unique().tolist())

    engine.module[0].register_forward_hook(exchange)
    for index in range(3):
        engine.backward(engine(inputs_of(world, index)[..., :1].expand(2, 3, 8)).square().mean())
        engine.step()
    assert received == [[101.0 - world.rank]] * 3
    assert engine.full_state_dict()["0.weight"].isfinite().all()


@pytest.mark.seven
def test_compiled_blocks_are_one_graph_together_and_train_to_the_bits_of_plain_ones(world, engine):
    """As in plain torch. With a graph for each block, torch's compiler would give up after eight."""
    torch._dynamo.reset()  # else it reuses graphs of earlier engines
    ends, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    for compiles in (False, True):
        model = models.build("gpt-tiny", device="meta")
        for block in model.blocks if compiles else ():
            block.compile(backend=backend)
        made = make_engine(engine, model)
        for index in range(2):
            train_step(made, world, index)
        ends.append(made.full_state_dict().values())
    assert all(map(torch.equal, *ends))
    assert len(graphs) == 1
    assert sum(node.op.startswith("call") for node in graphs[0].graph.nodes) == 17


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.seven
def test_a_weight_begins_at_a_multiple_of_64_bytes_where_it_is_read(world, engine, precision):
    """In forward, in backward and within gathered(), as a separate tensor would, whatever the sizes in the model.

    Kernels for a few rows round depending on the address. The case `few rows` compares the bits with DDP's.
    """
    made = small_engine(world, engine, precision, make=FewRows)
    weights, found = list(made.module.parameters()), set()

    def note(*_):
        found.update(weight.data_ptr() % 64 for weight in weights if weight.numel() and not is_freed(weight))

    for module in made.module.modules():
        module.register_forward_hook(note)
        module.register_full_backward_hook(note)
    for index in range(2):
        made.backward(made(inputs_of(world, index)).float().square().mean())
        made.step()
    with made.gathered():
        note()
    assert found == {0}
