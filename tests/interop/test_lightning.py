"""Lightning's Trainer with an engine's strategy, compared with its own DDP, if the library is installed."""

import contextlib
from functools import partial

import hugging_face as hf
import pytest
import torch
from torch import nn
from training import SEVEN

from common.engines import find_engine
from lab.compare import relative_difference

pytestmark = hf.needs("lightning")
EPOCHS, BATCHES = 2, 6  # batches of a rank in an epoch


def module_of(**changed):
    from lightning.pytorch import LightningModule  # noqa: PLC0415 - only if installed

    class Module(LightningModule):
        """Two layers and a parameter of its own; it notes its losses. `changed` are further attributes."""

        def __init__(self):
            super().__init__()
            self.losses, self.net = [], None
            vars(self).update(changed)

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


def trainer_of(ranks, name, options=None, saves_to=None, **given):
    from lightning.pytorch import Trainer  # noqa: PLC0415
    from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: PLC0415
    from lightning.pytorch.strategies import DDPStrategy  # noqa: PLC0415

    from interop.lightning import ZeroStrategy  # noqa: PLC0415

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = DDPStrategy() if name is None else ZeroStrategy(name, **(options or {}))
    saves = [ModelCheckpoint(saves_to, monitor="validated", save_top_k=-1)] if saves_to else []
    loops = {"max_epochs": EPOCHS, "num_sanity_val_steps": 1, "enable_checkpointing": bool(saves), "callbacks": saves}
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


@pytest.mark.parametrize(
    ("what", "world"), [*((what, 2) for what in CASES), ("plain", 1), ("plain", 3)], indirect=["world"]
)
@pytest.mark.parametrize("name", SEVEN)
def test_a_fit_by_an_engine_is_that_by_ddp_and_a_plain_loop(world, name, what):
    found = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            trainer, module = trainer_of(world.size, engine, **CASES[what]), module_of()
            before = trainer.validate(module, loader(world.size), verbose=False)
            told = fit(trainer, module)
            after = trainer.test(module, loader(world.size), verbose=False)
            predicted = torch.cat(trainer.predict(module, loader(world.size)))
            found.append((*told, before, after, predicted, weights_of(trainer), trainer.callback_metrics))
    (losses, *stock, weights, _), (ours, *told, other, _) = found
    looped, weights_of_loop = plain(world, name, **CASES[what])
    assert ours == looped
    assert hf.equal(other, weights_of_loop)
    assert told[:2] == stock[:2]
    if what in ("plain", "autocast") and world.size < 3:  # DDP divides before it adds, which rounds at 3 ranks
        assert ours == losses
        assert told[2:4] == stock[2:4]
        assert torch.equal(told[4], stock[4])
        assert hf.equal(other, weights)
    else:
        assert ours == pytest.approx(losses, rel=1e-5)
        assert relative_difference(other, weights) < 1e-5
