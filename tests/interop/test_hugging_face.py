"""Hugging Face's and Lightning's words: tests without the libraries, and the page, if they are installed."""

import copy
import importlib
import importlib.metadata
import math
import re
import sys
import tomllib
import types
from functools import partial
from unittest import mock

import numpy
import pytest
import torch
from commands import run
from places import ROOT
from torch import nn
from training import SEVEN, same_bits

from common.engines import ENGINES, find_engine
from common.errors import InputError
from interop.wrapped import TRIED, Model, Optimizer, engine_for, factory_of, tried

PAGE = (ROOT / "interop/HUGGING_FACE.md").read_text()
IN_ORDER = ("trainer", "accelerate", "fabric", "lightning")
SCRIPTS = dict(zip(IN_ORDER, re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True))

# ---- without the libraries -------------------------------------------------------------------------------------------


def found(version):
    """Pretend that every library has this version, or is not installed."""
    error = importlib.metadata.PackageNotFoundError
    answers = {"return_value": version} if version else {"side_effect": error}
    return mock.patch.object(importlib.metadata, "version", **answers)


@pytest.mark.parametrize("module", ["transformers", "accelerate", "fabric", "lightning"])
def test_a_library_that_is_absent_is_named_in_one_line(module):
    name = f"interop.{module}"
    with mock.patch.dict(sys.modules), found(None), pytest.raises(InputError) as refused:
        for known in [known for known in sys.modules if known.startswith("interop.")]:
            del sys.modules[known]
        importlib.import_module(name)
    assert re.fullmatch(r"\w+ is not installed; write pip install -e '.\[words\]'", str(refused.value))


def test_a_version_that_was_not_tried_is_said_in_one_line():
    with found("4.0.0"), pytest.warns(RuntimeWarning, match=r"^.* tried with peft 0.21.2, not with 4.0.0$"):
        tried("peft")
    with found(TRIED["peft"]):
        tried("peft")


def test_the_page_names_every_engine_and_as_the_extra_does_the_versions_that_were_tried():
    page = " ".join(PAGE.split())
    assert all(f"{name} {version}" in page for name, version in TRIED.items())
    assert all(f"`{name}`" in page for name in ENGINES)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {f"{name}=={version}" for name, version in TRIED.items()} == set(extras["words"])


class Clamped(torch.optim.Adagrad):
    """It is built with states, and clamps gradients by a tensor in a table, an array, a default and a method."""

    def __init__(self, params, most=1.0, **options):
        super().__init__(params, **options)
        self.table, self.rule = {"most": torch.tensor(most)}, self.clamped
        self.most, self.defaults["least"] = numpy.array([most, most]), -most

    def clamped(self, gradient):
        return gradient.clamp(self.defaults["least"], min(self.table["most"].item(), *self.most))

    def step(self, closure=None):
        for weights in (weights for group in self.param_groups for weights in group["params"]):
            weights.grad = None if weights.grad is None else self.rule(weights.grad)
        return super().step(closure)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", SEVEN)
def test_a_model_and_an_optimizer_that_stand_for_an_engine_train_as_it_does(world, name):
    told = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(world.device)
        model[0].bias.requires_grad_(False)  # torch's optimizers take it
        own = Clamped(model.parameters(), 1e-3, lr=1e-2)
        if wrapped:
            engine = engine_for(name, model, own, {"clip_norm": 0.5})
            called, optimizer = Model(engine), Optimizer(engine, own)
        else:
            engine = called = find_engine(name)(model, partial(Clamped, most=1e-3, lr=1e-2), clip_norm=0.5)
        rates = torch.optim.lr_scheduler.StepLR(own if wrapped else engine.optimizer, 2, 0.5)  # the script's own
        losses = []
        for step in range(4):
            torch.manual_seed(10 * step + world.rank)
            loss = called(torch.randn(4, 16, device=world.device)).square().mean()
            engine.backward(loss)
            if wrapped:
                norm = optimizer.clip(0.5) if step % 2 else torch.tensor(math.nan)  # otherwise as the engine was built
                assert math.isnan(norm)
                optimizer.step()
            else:
                norm = torch.tensor(engine.step().norm)
            rates.step()
            losses.append((loss.item(), norm.item() if step % 2 else None, engine.optimizer.param_groups[0]["lr"]))
        told.append((losses, engine.full_state_dict()))
    clip, closed = optimizer.clip, partial(optimizer.step, lambda: loss)
    for act in (own.step, optimizer.state_dict, closed, partial(clip, 0.0), partial(clip, 1.0, 3.0)):
        with pytest.raises((InputError, RuntimeError)):
            act()
    assert called.get_submodule("0").in_features == 16  # another attribute of the model
    (losses, weights), (ours, other) = told
    assert losses == ours
    assert same_bits(weights, other)


def stepped(optimizer):
    for weights in optimizer.param_groups[0]["params"]:
        weights.grad = torch.ones_like(weights)
    optimizer.step()


SGD, AdamW, Adagrad = torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad
LOST = {  # words of the message -> what is done with an optimizer before an engine gets it
    "'slow' of this SGD holds parameters": (SGD, lambda o: setattr(o, "slow", {o.param_groups[0]["params"][0]: 1})),
    "'log' of this SGD .* cannot be copied": (SGD, lambda o: setattr(o, "log", sys.stderr)),
    "the step of this SGD was replaced": (SGD, lambda o: setattr(o, "step", types.MethodType(print, o))),
    "this AdamW has states already": (AdamW, stepped),
    "this Adagrad has states already": (Adagrad, stepped),
    "this SGD has states already": (SGD, lambda o: o.state.update(count=1)),
    "a hook of the optimizer's step": (SGD, lambda o: o.register_step_post_hook(print)),
}


@pytest.mark.parametrize("words", LOST)
def test_what_an_optimizer_would_lose_is_named(words):
    make, act = LOST[words]
    given = make(nn.Linear(4, 4).parameters(), lr=0.1)
    act(given)
    with pytest.raises(InputError, match=words):
        factory_of(given)


@pytest.mark.parametrize("name", SEVEN)
def test_the_scripts_scheduler_sets_the_rates_whatever_made_new_groups(world, tmp_path, name):
    model = nn.Linear(4, 4).to(world.device)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    held = given.param_groups[0]
    engine, rates = engine_for(name, model, given, {}), torch.optim.lr_scheduler.StepLR(given, 1, 0.5)
    optimizer = Optimizer(engine, given)

    def step():
        engine.backward(engine(torch.ones(1, 4, device=world.device)).sum())
        optimizer.step()
        rates.step()
        return {group["lr"] for group in (held, *(of.param_groups[0] for of in (given, optimizer, engine.optimizer)))}

    assert step() == {0.05}
    kept = engine.snapshot()
    engine.save(tmp_path)
    for back in (partial(engine.restore, kept), partial(engine.load, tmp_path)):
        assert step() == {0.025}
        back()
        held["weight_decay"] = 0.5  # as a script does that holds the group
        assert engine.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert step() == {0.025}
    with engine.gathered():
        other = copy.deepcopy(model)
    engine_for(name, other, torch.optim.SGD(other.parameters(), lr=0.1), {}).continue_from(engine)
    with pytest.raises(InputError, match="that another one continues from"):
        rates.step()


@pytest.mark.parametrize("name", SEVEN)
def test_gradients_are_dropped_by_every_zero_grad(world, name):
    """What another engine's backward left, too: test_zero_grad_and_retain_graph_do_what_they_do_in_a_plain_loop."""
    module = nn.Linear(4, 4)
    own = torch.optim.SGD(module.parameters(), lr=0.1)
    engine = engine_for(name, module, own, {})
    for drops in (engine, Model(engine), Optimizer(engine, own), own):
        engine.backward(engine(torch.ones(1, 4)).sum())
        drops.zero_grad()
        with pytest.raises(RuntimeError, match="without a backward"):
            engine.step()


def test_a_count_of_tokens_is_not_rounded_to_16_bits():
    engine = mock.Mock(module=nn.Identity())
    Model(engine)(num_items_in_batch=torch.tensor(1023.0))
    given = engine.call_args.kwargs["num_items_in_batch"]
    assert (given.item(), given.is_floating_point()) == (1023, False)


# ---- with them -------------------------------------------------------------------------------------------------------


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize(("name", "by"), [*((name, TORCHRUN) for name in SCRIPTS), ("lightning", ())])
def test_the_pages_scripts_run(tmp_path, name, by):
    pytest.importorskip({"fabric": "lightning.fabric", "trainer": "transformers"}.get(name, name))
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    settings = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = run(*by, "script.py", cwd=tmp_path, **settings)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = re.findall(r"^(?:epoch \d loss [\d.]+|tensor)", ended.stdout, re.MULTILINE)
    assert len(told) == (1 if name == "trainer" else 2)
