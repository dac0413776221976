"""The mean gradient between backward and step: the same in every engine, read and written, to the byte."""

import functools
import itertools
import re
from contextlib import nullcontext

import pytest
import torch
from places import ROOT
from training import inputs, message_in_step, same_bits, small_engine
from trap_models import WIDTH, Rooted, loss

PRECISIONS = ("fp32", "bf16", "fp16")
HOW = {  # backwards before the gradient is written and after; whether those before run under no_sync
    "one backward": (1, 0, False),
    "accumulated": (2, 0, False),
    "written between two": (1, 1, False),
    "put off": (1, 0, True),
}


@functools.cache
def read_and_written(world, engine, precision, how):
    """The gradients before and after each write, and the weights; bytes are as predicted."""
    before, after, put_off = HOW[how]
    made = small_engine(world, engine, precision, make=Rooted, scale=2.0**4, clip_norm=0.5)
    read = []
    for step in range(2):
        made.comm.traffic.reset()
        for index in range(before):
            with made.no_sync() if put_off else nullcontext():
                made.backward(loss(made(inputs(world, 2 * step + index))))
        with made.gradients() as found:
            read.append({name: gradient.clone() for name, gradient in found.items()})
        with made.gradients(made.module.blocks, made.module.head, write=True) as found:
            found["head.bias"] = torch.full_like(found["head.bias"], 0.01)
            found["blocks.1.up.weight"].mul_(0.5)
        with made.gradients() as found:
            read.append({name: gradient.clone() for name, gradient in found.items()})
        for index in range(after):
            made.backward(loss(made(inputs(world, 2 * step + index + 10))))
        made.step()
    assert made.accounting.measured() == made.accounting.predicted()
    return [*read, made.full_state_dict()]


WAYS = [(1, "accumulated"), (3, "accumulated"), *((2, how) for how in HOW)]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("world", "how"), WAYS, indirect=["world"])
@pytest.mark.seven
def test_gradients_are_read_and_written_alike_in_all_engines(world, engine, how, precision):
    ended, expected = (read_and_written(world, name, precision, how) for name in (engine, "stage0_ddp"))
    assert all(map(same_bits, ended, expected))


PAGE = ROOT / "interop/YOUR_SCRIPT.md"


@functools.cache
def by_the_page(world, engine, precision):
    """The weights after a step by each function on the page."""
    (code,) = re.findall(r"```python\n(def sam_step.*?)```", PAGE.read_text(), re.DOTALL)
    page = {"torch": torch}
    exec(compile(code, str(PAGE), "exec"), page)
    made = small_engine(world, engine, precision, make=Rooted, scale=2.0**4)
    before, x = made.full_state_dict(), inputs(world, 0)
    ended = [before]
    page["sam_step"](made, lambda: loss(made(x)))
    ended.append(made.full_state_dict())
    out = made(x)
    page["surgery_step"](made, [loss(out), -loss(out[:, :2])])
    page["noisy_step"](made, loss(made(x)), 0.1, torch.Generator().manual_seed(3))
    norms = page["adaptively_clipped_step"](made, loss(made(x)))
    return [*ended, made.full_state_dict()], norms


BAD_WRITES = {
    "the gradient of 'head.bias' differs between rank": lambda found, world: found["head.bias"].add_(world.rank),
    f"write a tensor of the shape ({WIDTH},)": lambda found, world: found.update({"head.bias": torch.ones(2)}),
    f"; write a tensor of the shape ({WIDTH},)": lambda found, world: found.pop("head.bias"),
}


@pytest.mark.seven
def test_bad_writes_are_refused_on_every_rank(world, engine):
    made = small_engine(world, engine, make=Rooted)

    def write(change):
        made.backward(loss(made(inputs(world, 0))))
        with made.gradients(write=True) as found:
            change(found, world)

    for said, change in BAD_WRITES.items():
        assert said in message_in_step(write, change)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.seven
def test_what_the_page_prints_does_the_same_in_all_engines(world, engine, precision):
    (ended, norms), (expected, same) = (by_the_page(world, name, precision) for name in (engine, "stage0_ddp"))
    assert norms == same
    assert all(map(same_bits, ended, expected))
    assert not any(same_bits(one, other) for one, other in itertools.pairwise(ended))
