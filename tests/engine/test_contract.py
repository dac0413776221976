"""The contract of an engine, promise by promise, in every stage."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from baseline import OrderedDDP
from torch import nn
from torch.optim import lr_scheduler
from training import ADAMW, STAGES, batch, make_engine, message_of, same_bits, small_engine, train_step
from training import inputs as inputs_of
from trap_models import Counting, FewRows, Net

from common import models
from common.engine.units import hollow as is_freed


def sent_under_no_sync(world, stage):
    engine = make_engine(stage)
    train_step(engine, world)
    engine.synchronize()
    inputs, targets = batch(engine.module, world, 1)
    engine.comm.traffic.reset()
    with engine.no_sync():
        engine.backward(models.loss(engine(inputs), targets))
    return engine.comm.traffic.by_phase()


def test_no_sync_is_silent_in_stages_0_and_1_only(worlds, stage):
    sent = worlds(2).run(sent_under_no_sync, stage)[0]
    assert ("backward" in sent) == (stage in ("stage2_grad", "stage3_param"))


def sent_after_a_step_under_no_sync(world, stage):
    engine = make_engine(stage)
    inputs, targets = batch(engine.module, world)
    with engine.no_sync():
        train_step(engine, world)  # the step reduces what was put off
        engine.comm.traffic.reset()
        engine.backward(models.loss(engine(inputs), targets))
    return engine.comm.traffic.by_phase()


@pytest.mark.parametrize("stage", ["stage0_ddp", "stage1_os"])
def test_a_step_under_no_sync_does_not_end_it(worlds, stage):
    assert "backward" not in worlds(2).run(sent_after_a_step_under_no_sync, stage)[0]


def clipped(world, stage, clip_norm):
    engine = OrderedDDP if stage == "ddp" else None
    if engine is None:
        engine = make_engine(stage, clip_norm=clip_norm)
    else:
        engine = OrderedDDP(models.build("gpt-tiny"), ADAMW, init=models.initial_values(0), clip_norm=clip_norm)
    norms = []
    for step in range(4):
        inputs, targets = batch(engine.module, world, step)
        engine.backward(models.loss(engine(inputs), targets))
        norms.append(engine.step().norm)
    return engine.full_state_dict(), norms


@pytest.mark.parametrize("size", [1, 3])
def test_the_norm_and_the_clipped_step_are_those_of_every_stage_and_of_ddp(worlds, size):
    (weights, norms), *others = [worlds(size).run(clipped, stage, 0.5)[0] for stage in STAGES]
    for other, other_norms in others:
        assert same_bits(weights, other)
        assert norms == other_norms
    ddp, ddp_norms = worlds(size).run(clipped, "ddp", 0.5)[0]
    assert norms == pytest.approx(ddp_norms, rel=1e-5)
    assert all(norm > 0.5 for norm in norms)
    assert torch.stack([(weights[name] - ddp[name]).norm() for name in ddp]).norm() < 1e-2


SCHEDULERS = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6),  # moves the betas as well
    "warm-up, then cosine": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 3)], [2]
    ),
    "by rule": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
}


def scheduled(world, engine, name):
    """Weights and learning rates under a scheduler of torch's over the engine's optimizer; warnings are errors."""
    engine = make_engine(engine, optimizer=functools.partial(torch.optim.AdamW, lr=1e-2), precision="bf16")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler, rates = SCHEDULERS[name](engine.optimizer), []
        for step in range(5):
            train_step(engine, world, step)
            scheduler.step()
            rates += scheduler.get_last_lr()
    return engine.full_state_dict(), rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_work_unchanged(worlds, stage, name):
    weights, rates = worlds(2).run(scheduled, "baseline:AverageAfterBackward", name)[0]
    ours, our_rates = worlds(2).run(scheduled, stage, name)[0]
    assert same_bits(ours, weights)
    assert our_rates == rates


def read_at_once(world, stage):
    """Read the weights by every road right after a step."""
    engine = make_engine(stage, "gpt-nano", bucket_mb=0.1)
    train_step(engine, world)
    with engine.gathered():
        gathered = {name: p.detach().cpu().clone() for name, p in engine._module.named_parameters()}
    train_step(engine, world, 1)
    with engine.gathered():
        property_read = {name: p.detach().cpu().clone() for name, p in engine.module.named_parameters()}
    whole = engine.full_state_dict()
    return gathered, property_read, whole, engine.full_state_dict()


def test_weights_read_between_step_and_forward_are_the_new_ones(worlds, stage):
    reference = worlds(2).run(train_two, "stage0_ddp")[0]
    gathered, read, whole, again = worlds(2).run(read_at_once, stage)[0]
    assert same_bits(whole, again)
    assert same_bits(whole, reference[1])
    assert all(torch.equal(read[name], whole[name]) for name in read)
    assert all(torch.equal(gathered[name], reference[0][name]) for name in gathered)


def train_two(world, stage):
    engine = make_engine(stage, "gpt-nano", bucket_mb=0.1)
    train_step(engine, world)
    first = engine.full_state_dict()
    train_step(engine, world, 1)
    return first, engine.full_state_dict()


class Borrower(nn.Module):
    """Reads a weight whose own module never runs."""

    window = 17

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.never_called = nn.Linear(64, 16)
        self.last = nn.Linear(16, 256)

    def inputs_and_targets(self, windows):
        return windows[:, :-1].float() / 128 - 1, windows[:, -1].long()

    def forward(self, x):
        return self.last(F.linear(self.first(x).relu(), self.never_called.weight))


def borrow(world, stage):
    with torch.device("meta"):
        module = Borrower()
    engine = make_engine(stage, module)
    losses = [train_step(engine, world, step) for step in range(5)]
    return losses, engine.full_state_dict()


@pytest.mark.parametrize("stage", ["stage1_os", "stage2_grad"])
def test_a_weight_read_outside_its_modules_forward_is_the_new_one(worlds, stage):
    losses, weights = worlds(2).run(borrow, "stage0_ddp")[0]
    ours, our_weights = worlds(2).run(borrow, stage)[0]
    assert losses == ours
    assert same_bits(weights, our_weights)


def two_engines(world, stage):
    """One loss through a student and a teacher, both trained: the teacher's backward is not its own engine's."""
    student, teacher = make_engine(stage, seed=1), make_engine(stage, seed=2)
    for step in range(3):
        inputs, targets = batch(student.module, world, step)
        answers, opinions = student(inputs), teacher(inputs)
        student.backward(
            models.loss(answers, targets) + models.loss(opinions, targets) + (answers - opinions).abs().mean()
        )
        student.step()
        teacher.step()
    return {**student.full_state_dict(), **{f"teacher.{k}": v for k, v in teacher.full_state_dict().items()}}


def test_a_loss_through_two_engines_leaves_none_behind(worlds):
    first, *others = [worlds(3).run(two_engines, stage)[0] for stage in STAGES]
    assert all(same_bits(first, other) for other in others)


def real_and_meta(world, stage):
    """An engine over a model that was built on the device, and one over a meta-device model."""
    module = models.build("gpt-tiny")
    models.materialize(module, models.initial_values(0), world.device)
    engines = [make_engine(stage, module), make_engine(stage, "gpt-tiny")]
    return [[train_step(engine, world, step) for step in range(2)] for engine in engines]


def test_a_meta_device_model_starts_as_a_real_one_does(worlds, stage):
    real, meta = worlds(2).run(real_and_meta, stage)[0]
    assert real == meta


def evaluate(world, stage):
    engine = make_engine(stage, "resnet-tiny")
    train_step(engine, world)
    inputs, targets = batch(engine.module, world, 1)
    engine.eval()
    with torch.no_grad():
        before = models.loss(engine(inputs), targets).item()
    engine.train()
    train_step(engine, world, 1)
    return before, engine.full_state_dict()


def test_an_evaluation_between_steps_changes_nothing(worlds):
    first, *others = [worlds(2).run(evaluate, stage)[0] for stage in STAGES]
    for loss, weights in others:
        assert loss == first[0]
        assert same_bits(weights, first[1])


class Broken(torch.optim.SGD):
    """Raises once, after as many shards as it is told."""

    shards_left = None

    def step(self, closure=None):
        if self.shards_left == 0:
            self.shards_left = None
            raise RuntimeError("broken")
        self.shards_left = self.shards_left and self.shards_left - 1
        return super().step(closure)


def step_that_fails(world, stage):
    """The messages of a step that fails half way and of its repetition; then a step that works."""
    engine = make_engine(stage, optimizer=functools.partial(Broken, lr=0.1))
    engine.optimizer.shards_left = 1
    inputs, targets = batch(engine.module, world)
    engine.backward(models.loss(engine(inputs), targets))
    messages = [message_of(engine.step) for _ in range(2)]
    held = [bucket.master.grad for bucket in engine.buckets]
    train_step(engine, world, 1)
    return messages, held


def test_a_step_that_failed_half_way_is_not_repeated_and_leaves_no_gradient(worlds, stage):
    (failed, repeated), held = worlds(2).run(step_that_fails, stage)[0]
    assert failed == "broken"
    assert repeated == "step() without a backward() since the last step"
    assert held == [None] * len(held)


def left_gradients(world, stage):
    """Weights after a step, where the model had gradients before the engine was made, and where not."""
    found = []
    for stale in (True, False):
        module = models.build("mlp")
        models.materialize(module, models.initial_values(0), world.device)
        for parameter in module.parameters() if stale else ():
            parameter.grad = torch.ones_like(parameter)
        engine = make_engine(stage, module, optimizer=functools.partial(torch.optim.SGD, lr=0.1))
        train_step(engine, world)
        found.append(engine.full_state_dict())
    return same_bits(*found)


def test_gradients_from_before_the_engine_do_not_count(worlds, stage):
    assert all(worlds(2).run(left_gradients, stage))


def buffers_after(world, stage):
    """The weights on this rank, training on after an evaluation; and after a save between forward and backward."""
    engine = make_engine(stage, "resnet-tiny")
    for step in range(2):
        train_step(engine, world, step)
        engine.eval()
        with torch.no_grad():
            engine(batch(engine.module, world, step)[0])
        engine.train()
    inputs, targets = batch(engine.module, world, 2)
    loss = models.loss(engine(inputs), targets)
    engine.full_state_dict()
    engine.backward(loss)
    engine.step()
    return engine.full_state_dict()


def test_buffers_are_those_of_rank_0_whatever_was_evaluated_or_read_between(worlds, stage):
    first, *others = worlds(3).run(buffers_after, stage)
    assert all(same_bits(first, other) for other in others)


def modes(world, stage):
    engine = small_engine(world, stage)
    found = []
    for set_mode in (engine.eval, engine.train, lambda: engine.train(False), lambda: engine.train(True)):
        assert set_mode() is engine
        found.append({module.training for module in engine.module.modules()})
    return found


def test_train_and_eval_set_the_mode_of_every_module(worlds, stage):
    assert worlds(2).run(modes, stage) == [[{False}, {True}, {False}, {True}]] * 2


def recalibrated(module, world):
    """As torch's update_bn does, past the engine."""
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


@torch.no_grad()
def evaluated_between(world, engine):
    """What this rank evaluates to after each way of writing buffers, outside of gathered() and within; its state."""
    made, seen = small_engine(world, engine, make=lambda: Net(block=Counting)), []
    x = inputs_of(world, 0) * 0 + 1
    made.eval()(x)
    for write in (recalibrated, in_part, of_one_rank):
        write(made.module, world)
        seen.append(made(x))
        sent = made.comm.traffic.by_collective().get("broadcast", 0)
        made(x)
        assert made.comm.traffic.by_collective().get("broadcast", 0) == sent  # nothing was written
        with made.gathered():
            if write is not of_one_rank:
                write(made.module, world)
            seen.append(made(x))
        write(made.module, world)
        seen += made.full_state_dict().values()
    with made.gathered():
        for _ in range(3 - world.rank):
            made(x)
    return seen


@pytest.mark.seven
def test_all_ranks_evaluate_by_the_buffers_of_rank_0_whichever_wrote_some(worlds, engine):
    first, *others = worlds(3).run(evaluated_between, engine)
    for other in others:
        assert all(torch.equal(one, another) for one, another in zip(first, other, strict=True))


def kept_from_rank_0(world, stage, broadcast_buffers):
    """This rank's running statistics after a step, and the bytes that a step sends with those it should."""
    engine = make_engine(stage, "resnet-tiny", broadcast_buffers=broadcast_buffers)
    train_step(engine, world)
    engine.comm.traffic.reset()
    train_step(engine, world, 1)
    sent = engine.comm.traffic.by_collective()
    return engine.module.bn.running_mean.cpu().clone(), sent, engine.predicted_wire_bytes_per_step()


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_are_broadcast_unless_told_otherwise(worlds, stage, broadcast_buffers):
    (first, sent, predicted), (second, *_) = worlds(2).run(kept_from_rank_0, stage, broadcast_buffers)
    assert sent == predicted
    assert ("broadcast" in sent) == broadcast_buffers
    assert not torch.equal(first, second)  # each rank's own batch since the last broadcast


def messages_beside(world, stage):
    """What this rank receives from its neighbour while the engine's own messages, of the same size, are under way."""
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
    return received, engine.full_state_dict()["0.weight"].isfinite().all().item()


@pytest.mark.skipif(torch.cuda.is_available(), reason="messages of NCCL have no tags")
def test_the_users_own_messages_and_the_engines_do_not_meet(worlds, stage):
    for rank, found in enumerate(worlds(2).run(messages_beside, stage)):
        assert found == ([[101.0 - rank]] * 3, True)


def compiled(world, stage, compiles):
    torch.manual_seed(0)
    module = Net()
    module.run = lambda blocks, x: blocks[2](blocks[1](blocks[0](x)))
    engine = make_engine(stage, torch.compile(module, backend="eager") if compiles else module)
    for index in range(2):
        engine.backward(engine(inputs_of(world, index)).square().mean())
        engine.step()
    return list(engine.full_state_dict().values())


@pytest.mark.parametrize("stage", ["stage1_os", "stage3_param"])
def test_a_compiled_model_trains_to_the_bits_of_the_plain_one(worlds, stage):
    plain, ours = (worlds(2).run(compiled, stage, compiles)[0] for compiles in (False, True))
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))


def addresses_of_weights(world, engine):
    """Where the weights of a model of odd sizes begin, modulo 64: in forward, in backward and within gathered()."""
    found = set()
    for precision in ("fp32", "bf16"):
        made = small_engine(world, engine, precision, make=FewRows)
        weights = list(made.module.parameters())

        def note(*_, weights=weights):
            found.update(weight.data_ptr() % 64 for weight in weights if weight.numel() and not is_freed(weight))

        for module in made.module.modules():
            module.register_forward_hook(note)
            module.register_full_backward_hook(note)
        for step in range(2):
            made.backward(made(inputs_of(world, step)).float().square().mean())
            made.step()
        with made.gathered():
            note()
    return found


@pytest.mark.seven
def test_a_weight_begins_at_a_multiple_of_64_bytes_where_it_is_read(worlds, engine):
    """As a tensor of its own does: kernels for a few rows round by the address. `few rows` holds the bits to DDP's."""
    assert worlds(2).run(addresses_of_weights, engine) == [{0}, {0}]
