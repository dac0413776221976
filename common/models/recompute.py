"""Activation checkpointing: what a block computed is dropped after its forward and computed again in backward.

Between blocks one tensor stays, instead of everything inside them; a second forward of each block pays for it.

Source: Chen et al., arXiv 1604.06174, sec. 4.1.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.tensors import inside_backward

# torch has two: the first rebuilds what autograd asks for, the second runs a backward of its own inside backward.
KINDS = ("non-reentrant", "reentrant")


def run_blocks(blocks, x, kind, saving):
    """Run `x` through blocks, one after the other; with a kind of KINDS each of them is recomputed in backward.

    Args:
        blocks: modules from a tensor to a tensor. Random numbers that they draw, they draw again.
        kind: one of KINDS; None recomputes nothing. No bit depends on it, of what it returns or of gradients.
        saving: a context in which checkpoints save the input of each block, and nothing else is saved.
    """
    if not torch.is_grad_enabled():
        kind = None  # there will be no backward
    if kind == "reentrant" and not x.requires_grad:
        # A reentrant checkpoint is part of the graph only if its input is, whatever trains inside it: below a
        # frozen embedding (LoRA) there would be no gradient.
        x.requires_grad_()
    if kind is None:
        for block in blocks:
            x = block(x)
        return x
    with saving:
        for block in blocks:
            once = partial(_run_once, block)
            x = checkpoint(once, x, use_reentrant=kind == "reentrant")
    return x


def _run_once(block, x):
    """block(x); when it is computed again in backward, batch norms do not count the batch a second time."""
    if not inside_backward():
        return block(x)
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        return block(x)
    finally:
        for norm, (momentum, batches) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
