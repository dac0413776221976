"""Lightning's Trainer with an engine's strategy, compared with its own DDP, if the library is installed."""

import contextlib
from functools import partial

import hugging_face as hf
import pytest
import torch
from torch import nn
from training import SEVEN, same_bits

from common.engines import find_engine
from common.errors import InputError

on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="the Trainer is told of CPUs")
pytestmark = [hf.needs("lightning"), on_cpus]
EPOCHS, BATCHES = 2, 5  # batches of a rank in an epoch


def module_of(**changed):
    from lightning.pytorch import LightningModule  # noqa: PLC0415 - only if installed

    class Module(LightningModule):
        """Two layers and a parameter of its own; it notes its losses. `changed` are further attributes."""

        def __init__(self):
            super().__init__()
            self.losses, self.net = [], None
            for attribute, value in changed.items():
                setattr(self, attribute, value)

        def configure_model(self):
            if self.net is None:
                self.built_on = torch.empty(0).device
                torch.manual_seed(0)
                self.net = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 256))
                self.scale = nn.Linear(1, 1, bias=False)

        def forward(self, tokens):
            return self.net(tokens) * self.scale.weight

        def loss(self, batch):
            return nn.functional.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch, batch_idx):
            self.log("validated", self.loss(batch), sync_dist=True)

        test_step = validation_step

        def predict_step(self, batch, batch_idx):
            return self(batch).argmax(-1)

        def configure_optimizers(self):
            return self.rates_of(torch.optim.AdamW(self.parameters(), lr=1e-2))

        @staticmethod
        def rates_of(adamw):
            by_step = torch.optim.lr_scheduler.StepLR(adamw, 2, 0.9)
            return [adamw], [
                {"scheduler": by_step, "interval": "step"},
                torch.optim.lr_scheduler.ExponentialLR(adamw, 0.5),
            ]

    return Module()


def trainer_of(ranks, name, options=None, saves_to=None, calls=(), **given):
    from lightning.pytorch import Trainer  # noqa: PLC0415
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415
    from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415

    from interop.lightning import ZeroStrategy  # noqa: PLC0415

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 1}
    strategy = DDPStrategy() if name is None else ZeroStrategy(name, **(options or {}))
    saves = [ModelCheckpoint(saves_to, monitor="validated", save_top_k=-1)] if saves_to else []
    loops = {"max_epochs": EPOCHS, "enable_checkpointing": bool(saves), "callbacks": [*calls, *saves]}
    return Trainer(accelerator="cpu", devices=ranks, strategy=strategy, **{**quiet, **loops, **given})


def loader(ranks):
    return torch.utils.data.DataLoader(hf.Windows(2 * BATCHES * ranks).text, batch_size=2)


def fit(trainer, module, **given):
    trainer.fit(module, loader(trainer.world_size), loader(trainer.world_size), **given)
    rates = [entry.scheduler.get_last_lr() for entry in trainer.lr_scheduler_configs]
    return module.losses, rates, trainer.global_step


def weights_of(trainer):
    engine = getattr(trainer.strategy, "engine", None)
    return trainer.lightning_module.state_dict() if engine is None else engine.full_state_dict()


def plain(world, name, accumulate_grad_batches=1, gradient_clip_val=None, precision="32-true"):
    """The Trainer's run as a loop on an engine: this rank's losses, and the weights."""
    module = module_of()
    module.configure_model()
    engine = find_engine(name)(module, partial(torch.optim.AdamW, lr=1e-2), clip_norm=gradient_clip_val)
    _, (by_step, by_epoch) = module.rates_of(engine.optimizer)
    text, losses = loader(world.size).dataset, []
    sampler = torch.utils.data.DistributedSampler(text, world.size, world.rank)  # the Trainer's: it shuffles
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, batch in enumerate(text[list(sampler)].split(2), 1):
            steps = number % accumulate_grad_batches == 0 or number == BATCHES
            with contextlib.nullcontext() if steps else engine.no_sync():
                with autocast:
                    loss = nn.functional.cross_entropy(engine(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
                engine.backward(loss / accumulate_grad_batches)
            if steps:
                engine.step()
                by_step["scheduler"].step()
            losses.append(loss.item())
        by_epoch.step()
    return losses, engine.full_state_dict()


CASES = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 4},
    "clipped": {"gradient_clip_val": 0.05},
    "autocast": {"precision": "bf16-mixed"},
}
BOTH = ("stage1_os", "stage3_param")  # under no_sync the first sends nothing
RUNS = [*((name, "plain") for name in SEVEN), *((name, what) for name in BOTH for what in CASES if what != "plain")]


@pytest.mark.parametrize(("name", "what"), RUNS)
def test_a_fit_by_an_engine_is_that_by_ddp_and_a_plain_loop(world, name, what):
    found = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            trainer, module = trainer_of(world.size, engine, **CASES[what]), module_of()
            before = trainer.validate(module, loader(world.size), verbose=False)
            told = fit(trainer, module)
            after = trainer.test(module, loader(world.size), verbose=False)
            predicted = torch.cat(trainer.predict(module, loader(world.size)))
            found.append((*told, before, after, predicted, weights_of(trainer)))
    (losses, *stock, weights), (ours, *told, other) = found
    looped, weights_of_loop = plain(world, name, **CASES[what])
    assert ours == looped
    assert same_bits(other, weights_of_loop)
    assert told[:2] == stock[:2]
    exact = what in ("plain", "autocast")
    hf.check_alike((ours, other), (losses, weights), exact)
    assert not exact or (told[2:4] == stock[2:4] and torch.equal(told[4], stock[4]))


@pytest.mark.parametrize("name", BOTH)
def test_a_fit_goes_on_from_a_checkpoint_and_another_trainer_tests_it(world, tmp_path, name):
    with hf.as_by_torchrun(world):
        trainer, module = trainer_of(2, name, saves_to=tmp_path), module_of()
        whole = fit(trainer, module)
        told = trainer.test(module, loader(2), verbose=False)
        last = trainer.checkpoint_callback.best_model_path
        first = str(tmp_path / f"epoch=0-step={BATCHES}.ckpt")
        for begin, path in (BATCHES, first), (2 * BATCHES, last):  # the loops' progress has them end at once
            again = trainer_of(2, name, saves_to=tmp_path / "again")
            losses, *rest = fit(again, module_of(), ckpt_path=path)
            assert [losses, *rest] == [whole[0][begin:], *whole[1:]]
            assert same_bits(weights_of(again), weights_of(trainer))
        fresh = trainer_of(2, name)
        assert fresh.test(module_of(), loader(2), ckpt_path=last, verbose=False) == told


def test_a_later_fit_begins_with_the_rates_of_configure_optimizers(world, tmp_path):
    from lightning.pytorch.tuner import Tuner  # noqa: PLC0415

    with hf.as_by_torchrun(world):
        whole = fit(trainer_of(2, "stage3_param"), module_of())
        trainer, module = trainer_of(2, "stage3_param", default_root_dir=tmp_path), module_of(lr=1e-2)
        Tuner(trainer).lr_find(module, loader(2), num_training=3, update_attr=False)  # which restores the rest
        module.losses.clear()
        assert fit(trainer, module) == whole
        trainer.fit_loop.max_epochs = EPOCHS + 1
        losses, rates, steps = fit(trainer, module)
        assert (len(losses), steps) == (3 * BATCHES, 3 * BATCHES)
        assert rates[-1] == pytest.approx([1e-2 * 0.9 ** (BATCHES // 2) * 0.5])
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters())
        with pytest.raises(InputError, match="goes on with AdamW; return that"):
            fit(trainer, module)


def averages(what):
    from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging  # noqa: PLC0415

    return [EMAWeightAveraging(decay=0.9) if what == "EMA" else StochasticWeightAveraging(1e-2, swa_epoch_start=1)]


def normalized():
    """A module with a batch norm, for which SWA adds an epoch without backward, and one scheduler at most."""
    module = module_of()
    module.configure_model()
    module.net[2] = nn.Sequential(nn.GELU(), nn.BatchNorm1d(hf.WINDOW - 1))
    module.rates_of = lambda adamw: adamw
    return module


@pytest.mark.parametrize("what", ["SWA", "EMA"])
@pytest.mark.parametrize("name", SEVEN[:3])
def test_averages_and_what_goes_on_from_a_checkpoint_are_those_of_ddp(world, tmp_path, name, what):
    found = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            folder = tmp_path / str(engine)
            made = partial(trainer_of, 2, engine, max_epochs=3)
            whole, again, tested = made(saves_to=folder, calls=averages(what)), made(calls=averages(what)), made()
            fit(whole, normalized())
            path = folder / f"epoch=1-step={2 * BATCHES}.ckpt"
            fit(again, normalized(), ckpt_path=path)
            tested.validate(normalized(), loader(2), ckpt_path=path, verbose=False)
            found.append([weights_of(trainer) for trainer in (whole, again, tested)])
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("what", ["SWA", "EMA"])
@pytest.mark.parametrize(("name", "precision"), [*((name, "fp32") for name in SEVEN[3:]), (SEVEN[0], "bf16")])
def test_averages_that_would_be_lost_are_refused_before_the_run(world, name, precision, what):
    with hf.as_by_torchrun(world):
        trainer = trainer_of(2, name, {"precision": precision}, calls=averages(what))
    hf.check_refused(world, "Averaging writes weights, which last", lambda: fit(trainer, module_of()))
    assert trainer.global_step == 0


def test_a_hook_that_would_find_no_gradients_is_named_unless_it_asks_for_them(world):
    def on_before_optimizer_step(optimizer):
        with trainer.strategy.engine.gradients() as gradients:
            norms.append(gradients["scale.weight"].norm().item())

    def optimizer_step(epoch, batch, optimizer, closure):
        optimizer.step(closure=lambda: (closure(), [parameter.grad for parameter in model.parameters()])[0])

    norms, hooks = [], {"on_after_backward": lambda: None, "on_before_optimizer_step": on_before_optimizer_step}
    with hf.as_by_torchrun(world), pytest.warns(RuntimeWarning) as caught:
        trainer, model = trainer_of(2, "stage3_param"), module_of(**hooks, optimizer_step=optimizer_step)
        fit(trainer, model)
    (said,) = (str(one.message) for one in caught if "engine.gradients" in str(one.message))
    assert said.startswith("Module.on_after_backward, Module.optimizer_step: p.grad is None there")
    assert len(norms) == EPOCHS * BATCHES and all(norms)


def saved(world, folder):
    with hf.as_by_torchrun(world):
        trainer = trainer_of(world.size, "stage3_param")
        fit(trainer, module_of())
        trainer.save_checkpoint(folder)
        return weights_of(trainer)


def loaded(world, folder):
    """The weights of a Trainer's checkpoint, by an engine, by Fabric, and by a Trainer."""
    from lightning.fabric import Fabric  # noqa: PLC0415

    from interop.fabric import ZeroStrategy  # noqa: PLC0415

    module = module_of()
    module.configure_model()
    engine = find_engine("stage1_os")(module, torch.optim.AdamW)
    engine.load(folder / "model")
    with hf.as_by_torchrun(world):
        fabric = Fabric(accelerator="cpu", strategy=ZeroStrategy("stage0_ddp"), devices=world.size)
        fabric.launch()
        module = module_of()
        module.configure_model()
        model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
        rest = fabric.load(folder, {"model": model, "optimizer": optimizer, "global_step": None})
        assert rest.keys() >= {"epoch", "loops", "lr_schedulers"}
        trainer = trainer_of(world.size, "stage2_grad")
        trainer.validate(module_of(), loader(world.size), ckpt_path=folder, verbose=False)
        by_fabric = fabric.strategy.get_module_state_dict(model._forward_module)
        return engine.full_state_dict(), by_fabric, weights_of(trainer)


def test_an_engine_fabric_and_a_trainer_load_the_folder_at_another_world_size(worlds, tmp_path):
    weights, *_ = worlds(2).run(saved, tmp_path / "saved")
    for found in worlds(1).run(loaded, tmp_path / "saved")[0]:
        assert same_bits(found, weights)


def fill(name, tensor):
    with torch.no_grad():
        tensor.copy_(torch.linspace(-1, 1, tensor.numel()).view(tensor.shape) / len(name))


def test_layers_made_on_the_meta_device_have_the_values_that_init_gives(world, tmp_path):
    """In the last fit they are made on the CPU and filled before it."""
    found = []
    with hf.as_by_torchrun(world):
        for name, options in (("stage0_ddp", {"init": fill}), ("stage3_param", {"init": fill}), ("stage3_param", {})):
            trainer, module = trainer_of(2, name, options), module_of()
            if not options:
                module.configure_model()
                for parameter_name, parameter in module.named_parameters():
                    fill(parameter_name, parameter)
            losses, *_ = fit(trainer, module)
            assert module.built_on.type == ("meta" if options else "cpu")
            found.append((losses, weights_of(trainer)))
        trainer.save_checkpoint(tmp_path)
        last = trainer_of(2, name, {"init": lambda name, tensor: None})  # the checkpoint has the values
        last.validate(module_of(), loader(2), ckpt_path=tmp_path, verbose=False)
        found.append((losses, weights_of(last)))
    assert all(losses == found[0][0] and same_bits(weights, found[0][1]) for losses, weights in found)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_the_engines_own_precisions(world, precision):
    with hf.as_by_torchrun(world):
        trainer = trainer_of(2, "stage3_param", {"precision": precision})
        losses, *_ = fit(trainer, module_of())
        assert {weight.dtype for weight in weights_of(trainer).values()} == {torch.float32}  # masters
    assert losses[-1] < losses[0]


def run(options=None, changed=None, **given):
    """A fit, as `fit`, of a module with changed attributes."""
    return lambda folder: fit(trainer_of(2, "stage2_grad", options, **given), module_of(**(changed or {})))


def save_weights_only(folder):
    trainer = trainer_of(2, "stage2_grad")
    fit(trainer, module_of())
    trainer.save_checkpoint(folder / "one", weights_only=True)


def other_strategy(folder):
    module = module_of()
    fit(trainer_of(2, "stage2_grad"), module)
    fit(trainer_of(2, "stage2_grad"), module)


def no_checkpoint(folder):
    fit(trainer_of(2, "stage2_grad"), module_of(), ckpt_path=folder)


REFUSED = {
    "16-bit weights": (run(precision="bf16-true"), "^precision='bf16-true': give"),
    "two precisions": (run({"precision": "bf16"}, precision="bf16-mixed"), "^'bf16-mixed' is autocast"),
    "values clipped": (run(gradient_clip_val=1.0, gradient_clip_algorithm="value"), "^gradient_clip_algorithm='value'"),
    "manual optimization": (run(changed={"automatic_optimization": False}), "^automatic_optimization=False"),
    "batch norms": (run(sync_batchnorm=True), "^sync_batchnorm=True: write"),
    "no optimizer": (run(changed={"configure_optimizers": lambda: None}), "takes one optimizer, .* not 0$"),
    "no values": (run({"init": lambda name, tensor: None}), "^init= leaves 'scale.weight' without values"),
    "weights saved alone": (save_weights_only, "^weights only: an engine saves its whole state"),
    "no checkpoint": (no_checkpoint, "holds no engine's checkpoint"),
    "another strategy": (other_strategy, "^an engine has this model already"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_engine_cannot_do_is_refused_in_one_line(world, tmp_path, what):
    act, words = REFUSED[what]
    hf.check_refused(world, words, lambda: act(tmp_path))
