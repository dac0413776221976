"""Activation checkpointing: a block's activations are dropped after its forward and recomputed in backward.

Only the tensors between blocks are kept; the price is a second forward of each block.

Source: Chen et al., arXiv 1604.06174, sec. 4.1.
"""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from common.tensors import inside_backward

# torch's two: the first recomputes what autograd asks for, the second runs a nested backward.
KINDS = ("non-reentrant", "reentrant")


def run_blocks(blocks, x, kind, saving):
    """Run `x` through blocks, one after the other; backward recomputes each if `kind` is one of KINDS.

    Args:
        blocks: modules from a tensor to a tensor. Recomputation draws the same random numbers again.
        kind: one of KINDS; None recomputes nothing. No bit of the result or of gradients depends on it.
        saving: the context in which checkpoints save the input of each block, and nothing else is saved.
    """
    if not torch.is_grad_enabled():
        kind = None  # there will be no backward
    if kind == "reentrant" and not x.requires_grad:
        # A reentrant checkpoint joins the graph only if its input requires grad, even if its parameters do: after a
        # frozen embedding (LoRA) there would be no gradient.
        x.requires_grad_()
    if kind is None:
        for block in blocks:
            x = block(x)
        return x
    with saving:
        for block in blocks:
            x = checkpoint(partial(_run_once, block), x, use_reentrant=kind == "reentrant")
    return x


def _run_once(block, x):
    """block(x); in a recomputation, batch norms do not count the batch a second time."""
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
