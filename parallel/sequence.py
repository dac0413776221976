"""Sequence parallelism, Ulysses: a rank holds a part of each sequence, and in attention all of it for some heads.

    [batch, heads, length / N, head width]      a rank's tokens, all heads
        all-to-all   3 (N-1)/N Ψ_a sent         queries, keys, values
    [batch, heads / N, length, head width]      all tokens, a rank's heads: attention
        all-to-all     (N-1)/N Ψ_a sent         the result
    [batch, heads, length / N, head width]

with Ψ_a bytes of such a tensor; in backward the same. Everything else works token by token. Sequence ranks hold the
same weights, so they belong to the engine's data-parallel group, with any engine: the mean over them is over tokens.
A rank's activations are an N-th, and one tensor more per block: attention's result is kept before and after its swap.

Source: DeepSpeed Ulysses, arXiv 2309.14509, sec. 3.
"""

import torch

from common.errors import InputError


def swap(tensor, comm, scatter, gather):
    """All-to-all: scatter one dimension over the ranks, and gather the other; 1 is the heads, 2 the length."""
    parts = torch.stack(tensor.chunk(comm.size, dim=scatter))
    received = torch.empty_like(parts)
    comm.all_to_all(parts.view(-1), received.view(-1), "a sequence-parallel swap").wait()
    return torch.cat(list(received), dim=gather)


class Swap(torch.autograd.Function):
    """`swap`; its gradient is swapped back."""

    @staticmethod
    def forward(context, tensor, comm, scatter, gather):
        context.back = comm, gather, scatter
        return swap(tensor, comm, scatter, gather)

    @staticmethod
    def backward(context, gradient):
        return swap(gradient, *context.back), None, None, None


class Ulysses:
    """Attention over all tokens by heads: `attend(query, key, value)`, each [batch, heads, length / N, head width]."""

    def __init__(self, attend, comm):
        self.attend, self.comm = attend, comm

    def __call__(self, *tensors):
        check_heads(tensors[0].shape[1], self.comm)  # `tensor.split` may have left fewer
        return Swap.apply(self.attend(*(Swap.apply(tensor, self.comm, 1, 2) for tensor in tensors)), self.comm, 2, 1)


def split(model, comm):
    """Have a zoo model compute a part of each sequence: that of this rank of `comm`, a `Collectives`.

    Raises:
        InputError: the ranks do not divide the heads, or the model has no attention.
    """
    if not hasattr(model, "predict"):
        raise InputError("the zoo's GPT and Llama alone take parts of sequences")
    attention = model.blocks[0].attention
    check_heads(attention.out.in_features // attention.head_width, comm)
    for module in (model, *(block.attention for block in model.blocks)):
        module.sequence_rank = comm.rank
    for block in model.blocks:
        block.attention.attend = Ulysses(block.attention.attend, comm)


def check_heads(heads, comm):
    """Raise InputError if the ranks do not divide the heads of one rank."""
    if heads % comm.size:
        raise InputError(f"{comm.size} sequence ranks do not divide the heads that a rank has, {heads}")


def part(tokens, comm):
    """This rank's part of tokens [batch, length]. Raises InputError if the ranks do not divide the length."""
    if tokens.shape[1] % comm.size:
        raise InputError(f"{comm.size} sequence ranks do not divide the {tokens.shape[1]} tokens of a sequence")
    return tokens.chunk(comm.size, dim=1)[comm.rank]
