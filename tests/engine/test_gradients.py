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
HOW = {  # backwards before the gradient is written, and after it; under no_sync
    "one backward": (1, 0, False),
    "accumulated": (2, 0, False),
    "written between two": (1, 1, False),
    "put off": (1, 0, True),
}


def read_and_written(world, engine, precision, how):
    """What is read before and after it is written, and the weights; whether bytes were as predicted."""
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
    as_predicted = made.accounts.measured() == made.accounts.predicted()
    return read, made.full_state_dict(), as_predicted


@functools.cache
def of_stage_0(worlds, size, precision, how):
    return worlds(size).run(read_and_written, "stage0_ddp", precision, how)[0]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("size", "how"), [(1, "accumulated"), (3, "accumulated"), *((2, how) for how in HOW)])
@pytest.mark.seven
def test_gradients_are_read_and_written_alike_in_all_engines(worlds, engine, size, how, precision):
    read, weights, _ = of_stage_0(worlds, size, precision, how)
    for own_read, own_weights, as_predicted in worlds(size).run(read_and_written, engine, precision, how):
        assert as_predicted
        assert all(map(same_bits, own_read, read))
        assert same_bits(own_weights, weights)


def test_what_is_read_is_the_mean_over_ranks_in_fp32(worlds):
    read, _, _ = of_stage_0(worlds, 2, "bf16", "accumulated")
    assert {gradient.dtype for gradient in read[0].values()} == {torch.float32}
    first, second = read[:2]
    assert torch.equal(second["blocks.1.up.weight"], first["blocks.1.up.weight"] * 0.5)
    assert torch.equal(second["head.bias"], torch.full((WIDTH,), 0.01))
    assert torch.equal(second["head.weight"], first["head.weight"])


def clipped_by_hand(world, engine):
    """Whether clipping by hand ends with the bits of clip_norm, and what is said of writes that are none."""
    ended = []
    for options in ({"clip_norm": 0.05}, {}):
        made = small_engine(world, engine, make=Rooted, **options)
        for step in range(2):
            made.backward(loss(made(inputs(world, step))))
            if not options:
                with made.gradients(write=True) as found:
                    norm = torch.stack([g.double().square().sum() for g in found.values()]).sum().sqrt().float()
                    for gradient in found.values():
                        gradient.mul_((0.05 / (norm + 1e-6)).clamp(max=1.0))
            made.step()
        ended.append(made.full_state_dict())
    off = max((ended[0][name] - ended[1][name]).abs().max().item() for name in ended[0])

    def written(change):
        made.backward(loss(made(inputs(world, 0))))
        with made.gradients(write=True) as found:
            change(found)

    wrong = {
        "differs": lambda found: found["head.bias"].add_(world.rank),
        "another shape": lambda found: found.update({"head.bias": torch.ones(2)}),
        "lost": lambda found: found.pop("head.bias"),
    }
    said = {name: message_in_step(written, change) for name, change in wrong.items()}
    made.zero_grad()
    said["no backward"] = message_in_step(lambda: made.gradients().__enter__())
    return off, said


@pytest.mark.seven
def test_clipping_by_hand_is_clip_norm_and_bad_writes_are_refused_on_every_rank(worlds, engine):
    for off, said in worlds(2).run(clipped_by_hand, engine):
        assert off < 1e-6
        assert "the gradient of 'head.bias' differs between rank" in said["differs"]
        assert said["another shape"] == said["lost"]
        assert said["lost"].endswith(f"write a tensor of the shape ({WIDTH},)")
        assert said["no backward"] == "gradients() without a backward() since the last step"


PAGE = ROOT / "interop/YOUR_SCRIPT.md"


def by_the_page(world, engine, precision):
    """Weights after a step by each function that the page prints."""
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.seven
def test_what_the_page_prints_does_the_same_in_all_engines(worlds, engine, precision):
    expected, norms = worlds(2).run(by_the_page, "stage0_ddp", precision)[0]
    for ended, own in worlds(2).run(by_the_page, engine, precision):
        assert own == norms
        assert all(map(same_bits, ended, expected))
        assert not any(same_bits(one, other) for one, other in itertools.pairwise(ended))
