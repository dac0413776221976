"""The cases that tell whether an engine is right: small trainings, and what is watched in them.

Models are small enough to print whatever goes wrong: inputs and outputs are [samples, WIDTH] in fp32.
`course.grader.observing` has ranks train them.
"""

import functools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
SAMPLES = 4  # of a rank


class Blocks(nn.Module):
    """Some blocks of two linear layers; `run(blocks, x, step)` says how they are called."""

    def __init__(self, run, blocks=3):
        super().__init__()
        self.run, self.steps = run, 0
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x):
        self.steps += self.training
        return self.run(self.blocks, x, self.steps)


def in_a_row(blocks, x, step):
    for block in blocks:
        x = x + block(x)
    return x


def without_the_second_at_times(blocks, x, step):
    """The second block runs in odd steps only."""
    return in_a_row(blocks if step % 2 else [blocks[0], blocks[2]], x, step)


def the_first_again_at_the_end(blocks, x, step):
    return in_a_row([*blocks, blocks[0]], x, step)


def computed_again(blocks, x, step):
    """An activation checkpoint around the first two blocks: backward runs their forward again."""
    return in_a_row(blocks[2:], checkpoint(in_a_row, blocks[:2], x, step, use_reentrant=False), step)


@dataclass(frozen=True)
class Case:
    """A training, or a check that needs none. An idea is a key of hints.toml."""

    run: object  # how the model calls its blocks; in cases.toml the name of one of the functions above
    optimizer: object  # a factory; there "sgd", which is the default, or "adamw"
    promise: str  # what it shows
    model: str = "three blocks of two linear layers"  # what is trained, in words
    blocks: int = 3
    ranks: int = 2
    options: dict = field(default_factory=dict)  # what else the engine takes
    steps: int = 3
    backwards: int = 1  # of each step
    lane: str = ""  # collectives run as "late" as they may, or "early", when they are called; "" is as elsewhere
    crossed: bool = False  # copies over a bus run early where collectives run late, and late where those run early
    groups: bool = False  # biases are a parameter group of their own, so that a unit has two buckets
    watched: bool = False  # the last step's live bytes are followed
    beside: str = ""  # the phase, or "all", in which collectives in flight during computation are noted
    elsewhere: bool = False  # tensors that are made without a device have no memory
    written: bool = False  # freed weights are written to
    pinned: bool = False  # the loss reads weights under `gathered()`, in which forward and backward run as well
    foreign: bool = False  # a backward other than the engine's produces gradients
    rounded: bool = False  # no training, but numbers that are quantized and come back
    off: str = "differs"  # the idea if weights are off, and their values tell nothing more
    nan: str = "reads nothing"  # the idea if they are NaN
    raises: str = ""  # the idea of any error, as smaller cases were right; "" if the error decides
    stages: tuple = ("stage1_os", "stage2_grad", "stage3_param")  # that it tests, by the keys of their exercises

    @property
    def classes(self):
        """The classes that a submission has instead of an engine, if any."""
        return ("Blocks", "SecondaryShards", "TwoHops") if "zeropp" in self.stages else ()


RUNS = {
    run.__name__: run for run in (in_a_row, without_the_second_at_times, the_first_again_at_the_end, computed_again)
}
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, fused=True),
}


CASES = {
    name: Case(RUNS[row.pop("run", "in_a_row")], OPTIMIZERS[row.pop("optimizer", "sgd")], **row)
    for name, row in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
