"""Llama on bytes: RMSNorm, rotary positions, SwiGLU, grouped-query attention, no biases, an untied head."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from common.models.gpt import Decoder, GPTConfig, attend


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(GPTConfig):
    """The shape of a Llama. `width` is a multiple of 2 * `heads`, and `heads` a multiple of `kv_heads`."""

    kv_heads: int
    hidden: int


def rotate(x, first_position=0):
    """Turn each pair of neighbouring features by an angle that grows with the position (RoPE).

    The dot product of a rotated query and a rotated key then depends on their distance alone.
    The angles are computed here, not kept in a buffer, so there is nothing to rebuild or to shard.

    Args:
        x: [..., length, features], any floating dtype, `features` even.
        first_position: that of the first row.

    Returns:
        The same shape and dtype.

    Source: Su et al., arXiv 2104.09864, sec. 3.4.2.
    """
    length, features = x.shape[-2:]
    exponent = torch.arange(0, features, 2, device=x.device) / features
    position = first_position + torch.arange(length, device=x.device)
    angle = position[:, None] * 10000.0**-exponent  # [length, features / 2], fp32 in every precision
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1).flatten(-2)


class GroupedQueryAttention(nn.Module):
    """Causal attention in which `heads / kv_heads` query heads share a key and a value head.

    Shapes: [batch, length, width] -> the same shape.

    Source: Ainslie et al., arXiv 2305.13245, sec. 2.2.
    """

    attend, sequence_rank = staticmethod(attend), 0  # the latter: which part of each sequence this rank has

    def __init__(self, config):
        super().__init__()
        self.head_width = config.width // config.heads
        self.group = config.heads // config.kv_heads
        self.query = nn.Linear(config.width, config.heads * self.head_width, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * self.head_width, bias=False)
        self.out = nn.Linear(config.heads * self.head_width, config.width, bias=False)

    def split_heads(self, x):
        """[batch, length, heads * head_width] -> [batch, heads, length, head_width]."""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)

    def forward(self, x):
        first = self.sequence_rank * x.shape[1]
        query = rotate(self.split_heads(self.query(x)), first)
        key = rotate(self.split_heads(self.key(x)), first).repeat_interleave(self.group, dim=1)
        value = self.split_heads(self.value(x)).repeat_interleave(self.group, dim=1)
        mixed = self.attend(query, key, value)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class SwiGLU(nn.Module):
    """A feed-forward layer gated by SiLU: [..., width] -> the same shape.

    Source: Shazeer, arXiv 2002.05202, sec. 2.
    """

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    """One layer, with RMSNorm (Zhang and Sennrich, arXiv 1910.07467, sec. 3) before each sublayer."""

    def __init__(self, config):
        super().__init__()
        self.norm_1 = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = GroupedQueryAttention(config)
        self.norm_2 = nn.RMSNorm(config.width, eps=1e-5)
        self.mlp = SwiGLU(config)

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class Llama(Decoder):
    """A Decoder.

    Source: Touvron et al., arXiv 2302.13971, sec. 2.2.
    """

    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm_f = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def embed(self, inputs):
        return self.wte(inputs)

    def predict(self, x):
        return self.head(self.norm_f(x))
