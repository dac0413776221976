"""Activation checkpointing: what a block computed is dropped after its forward and computed again in backward.

Between blocks one tensor stays, instead of everything inside them; a second forward of each block pays for it.

Source: Chen et al., arXiv 1604.06174, sec. 4.1.
"""

import torch
from torch.utils.checkpoint import checkpoint

# torch has two: the first rebuilds what autograd asks for, the second runs a backward of its own inside backward.
KINDS = ("non-reentrant", "reentrant")


def run_blocks(blocks, x, kind):
    """Run `x` through blocks, one after the other; with a kind of KINDS each of them is recomputed in backward.

    Args:
        blocks: modules from a tensor to a tensor that draw no random numbers.
        x: a tensor.
        kind: one of KINDS; None recomputes nothing.

    Returns:
        A tensor, with the same bits for every kind, as have the gradients.
    """
    if not torch.is_grad_enabled():
        kind = None  # there will be no backward
    if kind == "reentrant" and not x.requires_grad:
        # A reentrant checkpoint is part of the graph only if its input is, whatever trains inside it: below a
        # frozen embedding (LoRA) there would be no gradient.
        x.requires_grad_()
    for block in blocks:
        if kind is None:
            x = block(x)
        else:
            x = checkpoint(block, x, use_reentrant=kind == "reentrant", preserve_rng_state=False)
    return x
