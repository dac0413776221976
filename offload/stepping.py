"""Buckets that are stepped shard by shard, each optimizer shard in its tier, by an optimizer that sees it alone."""

from collections import defaultdict

import torch
from torch import nn

from common.engine.bucket import Bucket
from common.engine.master_weights import OptimizerShard
from common.errors import InputError
from common.measure import timeline
from common.probes import Options


class SteppedBucket(Bucket):
    """A bucket whose optimizer shards are stepped in the tiers that the placement table gives them."""

    is_placed = True
    stepping = copying_up = None  # its shards' steps in flight, and the copy of their new parameters to the device

    def allocate(self, engine, whole):
        """Allocate whole parameters on the device, and shards in their tiers; see `Bucket.allocate`."""
        if self.kind.whole and 0 < engine.ratio < 1:
            raise InputError(f'"whole": ratio={engine.ratio} would cut parameters; give 0 or 1')
        self.parameters = whole.to(self.kind.dtype)
        if self.kind.trainable:
            placed = engine.placed(self)["optimizer"]
            parts = ((part, tier, self.parameters[part], whole[part]) for part, tier in placed)
            self.optimizer_shards = [SteppedShard(*part) for part in parts]

    def wait_gather(self):
        """See `Bucket.wait_gather`. The sum of bits then reveals later writes that torch does not count."""
        landed = super().wait_gather()
        if landed:
            self.bits = self.sum_of_bits()
        return landed

    @property
    def masters(self):
        return super().masters if self.stepping is None else []

    def at_rest(self, optimizer):
        """What it keeps between uses: (state, name of the tier, tensor)."""
        yield "parameters", "device", self.parameters
        for shard in self.optimizer_shards:
            for gradient in (shard.gradient_shard, shard.spare, shard.carried):
                yield "gradients", shard.tier.name, gradient
            for state in ([shard.master] if shard.is_apart else []) + shard.states(optimizer):
                yield "optimizer", shard.tier.name, state


class SteppedShard(OptimizerShard):
    """A part of a shard that its own stepper steps in its tier. Its initial `values` are unrounded.

    Attributes:
        stepper: a `Stepper`, once there is an optimizer.
        spare: a second buffer for the mean, if a step may run while the next mean arrives.
        fresh: the new parameters, in their dtype, after a step.
    """

    stepper = fresh = None

    def __init__(self, part, tier, stepped, values):
        super().__init__(part, tier, tier.on_host or tier.delayed or stepped.dtype != torch.float32)
        self.stepped, self.gradient_shard = stepped, tier.empty_like(stepped).zero_()
        self.spare = tier.empty_like(stepped).zero_() if tier.delayed else None
        self.master = nn.Parameter(tier.empty_like(values).copy_(values) if self.is_apart else stepped)

    def adopt(self, states):
        self.tier.adopt(states)


class Stepper:
    """Steps one optimizer shard by the rule and states of an optimizer that does not step itself.

    So two shards can be stepped at once, and on another thread. `ask` takes what a step needs: the gradient, and the
    options of the shard's group, which a scheduler may change before the step runs. Each shard has at most one step in
    flight.

    Args:
        shard: the shard whose master weights and states are stepped, shared. It holds the stepper, which holds it only
            from `prepare` to the end of `run`.
        make: the factory of the optimizer. It makes one over this shard's weights alone: a copy of the optimizer over
            all shards would read states that other shards' steps are writing.
    """

    def __init__(self, shard, make):
        self._weights = nn.Parameter(shard.master.detach())
        self._optimizer = make([self._weights])
        self._optimizer.state.clear()  # Adagrad makes its states at once; the shard has its own
        self._options = Options(self._optimizer)

    def prepare(self, shard, options, number, factor):
        """Take what the next step needs.

        Args:
            options, number: the `probes.Options` of the optimizer that holds the states, and the shard's group.
            factor: multiplies the gradient: a number or a scalar tensor on the CPU; None leaves it.
        """
        self._piece, self._gradient, self._factor = shard, shard.mean, factor
        self._weights.whole = shard.master.whole
        # 16-bit parameters go up in the gradient's buffer, which has their size and is spent by then.
        self._fresh = shard.gradient_shard if shard.gradient_shard.dtype != torch.float32 else shard.master.detach()
        self._told, self._number, group = options, number, options.optimizer.param_groups[number]
        own = {name: value.clone() if torch.is_tensor(value) else value for name, value in group.items()}
        self._optimizer.param_groups = [{**own, "params": [self._weights]}]
        self._options.begin()
        self._states = options.optimizer.state[shard.master]
        self._optimizer.state = defaultdict(dict, {self._weights: self._states})

    def run(self, name, after):
        """Step the master weights of the bucket `name`; the shard's `fresh` then holds what goes to the device.

        The step begins once `after`, a Handle or None, no longer reads the last `fresh`.
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
            self._piece.step(self._optimizer, self._weights, self._step_alone)
        finally:
            self._weights.grad = self._gradient = None
        self._told.came_out(self._number, self._options.made[0])
        tier.adopt(self._states)
        if self._fresh.dtype != torch.float32:
            self._fresh.copy_(self._weights.detach())
        self._piece.fresh = self._fresh

    def _step_alone(self, weights):
        with self._options.alone(weights, 0):
            self._optimizer.step()
