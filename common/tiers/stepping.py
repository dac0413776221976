"""Buckets that are stepped piece by piece, each piece in its tier, where a step sees what it steps and no more."""

from collections import defaultdict

import torch
from torch import nn

from common.engine.bucket import Bucket
from common.engine.master_weights import OptimizerShard
from common.measure import timeline


class SteppedBucket(Bucket):
    """A bucket whose shard is stepped where the placement table has it."""

    stepping = copying_up = None  # the steps of its pieces under way, and the copy of what they made to the device

    def allocate(self, engine, whole):
        """Get whole parameters on the device, and pieces in their tiers; see `Bucket.allocate`."""
        self.parameters = whole.to(self.kind.dtype)
        if self.kind.trainable:
            placed = engine.placed(self)["optimizer"]
            self.cut_into = [SteppedPiece(part, tier, self.parameters[part], whole[part]) for part, tier in placed]

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
        for piece in self.cut_into:
            for gradient in (piece.gradient_shard, piece.spare, piece.carried):
                yield "gradients", piece.tier.name, gradient
            for state in ([piece.master] if piece.is_apart else []) + piece.states(optimizer):
                yield "optimizer", piece.tier.name, state


class SteppedPiece(OptimizerShard):
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
    """Steps one piece by the rule and the states of an optimizer, which itself does not step.

    So two pieces can be stepped at once, and on another thread. `ask` takes what a step needs: the gradient, and the
    options of the piece's group, which a scheduler may change before the step is taken. Of a piece one step at a time
    is under way.

    Args:
        piece: its master weights and their states, which it shares, are stepped. It holds the stepper, which holds it
            only from `ask` to the end of `take`.
        make: the factory of the optimizer. It makes another one, over this piece's weights: a copy of the one over all
            would read their states, which the steps of other pieces are making.
    """

    def __init__(self, piece, make):
        self._weights = nn.Parameter(piece.master.detach())
        self._optimizer = make([self._weights])
        self._optimizer.state.clear()  # Adagrad makes its states at once; the piece has some already

    def ask(self, piece, optimizer, group, factor):
        """Take what the next step needs.

        Args:
            optimizer, group: whose states they are, as a load replaces them, and which of its groups the piece is in.
            factor: what the gradient is multiplied by, a number or a scalar tensor on the CPU; None leaves it.
        """
        self._piece, self._gradient, self._factor = piece, piece.mean, factor
        # What goes up in 16-bit takes the room of the gradient, which is as large, and spent by then.
        self._fresh = piece.gradient_shard if piece.gradient_shard.dtype != torch.float32 else piece.master.detach()
        options = {name: value.clone() if torch.is_tensor(value) else value for name, value in group.items()}
        self._optimizer.param_groups = [{**options, "params": [self._weights]}]
        self._states = optimizer.state[piece.master]
        self._optimizer.state = defaultdict(dict, {self._weights: self._states})

    def take(self, name, after):
        """Step the master weights of a bucket called so; what is to go to the device is then in the piece's `fresh`.

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
