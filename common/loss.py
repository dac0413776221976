"""The mean over all tokens of a step, where ranks and micro-batches hold unequal numbers of them.

An engine takes the mean over ranks of what their losses say. Where each of those is a mean over its own tokens, padded
or masked ones left out, a token counts the more the fewer others its rank has: the mean of means is not the mean. So
each micro-batch brings its sum, times N over the tokens of all: engines add up backwards and divide by N ranks, and
what comes out is the sum over all tokens, divided by their number.

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
    """Turns sums over the tokens of a micro-batch into shares of the mean over all tokens of a step.

    Args:
        group: the engine's `process_group`; None is the default one.

    Attributes:
        tokens: how many there are in the step, on all ranks; None before the first `agree`.
    """

    def __init__(self, group=None):
        self._comm, self.tokens = Collectives(group), None

    def agree(self, targets):
        """Return the number of tokens of a step over all ranks, before its first backward: one small collective.

        It sends 8 bytes to each other rank, which the engine's meter does not see.

        Args:
            targets: this rank's, an int64 tensor of any shape for each micro-batch. Those that are IGNORED do not
                count; a rank may have none that do, if others have.

        Raises:
            InputError: on every rank, if no rank has any.
        """
        own = torch.tensor([sum(int((some != IGNORED).sum()) for some in targets)], device=self._comm.device)
        self.tokens = int(self._comm.everyones(own, "the number of tokens").sum())
        if self.tokens == 0:
            raise InputError(f"no rank has a token that counts: all targets of this step are {IGNORED}")
        return self.tokens

    def share(self, total):
        """What a micro-batch gives to `engine.backward`, a scalar.

        Args:
            total: the sum of the losses of its tokens, a scalar tensor; zero where it has none. In 16-bit take it in
                fp32, as `cross_entropy` of `logits.float()` does.
        """
        return total * (self._comm.size / self.tokens)
