"""An optimizer shard: the part of a rank's shard that one step of the optimizer changes, and its tier."""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from common.engine.accumulation import MeanGradient


@dataclass
class Segment:
    """Elements of an optimizer shard whose parameters have the same states.

    Attributes:
        part: a slice of the shard.
        elementwise: the names of its states with a number for each element; none before its first step.
        others: its other states, such as `step`.
    """

    part: slice
    elementwise: list
    others: dict

    def __contains__(self, part):
        return self.part.start <= part.start and part.stop <= self.part.stop


class OptimizerShard(MeanGradient):
    """A part of a run: its master weights, the parameters rounded from them, and its mean gradient.

    A bucket has one, unless an engine's placement table cuts it.

    Attributes:
        part: its elements, as a slice of the run.
        tier: the tier, of `common.tiers`, of its master weights, gradient and optimizer states; None without a table.
        stepped: the same part of the bucket's parameters, on the device.
        master: the nn.Parameter that the optimizer steps: `stepped` itself or, if that is 16-bit or in another tier, a
            copy in fp32.
        is_apart: whether it is such a copy, not the parameters themselves.
        segments: where parameters have had different numbers of steps: each `Segment` is stepped alone. The optimizer
            holds the states with a number for each element, of the whole shard.
    """

    segments = ()

    def __init__(self, part, tier, is_apart):
        self.part, self.tier, self.gradient_tier, self.is_apart = part, tier, tier, is_apart
        self.stepped = self.master = None

    def adopt(self, states):
        """Move states that the optimizer has made, {name: state}, to their tier: here they are in place."""

    def cut(self, segments):
        """Cut it into segments, [(part, names of states with a number for each element, other states)]."""
        self.segments = [
            Segment(part, list(elementwise), copy.deepcopy(others)) for part, elementwise, others in segments
        ]

    def step(self, optimizer, weights, step):
        """Have `step(weights)` step these weights, which stand for the master's, whole or segment by segment."""
        if not self.segments:
            step(weights)
        for segment in self.segments:
            flat, own = optimizer.state[weights], nn.Parameter(weights.detach()[segment.part])
            views = {name: flat[name][segment.part] for name in segment.elementwise}
            own.grad, optimizer.state[own] = weights.grad[segment.part], {**views, **segment.others}
            own.whole = weights.whole.of(segment.part)
            try:
                step(own)
            finally:
                made = optimizer.state.pop(own)
            segment.elementwise = [name for name in made if name in flat]
            segment.others = {name: value for name, value in made.items() if name not in flat}
            for name in segment.elementwise:
                if made[name] is not views.get(name):  # a first step makes states, and some optimizers replace them
                    flat[name][segment.part] = made[name]

    def finish(self, by):
        """Finish a step by what came back from the owners of matrices of which it has pieces."""
        by(self.master)
        if self.is_apart:
            self.stepped.copy_(self.master.detach())

    def states(self, optimizer):
        """The optimizer's states of it that are tensors."""
        kept = [optimizer.state.get(self.master, {}), *(segment.others for segment in self.segments)]
        return [state for states in kept for state in list(states.values()) if torch.is_tensor(state)]

    def take_state(self, name, dtype, fill):
        """Fill one of the optimizer's states by `fill(target)`; return the tensor for the optimizer to hold."""
        like = torch.empty_like if self.tier is None or self.tier.pinned else self.tier.empty_like  # as optimizers do
        values = like(self.master.detach(), dtype=dtype)
        fill(values)
        return values
