"""Buckets that are stepped shard by shard, each shard in its tier, where a step sees what it steps and no more."""

from collections import defaultdict

import torch
from torch import nn

from common.engine.bucket import Bucket
from common.engine.master_weights import OptimizerShard
from common.measure import timeline


class SteppedBucket(Bucket):
    """A bucket whose shard is stepped where the placement table has it."""

    stepping = copying_up = None  # the steps of its shards under way, and the copy of what they made to the device

    def allocate(self, engine, whole):
        """Get whole parameters on the device, and shards in their tiers; see `Bucket.allocate`."""
        self.parameters = whole.to(self.kind.dtype)
        if self.kind.trainable:
            placed = engine.placed(self)["optimizer"]
            parts = ((part, tier, self.parameters[part], whole[part]) for part, tier in placed)
            self.optimizer_shards = [SteppedShard(*part) for part in parts]

    def wait_gather(self):
        """See `Bucket.wait_gather`. What torch does not count of later writes, which would be lost, the bits tell."""
        landed = super().wait_gather()
        if landed:
            self.bits = self.sum_of_bits()
        return landed

    @property
    def masters(self):
        """See `Bucket.masters`."""
        return super().masters if self.stepping is None else []

    def at_rest(self, optimizer):
        """What it keeps between its uses: (state, name of the tier, tensor)."""
        yield "parameters", "device", self.parameters
        for shard in self.optimizer_shards:
            for gradient in (shard.gradient_shard, shard.spare, shard.carried):
                yield "gradients", shard.tier.name, gradient
            for state in ([shard.master] if shard.is_apart else []) + shard.states(optimizer):
                yield "optimizer", shard.tier.name, state


class SteppedShard(OptimizerShard):
    """A part of a shard that a stepper of its own steps in its tier. Its first `values` come unrounded.

    Attributes:
        stepper: a `Stepper`, once there is an optimizer.
        spare: room for another mean, where a step over one may run while the next arrives.
        fresh: the new parameters, in their dtype, once a step is taken.
    """

    stepper = fresh = None

    def __init__(self, part, tier, stepped, values):
        super().__init__(part, tier)
        self.stepped, self.gradient_shard = stepped, tier.empty_like(stepped).zero_()
        self.spare = tier.empty_like(stepped).zero_() if tier.delayed else None
        self.master = nn.Parameter(tier.empty_like(values).copy_(values) if self.is_apart else stepped)

    @property
    def is_apart(self):
        """The master weights are a copy, and no part of the parameters."""
        return self.tier.on_host or self.tier.delayed or self.stepped.dtype != torch.float32

    def adopt(self, states):
        """Take states that the optimizer has made, {name: state}, to the tier."""
        self.tier.adopt(states)


class Stepper:
    """Steps one shard by the rule and the states of an optimizer, which itself does not step.

    So two shards can be stepped at once, and on another thread. `ask` takes what a step needs: the gradient, and the
    options of the shard's group, which a scheduler may change before the step is taken. Of a shard one step at a time
    is under way.

    Args:
        shard: its master weights and their states, which it shares, are stepped. It holds the stepper, which holds it
            only from `ask` to the end of `take`.
        make: the factory of the optimizer. It makes another one, over this shard's weights: a copy of the one over all
            would read their states, which the steps of other shards are making.
    """

    def __init__(self, shard, make):
        self._weights = nn.Parameter(shard.master.detach())
        self._optimizer = make([self._weights])
        self._optimizer.state.clear()  # Adagrad makes its states at once; the shard has some already

    def ask(self, shard, optimizer, group, factor):
        """Take what the next step needs.

        Args:
            optimizer, group: whose states they are, as a load replaces them, and which of its groups the shard is in.
            factor: what the gradient is multiplied by, a number or a scalar tensor on the CPU; None leaves it.
        """
        self._piece, self._gradient, self._factor = shard, shard.mean, factor
        # What goes up in 16-bit takes the room of the gradient, which is as large, and spent by then.
        self._fresh = shard.gradient_shard if shard.gradient_shard.dtype != torch.float32 else shard.master.detach()
        options = {name: value.clone() if torch.is_tensor(value) else value for name, value in group.items()}
        self._optimizer.param_groups = [{**options, "params": [self._weights]}]
        self._states = optimizer.state[shard.master]
        self._optimizer.state = defaultdict(dict, {self._weights: self._states})

    def take(self, name, after):
        """Step the master weights of a bucket called so; what is to go to the device is then in the shard's `fresh`.

        It begins when `after`, a Handle or None, no longer reads the last `fresh`.
        """
        try:
            if after is not None:
                after.wait_on_host()
            with timeline.label(f"optimizer's step of {name}"):
                self._step()
        finally:
            self._piece = None

    def _step(self):
        tier, gradient = self._piece.tier, self._gradient
        if gradient.dtype != torch.float32:
            gradient = tier.scratch(len(gradient), torch.float32).copy_(gradient)
        if self._factor is not None:
            gradient.mul_(self._factor)
        self._weights.grad = gradient
        try:
            self._optimizer.step()
        finally:
            self._weights.grad = self._gradient = None
        tier.adopt(self._states)
        if self._fresh.dtype != torch.float32:
            self._fresh.copy_(self._weights.detach())
        self._piece.fresh = self._fresh
