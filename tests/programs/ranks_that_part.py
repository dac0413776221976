"""Ranks that diverge: each calls its own expert, which stage 3 gathers as a unit. An example for common/RANKS.md:

ZERO_TRACE=1 python -m tests.programs.ranks_that_part
"""

from functools import partial

import torch
from torch import nn

from common.ranks.world import launch
from stage3_param import Engine


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x, choice):
        return self.experts[choice](self.inside(x))


def train(world):
    torch.manual_seed(0)
    engine = Engine(Experts().to(world.device), partial(torch.optim.SGD, lr=0.1))
    x = torch.ones(4, 8, device=world.device)
    engine.backward(engine(x, choice=world.rank).square().mean())
    engine.step()


if __name__ == "__main__":
    launch(train, nproc=2, oversubscribe=True)
