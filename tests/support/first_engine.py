"""First engines: the one that README.md prints, one with a sharded optimizer, one that crashes and one that hangs.

Those with wrong results are in `wrong_engines`.
"""

import re

import torch
import torch.distributed as dist
from places import ROOT

PAGE = ROOT / "tests/README.md"
(code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
printed = {"__name__": __name__}
exec(compile(code, str(PAGE), "exec"), printed)
DataParallel, StepResult = printed["DataParallel"], printed["StepResult"]


def name_of(engine):
    """The name that --engine takes."""
    return f"{engine.__module__}:{engine.__name__}"


class ShardedOptimizer(DataParallel):
    """ZeRO-1 at its simplest: each rank steps every n-th parameter and broadcasts it."""

    follows = "stage1_os"

    def owner(self, index):
        return index % dist.get_world_size()

    def update(self):
        self.step_own()
        self.send()

    def step_own(self):
        for index, parameter in enumerate(self.trained):
            if self.owner(index) != dist.get_rank():
                parameter.grad = None  # torch's optimizers then skip it and keep no state for it
        self.optimizer.step()

    def send(self):
        for index, parameter in enumerate(self.trained):
            dist.broadcast(parameter.data, self.owner(index))


class Misspelt(DataParallel):
    """A typo in a method that every step calls."""

    def reduce(self):
        self.trainned.clear()


class Hangs(DataParallel):
    """A rank waits for a message that nobody sends."""

    def reduce(self):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.zeros(1))
        else:
            dist.recv(torch.zeros(1), 0)
