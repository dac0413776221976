"""GPT-2 on bytes: pre-LayerNorm blocks, learned positions, a head tied to the token embedding."""

from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common.models.recompute import run_blocks


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. `width` is a multiple of `heads`."""

    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int = 256


def attend(query, key, value):
    """Causal attention, each [batch, heads, length, head width]; `parallel.sequence` puts another in its place."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Causal self-attention with `heads` heads: [batch, length, width] -> the same shape."""

    attend = staticmethod(attend)

    def __init__(self, config):
        super().__init__()
        self.head_width = config.width // config.heads  # a tensor-parallel rank has fewer heads, as wide as these
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_width))  # [batch, length, 3, heads, head width]
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, head width]
        mixed = self.attend(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide inside: [..., width] -> the same shape."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """One transformer layer. LayerNorm stands before each sublayer, so the residual path stays clean."""

    def __init__(self, config, feed_forward):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width)
        self.mlp = feed_forward(config)

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Decoder(nn.Module):
    """Predict every next byte of a window: what models of text share.

    Shapes: inputs int64 [batch, length], length at most `config.sequence`; targets the same shape;
    logits [batch, length, vocabulary].
    """

    predicts_text = True
    checkpoint_activations = None
    saving = nullcontext()
    sequence_rank = 0  # which part of each sequence this rank has: see `parallel.sequence`

    def __init__(self, config):
        super().__init__()
        self.window = config.sequence + 1
        self.saved_per_sample = config.layers * config.sequence * config.width
        self.wte = nn.Embedding(config.vocabulary, config.width)

    def inputs_and_targets(self, windows):
        """Split uint8 [batch, window] into two int64 [batch, window - 1], the second one byte ahead."""
        tokens = windows.long()
        return tokens[:, :-1], tokens[:, 1:]

    def forward(self, inputs):
        # Without a name here, so that the first block's input can be freed on the device.
        return self.predict(run_blocks(self.blocks, self.embed(inputs), self.checkpoint_activations, self.saving))


class GPT(Decoder):
    """A Decoder. `feed_forward(config)` builds the second half of each block.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", sec. 2.3.
    """

    def __init__(self, config, feed_forward=FeedForward):
        super().__init__(config)
        self.wpe = nn.Embedding(config.sequence, config.width)
        self.blocks = nn.ModuleList(Block(config, feed_forward) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def embed(self, inputs):
        """The first block's input, [batch, length, width]."""
        length = inputs.shape[1]
        positions = self.sequence_rank * length + torch.arange(length, device=inputs.device)
        return self.wte(inputs) + self.wpe(positions)

    def predict(self, x):
        """The logits, from the last block's output."""
        return self.head(self.ln_f(x))
