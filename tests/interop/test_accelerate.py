"""Accelerate's loop with an engine, compared with Accelerate's own, if the library is installed."""

import hugging_face as hf
import pytest
import torch
from torch import nn
from training import SEVEN

pytestmark = hf.needs("accelerate")
STEPS = 6
CASES = {
    "plain": {},
    "accumulated": {"gradient_accumulation_steps": 2},
    "clipped": {"max_norm": 0.05},
    "autocast": {"mixed_precision": "bf16"},
}


def accelerator_of(name, **given):
    import accelerate  # noqa: PLC0415
    from accelerate.state import AcceleratorState, GradientState  # noqa: PLC0415

    from interop.accelerate import Accelerator  # noqa: PLC0415

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    if name is None:
        return accelerate.Accelerator(cpu=True, **given)
    return Accelerator(engine=name, engine_options=given.pop("engine_options", None), cpu=True, **given)


def prepared(accelerator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    windows = hf.Windows(4 * STEPS * accelerator.num_processes).text
    loader = torch.utils.data.DataLoader(windows, batch_size=2)
    return accelerator.prepare(model, optimizer, loader, rates)


def loop(accelerator, model, optimizer, loader, rates, max_norm=None, saved=None):
    """A plain loop as Accelerate's users write it: this rank's losses, all ranks' predictions, norms."""
    losses, norms, predictions = [], [], []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients and max_norm:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
            rates.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        predictions.append(accelerator.gather_for_metrics(logits.argmax(-1)))
        if number == 5 and saved:
            accelerator.save_state(saved)
    return losses, [norm.item() for norm in norms], torch.cat(predictions)


@pytest.mark.parametrize(
    ("what", "world"), [*((what, 2) for what in CASES), ("plain", 1), ("plain", 3)], indirect=["world"]
)
@pytest.mark.parametrize("name", SEVEN)
def test_a_loop_by_an_engine_is_accelerates_own(world, name, what):
    found = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            given = dict(CASES[what])
            max_norm = given.pop("max_norm", None)
            accelerator = accelerator_of(engine, **given)
            model, optimizer, loader, rates = prepared(accelerator)
            told = loop(accelerator, model, optimizer, loader, rates, max_norm)
            found.append((*told, accelerator.get_state_dict(model), rates.get_last_lr()))
    (losses, norms, predicted, weights, rate), ours = found
    assert rate == ours[4]
    assert ours[1] == pytest.approx(norms, rel=1e-5)
    exact = what in ("plain", "autocast") and world.size < 3  # DDP divides before it adds, which rounds at 3 ranks
    hf.check_alike((ours[0], ours[3]), (losses, weights), exact)
    assert not exact or torch.equal(predicted, ours[2])


@pytest.mark.parametrize("name", SEVEN)
def test_a_loop_goes_on_from_a_saved_state(world, tmp_path, name):
    with hf.as_by_torchrun(world):
        accelerator = accelerator_of(name)
        whole, _, _ = loop(accelerator, *prepared(accelerator), saved=tmp_path)
        accelerator = accelerator_of(name)
        model, optimizer, loader, rates = prepared(accelerator)
        accelerator.load_state(tmp_path)
        rest = accelerator.skip_first_batches(loader, 6)
        again, _, _ = loop(accelerator, model, optimizer, rest, rates)
        with accelerator.engine.gathered():
            assert all(p.isfinite().all() for p in accelerator.unwrap_model(model).parameters())
    assert again == whole[6:]


@pytest.mark.parametrize("name", SEVEN)
def test_a_new_model_is_prepared_once_memory_is_freed_and_one_to_evaluate_alone(world, name):
    found = []
    with hf.as_by_torchrun(world):
        accelerator = accelerator_of(name)
        for _ in range(2):
            made = prepared(accelerator)
            found.append(loop(accelerator, *made)[0])
            loss = made[0](torch.arange(4)).sum()
            accelerator.backward(loss, retain_graph=True)
            accelerator.backward(loss)
            assert accelerator.free_memory(*made) == [None] * len(made)
        accelerator.prepare_model(nn.Linear(2, 2), evaluation_mode=True)
    assert found[0] == found[1]


def twice(accelerator, parameters):
    accelerator.clip_grad_norm_(parameters(), 0.05)
    accelerator.clip_grad_norm_(parameters(), 0.1)


PARTS = "^clip_grad_norm_: .* within engine.gradients"
REFUSED = {
    "fp16": (prepared, {"mixed_precision": "fp16"}, "fp16"),
    "two precisions": (prepared, {"mixed_precision": "bf16", "engine_options": {"precision": "bf16"}}, "choose one"),
    "a model alone": (lambda a: a.prepare(nn.Linear(2, 2)), {}, "with its one optimizer"),
    "two models": (lambda a: (prepared(a), prepared(a)), {}, "call free_memory"),
    "prepare_model": (lambda a: a.prepare_model(nn.Linear(2, 2)), {}, "^prepare_model: .* its one optimizer"),
    "prepare_optimizer": (lambda a: a.prepare_optimizer(torch.optim.SGD([nn.Parameter()])), {}, "^prepare_optimizer: "),
    "values clipped": (lambda a: a.clip_grad_value_([], 1.0), {}, "^clip_grad_value_"),
    "a norm of 0": (lambda a: a.clip_grad_norm_(prepared(a)[0].parameters(), 0.0), {}, "^clip_norm=0.0"),
    "a part clipped": (lambda a: a.clip_grad_norm_(prepared(a)[0].get_submodule("1").parameters(), 1.0), {}, PARTS),
    "others clipped": (lambda a: a.clip_grad_norm_([*prepared(a)[0].parameters(), nn.Parameter()], 1.0), {}, PARTS),
    "clipped twice": (lambda a: twice(a, prepared(a)[0].parameters), {}, "one step clips once, .* by .0.05, 2.0."),
    "weights written": (lambda a: prepared(a)[0].load_state_dict({}), {}, "^load_state_dict"),
    "no folder": (lambda a: prepared(a) and a.load_state(), {}, "needs the folder"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_engine_cannot_do_is_refused_in_one_line(world, what):
    act, given, words = REFUSED[what]
    hf.check_refused(world, words, lambda: act(accelerator_of("stage2_grad", **given)))
