"""An optimizer shard: the part of a rank's shard that one step of the optimizer changes, and its tier."""

import contextlib

import torch

from common.tensors import let_go


class OptimizerShard:
    """A part of a run: its master weights, the parameters rounded from them, and its mean gradient.

    A bucket has one, unless an engine's placement table cuts it.

    Attributes:
        part: its elements, as a slice of the run.
        tier: the tier, of `common.tiers`, of its master weights, gradient and optimizer states; None without a table.
        stepped: the same part of the bucket's parameters, on the device.
        master: the nn.Parameter that the optimizer steps: `stepped` itself or, if that is 16-bit or in another tier, a
            copy in fp32.
        gradient_shard: the tensor that its mean gradient arrives in, in the parameters' dtype.
        carried: the sum of the step's earlier means, in fp32; None if `gradient_shard` holds it.
        adds: whether the next mean is added to one that lies on disk.
    """

    adds = False

    def __init__(self, part=None, tier=None):
        self.part, self.tier = part, tier
        self.stepped = self.master = self.gradient_shard = self.carried = None

    @property
    def mean(self):
        """The mean gradient since the last step: of one backward in its own dtype, of several their sum in fp32."""
        return self.gradient_shard if self.carried is None else self.carried

    @contextlib.contextmanager
    def mean_in_memory(self, write=False):
        """A context that yields the mean gradient, to read or, with `write`, to change."""
        yield self.mean

    @property
    def gradient_tier(self):
        """The tier of its mean gradient."""
        return self.tier

    @property
    def is_apart(self):
        """Whether the master weights are a copy, not the parameters themselves."""
        return self.master.dtype != self.stepped.dtype

    def adopt(self, states):
        """Move states that the optimizer has made, {name: state}, to their tier: here they are in place."""

    def states(self, optimizer):
        """The optimizer's states of it that are tensors."""
        return [state for state in list(optimizer.state.get(self.master, {}).values()) if torch.is_tensor(state)]

    def take_state(self, name, fill):
        """Fill one of the optimizer's states by `fill(target)`; return the tensor for the optimizer to hold."""
        like = torch.empty_like if self.tier is None or self.tier.pins else self.tier.empty_like  # as optimizers do
        values = like(self.master.detach(), dtype=torch.float32)
        fill(values)
        return values

    def set_aside(self):
        """Copy an earlier backward's mean, before this one's gradients or their mean arrive in its place."""
        if self.carried is None:
            copied = torch.empty_like if self.gradient_tier is None else self.gradient_tier.empty_like
            self.carried = copied(self.gradient_shard, dtype=torch.float32).copy_(self.gradient_shard)

    def widen(self):
        """Make a 16-bit mean fp32."""
        self.set_aside()

    def add_up(self):
        """Add a mean that has arrived to those of the step's earlier backwards, in fp32."""
        if self.carried is not None and self.gradient_shard.dtype != torch.float32:
            self.carried.add_(self.gradient_shard)
        elif self.carried is not None:
            self.gradient_shard.add_(self.carried)
            let_go(self.carried)
            self.carried = None
