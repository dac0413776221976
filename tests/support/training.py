"""What ranks run in the tests: build an engine, train it a few steps on real text, return the results."""

import contextlib
import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from trap_models import WIDTH, Net, step

from common import models
from common.data import Batches, load_text
from common.engine.mixed_precision import LossScaler
from common.engines import find_engine
from common.errors import InputError
from common.ranks.collectives import Collectives

STAGES = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
ENGINES = (*STAGES, "offload", "offload.nvme")
ALL = (*ENGINES, "zeropp")
SEVEN = (*ENGINES, "quantized:Copies")  # ZeRO++ without quantization
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
UNFUSED = functools.partial(torch.optim.AdamW, lr=1e-2)  # for baselines without aligned shards
BUCKET_MB = 0.01  # several buckets even in tiny models


@functools.cache
def text():
    return load_text()[:100_000]


def follows(engine):
    """The stage whose formulas an engine claims: its own, or the one that its attribute `follows` names."""
    stage = engine if engine in ENGINES else getattr(find_engine(engine), "follows", None)
    if stage is None:
        pytest.skip("it does not say which stage's formulas it follows: set `follows`, to 'stage2_grad' for instance")
    return stage


def or_reason(function):
    """A decorator: if the engine raises NotImplementedError, return its message as the reason."""

    @functools.wraps(function)
    def call(*args, **options):
        try:
            return function(*args, **options)
        except NotImplementedError as error:
            return str(error) or "it raises NotImplementedError"

    return call


def message_of(call, *args, **options):
    """The message of what a call raises; None if it raises nothing."""
    try:
        call(*args, **options)
    except (InputError, RuntimeError) as error:
        return str(error)


def message_in_step(call, *args, **options):
    """The message of what a call raises on every rank. Afterwards a collective checks that ranks are in step."""
    message = message_of(call, *args, **options)
    if message is not None:
        assert Collectives().gather_objects(dist.get_rank()) == list(range(dist.get_world_size()))
    return message


def claimed(answers):
    """The ranks' answers; skip if they are the reason why the engine does not claim the test."""
    if isinstance(answers[0], str):
        pytest.skip(answers[0])
    return answers


@contextlib.contextmanager
def unwritten_memory_is_nan():
    """In this context new memory is NaN, also where a storage grows, so a read before a write shows."""
    resize = torch.UntypedStorage.resize_

    def grow(storage, nbytes):
        before = storage.nbytes()
        resize(storage, nbytes)
        if nbytes > before:
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)[before:] = 255  # NaN in any dtype
        return storage

    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch then fills what it allocates
    try:
        with mock.patch.object(torch.UntypedStorage, "resize_", grow):
            yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)


def make_engine(engine, model="gpt-tiny", optimizer=ADAMW, seed=0, **options):
    """Build an engine over a zoo model, or over a module, on this rank."""
    module = models.build(model) if isinstance(model, str) else model
    if not any(tensor.is_meta for tensor in [*module.parameters(), *module.buffers()]):
        module.to("cuda" if torch.cuda.is_available() else "cpu")
    options.setdefault("init", models.initial_values(seed))
    options = {"bucket_mb": BUCKET_MB, "deterministic": True, **options}  # so that the bits agree with NCCL too
    return with_small_scale(find_engine(engine)(module, optimizer, **options))


def with_small_scale(engine):
    """In fp16, an engine gets a loss scale by which no gradient of a small model overflows unless a test makes it."""
    if getattr(engine, "loss_scaler", None) is not None:
        engine.loss_scaler = LossScaler(scale=2.0**10)
    return engine


def inputs(world, index):
    """This rank's inputs of a step, for a model like those of `trap_models`."""
    generator = torch.Generator().manual_seed(10 * index + world.rank)
    return torch.randn(2, 3, WIDTH, generator=generator).to(world.device)


def small_engine(
    world, engine, precision="fp32", make=Net, seed=0, scale=2.0**10, optimizer=UNFUSED, steps=0, run=step, **options
):
    """An engine over such a model, after some steps. In fp16 its loss scale changes within a few."""
    torch.manual_seed(seed)
    made = make_engine(engine, make().to(world.device), optimizer, precision=precision, **options)
    if precision == "fp16":
        made.loss_scaler = LossScaler(scale=scale, window=2)
    for index in range(steps):
        run(made, inputs(world, index))
    return made


def batch(module, world, step=0, global_batch=24):
    """This rank's (inputs, targets) of a global batch."""
    windows = Batches(text(), module.window, global_batch).of(step, world.rank, world.size)
    inputs, targets = module.inputs_and_targets(windows)
    return inputs.to(world.device), targets.to(world.device)


def batch_loss(engine, world, step=0, global_batch=24):
    """The loss of this rank's part of a global batch."""
    inputs, targets = batch(engine.module, world, step, global_batch)
    return models.loss(engine(inputs), targets)


def train_step(engine, world, step=0):
    """Forward, backward, step; return the loss."""
    loss = batch_loss(engine, world, step)
    engine.backward(loss)
    engine.step()
    return loss.item()


def zoo_engine(world, engine, model="gpt-tiny", steps=1, **options):
    """An engine over a zoo model, or over a module, after some steps."""
    made = make_engine(engine, model, **options)
    for index in range(steps):
        train_step(made, world, index)
    return made


def train_counted(world, engine, model="gpt-tiny", steps=3, backwards=1, **options):
    """Train; return the engine, and {byte count of the last step: whether it is as predicted}."""
    made = make_engine(engine, model, **options)
    for index in range(steps):
        made.comm.traffic.reset()
        for micro in range(backwards):
            made.backward(batch_loss(made, world, backwards * index + micro) / backwards)
        made.step()
    measured, predicted = made.accounting.measured(), made.accounting.predicted()
    return made, {name: measured[name] == count for name, count in predicted.items()}


def handed_on(world, writer, reader, folder, precision):
    """Train, save, and train on: in the engine that saved, and in another that loads. The rate changes on the way."""
    first = zoo_engine(world, writer, precision=precision, steps=2)
    for group in first.optimizer.param_groups:
        group["lr"] *= 0.5
    first.save(folder)
    second = make_engine(reader, precision=precision, seed=1)
    second.load(folder)
    for made in (first, second):
        train_step(made, world, 2)
    return same_bits(first.full_state_dict(), second.full_state_dict())


def same_bits(one, other):
    """Whether two state dicts hold the same names and the same bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name].cpu(), other[name].cpu()) for name in one)
