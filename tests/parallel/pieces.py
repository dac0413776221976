"""What tensor ranks compute, in one process: the pieces of a GPT or a Llama one after the other, sums in rank order."""

import copy

import torch
import torch.nn.functional as F
from torch.func import functional_call

BLOCKS = {"qkv": 3}  # the others have one


def in_pieces(model, ranks):
    """Make a model compute its sublayers and its head in pieces; its loss is then `loss`, of a list of logits."""
    for block in model.blocks:
        for sublayer, last in ((block.attention, block.attention.out), (block.mlp, block.mlp.down)):
            sublayer.forward = Pieces(sublayer, last, ranks)
    model.head.forward = lambda x: [
        F.linear(one, rows) for one, rows in zip(Fork.apply(x, ranks), model.head.weight.chunk(ranks), strict=True)
    ]
    return model


class Pieces:
    """A sublayer's forward, piece by piece."""

    def __init__(self, sublayer, last, ranks):
        self.sublayer, self.last, self.ranks, self.one = sublayer, last, ranks, copy.deepcopy(sublayer)
        dict(self.one.named_children())["out" if hasattr(sublayer, "out") else "down"].bias = None

    def __call__(self, x):
        parts = []
        for rank, own in enumerate(Fork.apply(x, self.ranks)):
            piece = {
                name: self.cut(name, p, rank) for name, p in self.sublayer.named_parameters() if p is not self.last.bias
            }
            parts.append(functional_call(self.one, piece, own))
        total = InRankOrder.apply(*parts)
        return total if self.last.bias is None else total + self.last.bias

    def cut(self, name, whole, rank):
        if whole is self.last.weight:
            return whole.chunk(self.ranks, dim=1)[rank].contiguous()  # strides choose the kernel
        blocks = whole.chunk(BLOCKS.get(name.split(".")[0], 1))
        return torch.cat([block.chunk(self.ranks)[rank] for block in blocks])


def in_rank_order(parts):
    total = parts[0].float().clone()
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


class InRankOrder(torch.autograd.Function):
    """The sum of pieces."""

    @staticmethod
    def forward(context, *parts):
        context.number = len(parts)
        return in_rank_order(parts)

    @staticmethod
    def backward(context, gradient):
        return (gradient,) * context.number


class Fork(torch.autograd.Function):
    """A tensor for each piece; its gradient is the sum of theirs."""

    @staticmethod
    def forward(context, tensor, ranks):
        return tuple(tensor.clone() for _ in range(ranks))

    @staticmethod
    def backward(context, *gradients):
        return in_rank_order(gradients), None


def loss(logits, targets):
    """The mean cross entropy of logits whose columns are in pieces."""
    pieces, targets = [piece.flatten(0, -2).float() for piece in logits], targets.flatten()
    largest = torch.stack([piece.detach().amax(dim=1) for piece in pieces]).amax(dim=0)
    pieces = [piece - largest[:, None] for piece in pieces]
    total = InRankOrder.apply(*[piece.exp().sum(dim=1) for piece in pieces])
    return (total.log() - torch.cat(pieces, dim=1).gather(1, targets[:, None])[:, 0]).sum() / len(targets)
