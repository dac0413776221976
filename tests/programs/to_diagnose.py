"""Training functions and engines for `python -m interop.diagnose`, some right, some with a planted fault."""

import random
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

import stage1_os
import stage2_grad

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def model_of(*last):
    """A model with the same weights on all ranks, but different dropout and data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), *last, nn.Linear(16, 4))
    torch.manual_seed(1 + dist.get_rank())
    return model


def losses(engine, steps=100, samples=8):
    """A loss per step."""
    for _ in range(steps):
        x, target = torch.randn(samples, 8), torch.randint(4, (samples,))
        yield nn.functional.cross_entropy(engine(x).float(), target)


def loop(engine, *after, before=lambda: None, **how):
    """Train; `before` is called before each step, and `after` after it."""
    for loss in losses(engine, **how):
        engine.backward(loss)
        before()
        engine.step()
        for call in after:
            call()


def training(optimizer, *last, **options):
    """Make a function that trains a model with these modules before the last, each built by a call."""
    return lambda Engine: loop(Engine(model_of(*(make() for make in last)), optimizer, **options))


# ---- right ----------------------------------------------------------------------------------------------------------

plain, clipped = training(ADAMW), training(SGD, clip_norm=0.1)
dropout, running_statistics = training(ADAMW, partial(nn.Dropout, 0.5)), training(ADAMW, partial(nn.BatchNorm1d, 16))


def sixteen_bit(Engine):
    engine = Engine(model_of(), ADAMW, precision="bf16")
    loop(engine, engine.optimizer.zero_grad)  # not needed; scripts have it


def in_groups(Engine):
    model = model_of()
    flat, others = ([p for p in model.parameters() if (p.ndim == 1) == is_flat] for is_flat in (True, False))
    groups = [{"params": others, "weight_decay": 0.0}, {"params": flat, "lr": 0.03}]
    loop(Engine(model, partial(SGD, weight_decay=0.1), param_groups=groups, clip_norm=0.1))


def accumulated(Engine, **options):
    engine = Engine(model_of(), SGD, **options)
    batches = losses(engine)
    while True:
        for _ in range(2):
            engine.backward(next(batches) / 2)
        engine.step()


accumulated_in_16_bit = partial(accumulated, precision="bf16")


def scheduled(Engine):
    engine = Engine(model_of(), SGD)
    loop(engine, torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, gamma=0.5).step)


def compiled(Engine):
    loop(Engine(torch.compile(model_of(), backend="eager"), ADAMW))


class Unused(nn.Module):
    """Uses the first of two layers; with `turns`, odd ranks use the second."""

    def __init__(self, turns):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.turns = nn.Linear(8, 4), nn.Linear(8, 4), turns
        torch.manual_seed(1 + dist.get_rank())

    def forward(self, x):
        return self.second(x) if self.turns and dist.get_rank() % 2 else self.first(x)


def unused(Engine, turns=False):
    loop(Engine(Unused(turns), ADAMW))


unused_in_turns = partial(unused, turns=True)


def same_data(Engine):
    engine = Engine(model_of(), ADAMW)
    torch.manual_seed(1)
    loop(engine)


# ---- as under DDP, but hardly intended -------------------------------------------------------------------------------


def rates_by_rank(Engine):
    engine = Engine(model_of(), SGD)
    engine.optimizer.param_groups[0]["lr"] = 0.1 / (1 + dist.get_rank())
    loop(engine)


def writes_by_rank(Engine):
    engine = Engine(model_of(), SGD)
    loop(engine, lambda: engine.module[-1].bias.data.mul_(1 - dist.get_rank()))


def scheduled_by_micro_batch(Engine):
    engine = Engine(model_of(), SGD)
    schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, gamma=0.5)
    for number, loss in enumerate(losses(engine)):
        engine.backward(loss / 2)
        if number % 2:
            engine.step()
        schedule.step()


def dropout_seeded_alike(Engine):
    engine = Engine(model_of(nn.Dropout(0.5)), ADAMW)
    batches = [torch.randn(8, 8) for _ in range(9)]
    torch.manual_seed(1)
    for x in batches:
        engine.backward(engine(x).square().mean())
        engine.step()


def unequal_batches(Engine):
    loop(Engine(model_of(), SGD), samples=8 - dist.get_rank())


def unequal_accumulation(Engine):
    engine = Engine(model_of(), SGD)
    batches = losses(engine)
    while True:
        with engine.no_sync():
            for _ in range(dist.get_rank()):
                engine.backward(next(batches))
        engine.backward(next(batches))
        engine.step()


# ---- with a fault ---------------------------------------------------------------------------------------------------


def clips_by_hand(Engine):
    engine = Engine(model_of(), SGD)

    def clip():
        for parameter in engine.module.parameters():
            if parameter.grad is not None:
                parameter.grad.clamp_(-0.01, 0.01)

    loop(engine, before=clip)


def reads_a_weight(Engine):
    engine = Engine(model_of(), SGD)
    for loss in losses(engine):
        engine.backward(loss + 0.1 * engine.module[0].weight.square().sum())
        engine.step()


def draws_by_the_way(Engine):
    engine = Engine(model_of(), SGD)
    if hasattr(engine, "comm"):  # only the engines here have it
        torch.rand(1)
    loop(engine)


def seeds_by_rank(Engine):
    torch.manual_seed(dist.get_rank())
    loop(Engine(nn.Linear(8, 4), SGD))


def unseeded(Engine):
    loop(Engine(nn.Linear(8, 4), SGD), samples=random.randint(8, 1000))


def unequal_steps(Engine):
    loop(Engine(model_of(), SGD), steps=1 + dist.get_rank())


def misses(call, *last):
    """Make a function in which rank 1 leaves out one call."""

    def train(Engine):
        engine = Engine(model_of(*last), SGD)
        for number, loss in enumerate(losses(engine), 1):
            left_out = call if (number, dist.get_rank()) == (2, 1) else None
            if left_out == "both":
                continue
            if left_out != "backward":
                engine.backward(loss)
            if left_out != "step":
                engine.step()

    return train


misses_a_step, misses_a_backward = misses("step"), misses("backward")
misses_both_with_buffers = misses("both", nn.BatchNorm1d(16))


def never_steps(Engine):
    engine = Engine(model_of(), SGD)
    engine.backward(next(losses(engine)))


def raises(Engine):
    Engine(model_of(), SGD)(torch.randn(8, 9))


def two_engines(Engine):
    Engine(model_of(), SGD)
    Engine(model_of(), SGD)


def three_arguments(Engine, data, steps):
    loop(Engine(model_of(), SGD))


no_function = 3


# ---- engines with a fault -------------------------------------------------------------------------------------------


class RoundedFirst(stage1_os.Engine):
    """Its masters are made of weights that are rounded to bf16, as DeepSpeed's are."""

    def __init__(self, model, optimizer, **options):
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        super().__init__(model, optimizer, **options)


class DividesBackwards(stage2_grad.Engine):
    """Its `backward` divides by the number of micro-batches, as DeepSpeed's does."""

    def backward(self, loss):
        super().backward(loss / 2)


class AdamForAdamW(stage1_os.Engine):
    """It decays by way of the gradient."""

    def __init__(self, model, optimizer, **options):
        super().__init__(model, partial(torch.optim.Adam, **optimizer.keywords), **options)


class StepsLate(stage2_grad.Engine):
    """It asks the schedule for its rate before the schedule is told of the step."""

    def step(self):
        (group,) = self.optimizer.param_groups
        rate, group["lr"] = group["lr"], getattr(self, "before", group["lr"])
        result = super().step()
        self.before = group["lr"] = rate
        return result
