"""A GPT whose feed-forward layers are mixtures of experts: parameters that some steps do not use."""

from functools import partial

import torch
from torch import nn

from common.models.gpt import GPT, FeedForward
from common.tensors import rows_where


class MixtureOfExperts(nn.Module):
    """Send each token to the one expert its router likes best, and scale the answer by that probability.

    The router gets its gradient through the probability: the choice itself has none. An expert without tokens
    is not called, so its parameters get no gradient in that step. There is no capacity limit, so no token is
    dropped, and no auxiliary loss.

    Shapes: [..., width] -> the same shape.

    Source: Fedus et al., arXiv 2101.03961, sec. 2.1.
    """

    def __init__(self, config, experts):
        super().__init__()
        self.router = nn.Linear(config.width, experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(config) for _ in range(experts))

    def forward(self, x):
        tokens = x.flatten(0, -2)  # [tokens, width]
        probability, choice = self.router(tokens).softmax(dim=-1).max(dim=-1)  # each [tokens]
        answers = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            routed = rows_where(choice == index, share=1 / len(self.experts))  # which tokens are this expert's
            if len(routed) > 0:
                answers[routed] = probability[routed, None] * expert(tokens[routed])
        return answers.view_as(x)


class MoEGPT(GPT):
    """A GPT with `experts` experts in every block; shapes as in GPT."""

    uses_every_parameter = False  # torch's DDP must be told

    def __init__(self, config, experts):
        super().__init__(config, feed_forward=partial(MixtureOfExperts, experts=experts))
