"""Hugging Face's and Lightning's words: what needs none of these libraries; and the page, where they are installed."""

import importlib
import importlib.metadata
import math
import os
import re
import subprocess
import sys
import tomllib
from functools import partial
from unittest import mock

import hugging_face as hf
import pytest
import torch
from places import ROOT
from torch import nn
from training import SEVEN

from common.engines import find_engine
from common.errors import InputError
from interop.wrapped import TRIED, Model, Optimizer, engine_for, tried

PAGE = (ROOT / "interop/HUGGING_FACE.md").read_text()
SCRIPTS = dict(
    zip(("trainer", "accelerate", "fabric"), re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), strict=True)
)

# ---- without the libraries -------------------------------------------------------------------------------------------


def found(version):
    """As if every library were of this version, or were not installed."""
    error = importlib.metadata.PackageNotFoundError
    answers = {"return_value": version} if version else {"side_effect": error}
    return mock.patch.object(importlib.metadata, "version", **answers)


@pytest.mark.parametrize("module", ["transformers", "accelerate", "fabric"])
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


def test_the_page_and_the_extra_name_the_versions_that_were_tried():
    page = " ".join(PAGE.split())
    assert all(f"{name} {version}" in page for name, version in TRIED.items())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    if "words" in extras:
        assert {f"{name}=={version}" for name, version in TRIED.items()} == set(extras["words"])


def built(world, name):
    """Losses and weights of an engine's own loop, and of one by the model and the optimizer that stand for it."""
    told = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(world.device)
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if wrapped:
            rates = torch.optim.lr_scheduler.StepLR(adamw, 2, 0.5)  # of the script's own optimizer
            engine = engine_for(name, model, adamw, {"clip_norm": 0.5})
            called, optimizer = Model(engine), Optimizer(engine, adamw)
        else:
            engine = called = find_engine(name)(model, partial(torch.optim.AdamW, lr=1e-2), clip_norm=0.5)
            rates = torch.optim.lr_scheduler.StepLR(engine.optimizer, 2, 0.5)
        losses = []
        for step in range(4):
            torch.manual_seed(10 * step + world.rank)
            loss = called(torch.randn(4, 16, device=world.device)).square().mean()
            engine.backward(loss)
            if wrapped:
                norm = optimizer.clip(0.5) if step % 2 else torch.tensor(math.nan)  # else as the engine was built
                assert math.isnan(norm)
                optimizer.step()
            else:
                norm = torch.tensor(engine.step().norm)
            rates.step()
            losses.append((loss.item(), norm.item() if step % 2 else None, engine.optimizer.param_groups[0]["lr"]))
        told.append((losses, engine.full_state_dict()))
    for act in (
        adamw.step,
        optimizer.state_dict,
        partial(optimizer.step, lambda: loss),
        partial(optimizer.clip, 0.0),
        partial(optimizer.clip, 1.0, 3.0),
    ):
        with pytest.raises((InputError, RuntimeError)):
            act()
    assert called.get_submodule("0").in_features == 16  # what the model has besides
    return told


def adversaries(world, name):
    """The weights of a GAN after some steps: what its maker's loss leaves in the critic is dropped by the zero_grad of
    the engine, the model, the optimizer, or the one that the script has built.
    """
    told = []
    for drops in ("engine", "model", "optimizer", "own"):
        torch.manual_seed(0)
        critic, maker = (nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2))
        made = []
        for model in (critic, maker):
            own = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = engine_for(name, model, own, {})
            made.append({"model": Model(engine), "optimizer": Optimizer(engine, own), "own": own, "engine": engine})
        judge, draw = made
        for step in range(3):
            torch.manual_seed(10 * step + world.rank)
            real, noise = torch.randn(4, 8), torch.randn(4, 8)
            judge[drops].zero_grad()
            with torch.no_grad():
                false = draw["model"](noise)
            judge["engine"].backward((judge["model"](false) - judge["model"](real)).mean())
            judge["optimizer"].step()
            draw[drops].zero_grad()
            draw["engine"].backward(-judge["model"](draw["model"](noise)).mean())
            draw["optimizer"].step()
        told.append([*judge["engine"].full_state_dict().values(), *draw["engine"].full_state_dict().values()])
    return told


@pytest.mark.parametrize("name", SEVEN)
def test_a_gan_drops_gradients_by_whichever_zero_grad_it_has(worlds, name):
    first, *others = worlds(2).run(adversaries, name)[0]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("ranks", [2, *(pytest.param(ranks, marks=pytest.mark.exhaustive) for ranks in (1, 3))])
@pytest.mark.parametrize("name", SEVEN)
def test_a_model_and_an_optimizer_that_stand_for_an_engine_train_as_it_does(worlds, name, ranks):
    (losses, weights), (ours, other) = worlds(ranks).run(built, name)[0]
    assert losses == ours
    assert hf.equal(weights, other)


def test_a_count_of_tokens_is_not_rounded_to_16_bits():
    engine = mock.Mock(module=nn.Identity())
    Model(engine)(num_items_in_batch=torch.tensor(1023.0))
    given = engine.call_args.kwargs["num_items_in_batch"]
    assert (given.item(), given.is_floating_point()) == (1023, False)


# ---- with them -------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_pages_scripts_run(tmp_path, name):
    pytest.importorskip({"fabric": "lightning.fabric", "trainer": "transformers"}.get(name, name))
    (tmp_path / "script.py").write_text(SCRIPTS[name])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "script.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(torchrun, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert len(re.findall(r"^(?:epoch \d loss [\d.]+|tensor)", ended.stdout, re.MULTILINE)) == (
        1 if name == "trainer" else 2
    )


def facts(world, folder, name):
    """The last table of the page, row by row, with an engine alone."""
    import copy  # noqa: PLC0415

    from accelerate import init_empty_weights  # noqa: PLC0415
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    make, adamw, folder = find_engine(name), partial(torch.optim.AdamW, lr=1e-2), hf.shared(folder)
    config = hf.llama().config
    if world.rank == 0:
        hf.llama().save_pretrained(f"{folder}/base")
    torch.distributed.barrier()
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    engine = make(model, adamw, init=lambda name, tensor: None)
    engine.load_weights(f"{folder}/base/model.safetensors")
    tokens = hf.Windows(1).text.to(world.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    state = engine.full_state_dict()
    if world.rank == 0:
        given = dict(state)
        model.save_pretrained(f"{folder}/tuned", state_dict=given)
        assert not given  # it was emptied
    torch.distributed.barrier()
    assert hf.equal(LlamaForCausalLM.from_pretrained(f"{folder}/tuned").state_dict(), state)
    with engine.gathered():
        long = model.generate(tokens, max_new_tokens=2 + 3 * world.rank, do_sample=False, eos_token_id=None).shape[1]

    tuned = get_peft_model(hf.llama(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    engine = make(tuned, adamw)
    with engine.gathered():
        merged = copy.deepcopy(tuned).merge_and_unload()
        torch.testing.assert_close(merged(input_ids=tokens).logits, tuned(input_ids=tokens).logits)
    assert merged.state_dict().keys() == state.keys()
    with pytest.raises(InputError, match="gathered"), engine.gathered():
        tuned.merge_adapter()

    compiled = make(torch.compile(hf.llama(), backend="eager"), adamw).full_state_dict()
    model = hf.llama()
    model.compile(backend="eager")
    engine = make(model, adamw)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    assert compiled.keys() == {f"_orig_mod.{key}" for key in state}
    assert engine.full_state_dict().keys() == state.keys()
    return long


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SEVEN)
def test_what_the_page_says_of_an_engine_alone(worlds, tmp_path, name):
    for library in ("transformers", "accelerate", "peft"):
        pytest.importorskip(library)
    assert worlds(2).run(facts, tmp_path, name) == [hf.WINDOW + 2, hf.WINDOW + 5]
