"""A perceptron whose sizes divide by nothing, so that padding and odd shards are exercised."""

import torch
from torch import nn


class Scale(nn.Module):
    """Multiply by one learned number: the smallest parameter there can be, 1 element."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


class MLP(nn.Module):
    """Classify `features` bytes as the byte that follows them, modulo `classes`.

    Shapes: inputs float32 [batch, features] in [-1, 1], targets int64 [batch], logits [batch, classes].
    """

    def __init__(self, features=15, narrow=7, wide=33, classes=5):
        super().__init__()
        self.window = features + 1
        self.classes = classes
        self.layers = nn.Sequential(
            nn.Linear(features, narrow),
            nn.GELU(),
            nn.Linear(narrow, wide),
            nn.GELU(),
            nn.Linear(wide, classes),
            Scale(),
        )

    def inputs_and_targets(self, windows):
        """Split uint8 [batch, window] into float32 [batch, features] and int64 [batch]."""
        return windows[:, :-1].float() / 127.5 - 1, windows[:, -1].long() % self.classes

    def forward(self, inputs):
        return self.layers(inputs)
