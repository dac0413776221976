"""Lightning's Fabric with an engine's strategy, compared with its own DDP, if the library is installed."""

import hugging_face as hf
import pytest
import torch
from torch import nn
from training import SEVEN, same_bits

pytestmark = [hf.needs("lightning"), pytest.mark.skipif(torch.cuda.is_available(), reason="Fabric is told of CPUs")]
STEPS = 6


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
    """A plain loop as Fabric's users write it; return the mean losses over ranks, and norms."""
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


@pytest.mark.parametrize(
    ("what", "world"), [*((what, 2) for what in CASES), ("plain", 1), ("plain", 3)], indirect=["world"]
)
@pytest.mark.parametrize("name", SEVEN)
def test_a_loop_with_an_engine_is_that_with_ddp(world, name, what):
    found = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            given = dict(CASES[what])
            fabric = fabric_of(world.size, engine, given.pop("precision", "32-true"))
            model, optimizer, rates = set_up(fabric)
            told = loop(fabric, model, optimizer, rates, **given)
            state = fabric.strategy.get_module_state_dict(model._forward_module)
            found.append((*told, state, optimizer.param_groups[0]["lr"]))
    (losses, norms, weights, rate), (ours, our_norms, other, our_rate) = found
    assert rate == our_rate
    assert our_norms == pytest.approx(norms, rel=1e-5)
    exact = what in ("plain", "autocast") and world.size < 3  # DDP divides before it adds, which rounds at 3 ranks
    hf.check_alike((ours, other), (losses, weights), exact)


@pytest.mark.parametrize("name", SEVEN)
def test_a_loop_goes_on_from_a_checkpoint(world, tmp_path, name):
    with hf.as_by_torchrun(world):
        fabric = fabric_of(world.size, name)
        fabric.folder = tmp_path
        whole, _ = loop(fabric, *set_up(fabric))
        fabric = fabric_of(world.size, name)
        model, optimizer, rates = set_up(fabric)
        state = {"model": model, "optimizer": optimizer, "rates": rates, "step": None}
        assert fabric.load(tmp_path, state) == {}
        again, _ = loop(fabric, model, optimizer, rates, begin=state["step"] + 1)
    assert again == whole[3:]


ANY, LITTLE = 1e9, 1e-9
CLIPS = {  # steps with an infinite loss; what each step is clipped to, and whether that may raise; steps left out
    "each call may raise": ({0, 2}, [[(ANY, True)]] * 4, {}),
    "one of two calls may": ({2}, [[(LITTLE, True), (LITTLE, False)], [], [(ANY, True), (ANY, False)], []], {0}),
}


@pytest.mark.parametrize("what", CLIPS)
@pytest.mark.parametrize("name", SEVEN)
def test_a_norm_that_is_not_finite_raises_and_a_step_left_out_takes_its_clipping_with_it_as_with_ddp(world, name, what):
    infinite, clips, left_out = CLIPS[what]
    found = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            fabric, raised = fabric_of(world.size, engine), set()
            model, optimizer, _ = set_up(fabric)
            for step in range(4):
                fabric.backward(model(torch.arange(8)).square().mean() * (float("inf") if step in infinite else 1.0))
                try:
                    for most, raises in clips[step]:
                        fabric.clip_gradients(model, optimizer, max_norm=most, error_if_nonfinite=raises)
                    if step not in left_out:
                        optimizer.step()
                except RuntimeError as error:
                    assert "norm" in str(error)
                    raised.add(step)
                optimizer.zero_grad()
            assert raised == infinite
            found.append(fabric.strategy.get_module_state_dict(model._forward_module))
    assert same_bits(*found)


@pytest.mark.parametrize("name", SEVEN)
def test_gradients_are_dropped_by_the_model_and_the_optimizer_and_a_graph_is_kept(world, name):
    norms = []
    with hf.as_by_torchrun(world):
        fabric = fabric_of(world.size, name)
        model, optimizer, _ = set_up(fabric)
        optimizer.param_groups[0]["lr"] = 0.0  # so that all forwards are alike
        for first in (None, optimizer.zero_grad, model.zero_grad, lambda: None):
            loss = model(torch.arange(8)).square().mean()
            if first is not None:
                fabric.backward(loss, retain_graph=True)
                first()  # drops that gradient, or not
            fabric.backward(loss)
            norms.append(fabric.clip_gradients(model, optimizer, max_norm=1e9))
            optimizer.step()
    once, *others = (norm.item() for norm in norms)
    assert others == pytest.approx([once, once, 2 * once], rel=1e-5)


def test_a_model_on_the_meta_device_is_filled_by_its_modules_own_reset_parameters(world):
    found = []
    with hf.as_by_torchrun(world):
        for name in ("stage0_ddp", "stage3_param"):
            torch.manual_seed(world.rank)  # rank 0's seed counts
            fabric = fabric_of(world.size, name, options={"init": "reset_parameters"})
            with torch.device("meta"):
                model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
            model, _ = fabric.setup(model, torch.optim.AdamW(model.parameters()), move_to_device=False)
            found.append(fabric.strategy.get_module_state_dict(model._forward_module))
    assert same_bits(*found)
    assert found[0]["0.weight"].std() > 0.1
    assert not torch.equal(found[0]["0.weight"], found[0]["2.weight"])


class Half(nn.Linear):
    def reset_parameters(self):
        nn.init.ones_(self.weight)


def half_set(fabric):
    model = Half(4, 4, device="meta")
    model, _ = fabric.setup(model, torch.optim.AdamW(model.parameters()), move_to_device=False)
    model(torch.ones(4))


def two_models(fabric):
    one, other = set_up(fabric), set_up(fabric)
    x = torch.arange(8)
    for model, optimizer, _ in (one, other):
        fabric.backward(model(x).square().mean(), model=model)
        optimizer.step()
    fabric.backward(one[0](x).square().mean())


REFUSED = {  # words of the message -> what is done with a Fabric, and how that is made
    "^precision='bf16-true': give": (lambda fabric: None, {"precision": "bf16-true"}),
    "^'bf16-mixed' is autocast": (set_up, {"precision": "bf16-mixed", "options": {"precision": "bf16"}}),
    "without its optimizer": (lambda fabric: fabric.setup(nn.Linear(4, 4)), {}),
    "^clip_val: ranks keep shards": (lambda fabric: fabric.clip_gradients(*set_up(fabric)[:2], clip_val=1.0), {}),
    "each model together with its optimizer": (lambda fabric: fabric.save("nowhere", {"model": set_up(fabric)[0]}), {}),
    "its states are shards": (lambda fabric: set_up(fabric)[1].state_dict(), {}),
    "there are 2 engines": (two_models, {}),
    "^init= leaves 'bias' without values": (half_set, {"options": {"init": "reset_parameters"}}),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_an_engine_cannot_do_is_refused_in_one_line(world, words):
    act, given = REFUSED[words]
    hf.check_refused(world, words, lambda: act(fabric_of(2, "stage2_grad", **given)))
