"""A model of rare cases in checkpoints."""

import torch
from torch import nn
from training import make_engine


class Odd(nn.Module):
    """A frozen layer, a parameter without elements, two groups, and buffers, one of them not saved."""

    def __init__(self):
        super().__init__()
        self.window = 16
        self.first, self.last = nn.Linear(15, 7).requires_grad_(False), nn.Linear(7, 5)
        self.last.empty = nn.Parameter(torch.zeros(0))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def inputs_and_targets(self, windows):
        return windows[:, :-1].float() / 127.5 - 1, windows[:, -1].long() % 5

    def forward(self, x):
        self.seen.add_(len(x))
        return self.last(self.first(x))


def build(stage, model, seed=0, **options):
    if model == "odd":
        torch.manual_seed(seed)
        model = Odd()
        decayed = {"params": [model.last.weight, model.last.empty], "weight_decay": 0.1}
        options["param_groups"] = [decayed, {"params": [model.last.bias], "lr": 1e-3}]
    return make_engine(stage, model, seed=seed, **options)
