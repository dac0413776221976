"""The mean over all tokens of a step, when ranks and micro-batches have unequal numbers of them.

An engine averages gradients over ranks. If each rank's loss is a mean over its own tokens, without padded or masked
ones, then a token weighs more the fewer tokens its rank has: the mean of means is not the mean. So each micro-batch
contributes its sum, times N over the number of all tokens: engines add up backwards and divide by N ranks, which gives
the sum over all tokens, divided by their number.

    over_tokens = TokenMean()
    for micro_batches in batches:  # [(inputs, targets)] of this rank
        over_tokens.agree(targets for _, targets in micro_batches)
        for inputs, targets in micro_batches:
            total = F.cross_entropy(engine(inputs).flatten(0, -2), targets.flatten(), reduction="sum")
            engine.backward(over_tokens.share(total))
        engine.step()
"""

import torch

from common.errors import InputError
from common.ranks.collectives import Collectives

IGNORED = -100  # a target that does not count: the `ignore_index` of torch's losses


class TokenMean:
    """Turn sums over a micro-batch's tokens into shares of the mean over all tokens of a step.

    Args:
        group: the engine's `process_group`; None is the default one.

    Attributes:
        tokens: the number of tokens in the step, over all ranks; None before the first `agree`.
    """

    def __init__(self, group=None):
        self._comm, self.tokens = Collectives(group), None

    def agree(self, targets):
        """Count the tokens of a step over all ranks, before its first backward: one small collective.

        It sends 8 bytes to each other rank, which the engine's traffic meter does not see.

        Args:
            targets: this rank's targets, an int64 tensor of any shape per micro-batch. IGNORED ones do not count; a
                rank may have none that count, if another has some.

        Raises:
            InputError: on every rank: no rank has a token that counts.
        """
        own = torch.tensor([sum(int((some != IGNORED).sum()) for some in targets)], device=self._comm.device)
        self.tokens = int(self._comm.everyones(own, "the number of tokens").sum())
        if self.tokens == 0:
            raise InputError(f"no rank has a token to train on: all targets of this step are {IGNORED}")
        return self.tokens

    def share(self, total):
        """The loss of a micro-batch for `engine.backward`, a scalar.

        Args:
            total: the sum of its tokens' losses, a scalar tensor; zero if it has none. In 16-bit compute it in fp32,
                as `cross_entropy` of `logits.float()` does.
        """
        return total * (self._comm.size / self.tokens)
