"""Lightning's Fabric with an engine's strategy, beside its own DDP; where the library is installed."""

import hugging_face as hf
import pytest
import torch
from torch import nn
from training import SEVEN

STEPS = 6


@pytest.fixture(scope="module")
def installed():
    pytest.importorskip("lightning.fabric")


def fabric_of(ranks, name, precision="32-true", options=None):
    from lightning.fabric import Fabric  # noqa: PLC0415
    from lightning.fabric.strategies import DDPStrategy  # noqa: PLC0415

    from interop.fabric import ZeroStrategy  # noqa: PLC0415

    strategy = DDPStrategy() if name is None else ZeroStrategy(name, **(options or {}))
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=ranks, precision=precision)
    fabric.launch()
    return fabric


def set_up(fabric):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return (*fabric.setup(model, optimizer), rates)


def loop(fabric, model, optimizer, rates, begin=0, accumulate=1, max_norm=None):
    """A plain loop, as Fabric's users write it; the mean losses over ranks, and norms."""
    text, losses, norms = hf.Windows(STEPS * accumulate * fabric.world_size).text, [], []
    for step in range(begin, STEPS):
        for micro in range(accumulate):
            window = text[(step * accumulate + micro) * fabric.world_size + fabric.global_rank]
            with fabric.no_backward_sync(model, enabled=micro < accumulate - 1):
                loss = nn.functional.cross_entropy(model(window[:-1]), window[1:])
                fabric.backward(loss / accumulate)
        norms += [fabric.clip_gradients(model, optimizer, max_norm=max_norm)] if max_norm else []
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        losses.append(fabric.all_reduce(loss.detach()).item())
        if step == 2 and "folder" in vars(fabric):
            fabric.save(fabric.folder, {"model": model, "optimizer": optimizer, "rates": rates, "step": step})
    return losses, [norm.item() for norm in norms]


CASES = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    "clipped": {"max_norm": 0.05},
    "autocast": {"precision": "bf16-mixed"},
}


def both(world, name, arguments):
    found = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            arguments_of_loop = dict(arguments)
            fabric = fabric_of(world.size, engine, arguments_of_loop.pop("precision", "32-true"))
            model, optimizer, rates = set_up(fabric)
            told = loop(fabric, model, optimizer, rates, **arguments_of_loop)
            state = fabric.strategy.get_module_state_dict(model._forward_module)
            found.append((*told, state, optimizer.param_groups[0]["lr"]))
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize(("what", "ranks"), [*((what, 2) for what in CASES), ("plain", 1), ("plain", 3)])
@pytest.mark.parametrize("name", SEVEN)
def test_a_loop_with_an_engine_is_that_with_ddp(installed, worlds, name, what, ranks):
    (losses, norms, weights, rate), (ours, our_norms, other, our_rate) = worlds(ranks).run(both, name, CASES[what])[0]
    assert rate == our_rate
    assert our_norms == pytest.approx(norms, rel=1e-5)
    if what in ("plain", "autocast") and ranks < 3:  # DDP divides before it adds: with 3 ranks that rounds
        assert losses == ours
        assert hf.equal(weights, other)
    else:
        assert ours == pytest.approx(losses, rel=1e-5)
        assert hf.apart(other, weights) < 1e-5


def resumed(world, folder, name):
    """Losses of a whole run, and of one that goes on from its checkpoint; what was saved beside the model."""
    with hf.as_by_torchrun(world):
        fabric = fabric_of(world.size, name)
        fabric.folder = hf.shared(folder)
        whole, _ = loop(fabric, *set_up(fabric))
        fabric = fabric_of(world.size, name)
        model, optimizer, rates = set_up(fabric)
        state = {"model": model, "optimizer": optimizer, "rates": rates, "step": None}
        left = fabric.load(folder, state)
        again, _ = loop(fabric, model, optimizer, rates, begin=state["step"] + 1)
    return whole, again, left


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SEVEN)
def test_a_loop_goes_on_from_a_checkpoint(installed, worlds, tmp_path, name):
    whole, again, left = worlds(2).run(resumed, tmp_path / "saved", name)[0]
    assert again == whole[3:]
    assert left == {}


def dropped(world, name):
    """Norms of a gradient: alone, after another one that was dropped, and added to another one of the same graph."""
    found = []
    with hf.as_by_torchrun(world):
        for drops in (None, "model", "optimizer", "twice"):
            fabric = fabric_of(world.size, name)
            model, optimizer, _ = set_up(fabric)
            loss = model(torch.arange(8)).square().mean()
            if drops is not None:
                fabric.backward(loss, retain_graph=True)
            if drops in ("model", "optimizer"):
                {"model": model, "optimizer": optimizer}[drops].zero_grad()
            fabric.backward(loss)
            norm = fabric.clip_gradients(model, optimizer, max_norm=1e9)
            optimizer.step()
            found.append(norm.item())
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SEVEN)
def test_gradients_are_dropped_by_the_model_and_the_optimizer_and_a_graph_is_kept(installed, worlds, name):
    once, *others = worlds(2).run(dropped, name)[0]
    assert others == pytest.approx([once, once, 2 * once], rel=1e-2 if name == "zeropp" else 1e-5)


def two_models(fabric, folder):
    one, other = set_up(fabric), set_up(fabric)
    x = torch.arange(8)
    for model, optimizer, _ in (one, other):
        fabric.backward(model(x).square().mean(), model=model)
        optimizer.step()
    fabric.backward(one[0](x).square().mean())


def bad_norm(fabric, folder):
    model, optimizer, _ = set_up(fabric)
    fabric.backward(model(torch.arange(8)).sum() * float("inf"))
    fabric.clip_gradients(model, optimizer, max_norm=1.0)
    optimizer.step()


REFUSED = {
    "16-bit weights": (lambda fabric, _: fabric, {"precision": "bf16-true"}, "^precision='bf16-true': give"),
    "two precisions": (
        lambda fabric, _: set_up(fabric),
        {"precision": "bf16-mixed", "options": {"precision": "bf16"}},
        "^'bf16-mixed' is autocast",
    ),
    "a model alone": (lambda fabric, _: fabric.setup(nn.Linear(4, 4)), {}, "without its optimizer"),
    "values clipped": (
        lambda fabric, _: fabric.clip_gradients(*set_up(fabric)[:2], clip_val=1.0),
        {},
        "^clip_val: ranks keep shards",
    ),
    "a model saved alone": (
        lambda fabric, folder: fabric.save(folder, {"model": set_up(fabric)[0]}),
        {},
        "each model together with its optimizer",
    ),
    "an optimizer's states": (lambda fabric, _: set_up(fabric)[1].state_dict(), {}, "its states are shards"),
    "whose loss": (two_models, {}, "there are 2 engines"),
    "a norm that is not finite": (bad_norm, {}, "the gradient's norm was"),
}


def ask(what, folder):
    act, given, _ = REFUSED[what]
    act(fabric_of(2, "stage2_grad", **given), folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", REFUSED)
def test_what_an_engine_cannot_do_is_refused_in_one_line(installed, worlds, tmp_path, what):
    hf.check_refused(worlds, REFUSED[what][2], ask, what, tmp_path / "saved")
