"""An optimizer shard: the part of a rank's shard that one step of the optimizer changes, and its tier."""

import contextlib

import torch

from common.tensors import let_go


class OptimizerShard:
    """A part of a run: its master weights, where its mean gradient arrives, and what is rounded from them.

    A bucket has one, unless an engine's placement table cuts it.

    Attributes:
        part: its elements, as a slice of the run.
        tier: where its master weights, gradient and optimizer states lie, of `common.tiers`; None where no table says.
        stepped: the same part of the bucket's parameters, on the device.
        master: what the optimizer steps, an nn.Parameter: `stepped` itself or, if that is 16-bit or in another tier, a
            copy in fp32.
        gradient_shard: where its mean gradient arrives, in the parameters' dtype.
        carried: the sum of the step's earlier means, in fp32, where `gradient_shard` does not hold it.
        adds: the next mean is to be added to one that lies on disk.
    """

    adds = False

    def __init__(self, part=None, tier=None):
        self.part, self.tier = part, tier
        self.stepped = self.master = self.gradient_shard = self.carried = None

    @property
    def mean(self):
        """The mean gradient since the last step: of one backward as it arrived, of several the sum, in fp32."""
        return self.gradient_shard if self.carried is None else self.carried

    @contextlib.contextmanager
    def mean_in_memory(self, write=False):
        """A context in which the mean gradient can be read or, with `write`, changed. It gives the mean."""
        yield self.mean

    @property
    def gradient_tier(self):
        """The tier of its mean gradient."""
        return self.tier

    @property
    def is_apart(self):
        """The master weights are a copy, and no part of the parameters."""
        return self.master.dtype != self.stepped.dtype

    def check_states(self, states):
        """Refuse what was written to the optimizer's states, {name: state}, and would be lost: here nothing is."""

    def adopt(self, states):
        """Take states that the optimizer has made, {name: state}, to where they are to lie: here they do."""

    def states(self, optimizer):
        """The tensors that the optimizer keeps of it."""
        return [state for state in list(optimizer.state.get(self.master, {}).values()) if torch.is_tensor(state)]

    def take_state(self, name, fill):
        """Read one of the optimizer's states, by `fill(target)`; return what stands for it in the optimizer."""
        like = torch.empty_like if self.tier is None or self.tier.pins else self.tier.empty_like  # as optimizers do
        values = like(self.master.detach(), dtype=torch.float32)
        fill(values)
        return values

    def set_aside(self):
        """An earlier backward's mean stands aside, before this one's gradients or their mean arrive in its place."""
        if self.carried is None:
            copied = torch.empty_like if self.gradient_tier is None else self.gradient_tier.empty_like
            self.carried = copied(self.gradient_shard, dtype=torch.float32).copy_(self.gradient_shard)

    def widen(self):
        """Have the mean in fp32, where it is in 16-bit."""
        self.set_aside()

    def add_up(self):
        """Add a mean that has arrived to those of the step's earlier backwards, in fp32."""
        if self.carried is not None and self.gradient_shard.dtype != torch.float32:
            self.carried.add_(self.gradient_shard)
        elif self.carried is not None:
            self.gradient_shard.add_(self.carried)
            let_go(self.carried)
            self.carried = None


def groups_of(optimizer):
    """{what an optimizer steps: the number of its group}."""
    return {weights: number for number, group in enumerate(optimizer.param_groups) for weights in group["params"]}


@contextlib.contextmanager
def alone(optimizer, weights, group):
    """In this context the optimizer has these weights alone, in one group: that of the number, to which they belong.

    So a `step` that clips gradients by value or clamps weights does to each shard what it would do to the whole.
    """
    groups = optimizer.param_groups
    own = groups[group]
    listed, own["params"], optimizer.param_groups = own["params"], [weights], [own]
    try:
        yield
    finally:
        own["params"], optimizer.param_groups = listed, groups
