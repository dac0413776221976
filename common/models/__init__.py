"""The model zoo: named sizes, initial values that do not depend on where they are drawn, one loss for all.

Every model is an nn.Module with
    window                         the bytes that one sample needs
    inputs_and_targets(windows)    uint8 [batch, window] -> the inputs of forward, the targets of `loss`
    forward(inputs)                logits [..., classes]
    checkpoint_activations         None, or the kind of checkpoint around each block; models without blocks lack it
    saving, saved_per_sample       the context in which checkpoints save, and the elements that they save per sample
    predicts_text                  True if inputs are bytes and the logits predict every next byte; else missing
"""

import difflib
import hashlib
from functools import partial
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn

from common.errors import InputError
from common.models.gpt import GPT, GPTConfig
from common.models.llama import Llama, LlamaConfig
from common.models.lora import LoRAGPT
from common.models.mlp import MLP
from common.models.moe import MoEGPT
from common.models.recompute import KINDS
from common.models.resnet import ResNet

SIZES = {
    "mlp": MLP,
    "gpt-tiny": partial(GPT, GPTConfig(layers=2, width=16, heads=2, sequence=16)),
    "gpt-nano": partial(GPT, GPTConfig(layers=4, width=96, heads=4, sequence=128)),
    "gpt-micro": partial(GPT, GPTConfig(layers=6, width=192, heads=6, sequence=256)),
    "gpt-mini": partial(GPT, GPTConfig(layers=6, width=384, heads=6, sequence=256)),
    # A family that grows, for the bench.
    "gpt-1m": partial(GPT, GPTConfig(layers=4, width=144, heads=4, sequence=64)),
    "gpt-3m": partial(GPT, GPTConfig(layers=6, width=208, heads=4, sequence=64)),
    "gpt-10m": partial(GPT, GPTConfig(layers=8, width=320, heads=5, sequence=64)),
    "gpt-30m": partial(GPT, GPTConfig(layers=8, width=560, heads=10, sequence=64)),
    "gpt-100m": partial(GPT, GPTConfig(layers=14, width=768, heads=12, sequence=64)),
    # Much to send and little to compute, for slow links.
    "gpt-link": partial(GPT, GPTConfig(layers=8, width=320, heads=5, sequence=16)),
    "gpt-124m": partial(GPT, GPTConfig(layers=12, width=768, heads=12, sequence=1024, vocabulary=50257)),
    "llama-tiny": partial(Llama, LlamaConfig(layers=2, width=16, heads=4, kv_heads=2, hidden=40, sequence=16)),
    "llama-nano": partial(Llama, LlamaConfig(layers=4, width=96, heads=6, kv_heads=2, hidden=256, sequence=128)),
    "resnet-tiny": partial(ResNet, side=8, channels=(8, 16), depth=1),
    "resnet-nano": partial(ResNet, side=32, channels=(16, 32, 64), depth=3),
    "moe-tiny": partial(MoEGPT, GPTConfig(layers=2, width=16, heads=2, sequence=16), experts=4),
    "moe-nano": partial(MoEGPT, GPTConfig(layers=4, width=64, heads=4, sequence=128), experts=4),
    "lora-tiny": partial(LoRAGPT, GPTConfig(layers=2, width=16, heads=2, sequence=16), rank=2, alpha=4),
    "lora-nano": partial(LoRAGPT, GPTConfig(layers=4, width=96, heads=4, sequence=128), rank=4, alpha=8),
}


def build(name, *, device="meta", checkpoint_activations=None, known=SIZES):
    """Build the model called `name`, one of `known`.

    On the meta device, the default, it has shapes but no storage: `materialize` or an engine gives it both
    storage and values, so that a model larger than one rank's memory is never held whole.

    Args:
        checkpoint_activations: "non-reentrant" or "reentrant", torch's checkpoint around each block, which backward
            recomputes. None keeps all activations.
        known: {name: what makes the model}: SIZES, or others too.

    Raises:
        InputError: there is no such name or kind, or the model has no blocks.
    """
    if name not in known:
        closest = "".join(f"did you mean {match}? " for match in difflib.get_close_matches(name, known, n=1))
        raise InputError(f"unknown model {name!r}; {closest}known models: {', '.join(known)}")
    with torch.device(device):
        model = known[name]()
    if checkpoint_activations is not None:
        if checkpoint_activations not in KINDS:
            raise InputError(f"unknown kind {checkpoint_activations!r}; known kinds: {', '.join(KINDS)}")
        if not hasattr(model, "checkpoint_activations"):
            raise InputError(f"{name} has no blocks to recompute; choose another model, or no checkpoints")
        model.checkpoint_activations = checkpoint_activations
    return model


def count(model):
    """How many parameters a model has; a shared one counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def initial_values(seed):
    """Return `init(name, tensor)`, which fills a parameter or a buffer in place.

    The values are a function of (seed, qualified name, shape) alone: the same on every rank and device and
    in every order, and in a lower precision the rounded fp32 values. By the last part of the name:

        bias, lora_b                   zeros
        1-D weight (norm gains)        ones
        weight of wte, wpe             normal, standard deviation 0.02
        any other of >= 2 dimensions   normal, standard deviation 1 / sqrt(fan_in)
        running_var                    ones
        all other buffers              zeros
    """

    @torch.no_grad()
    def init(name, tensor):
        parts = name.split(".")
        if parts[-1] in ("bias", "lora_b"):
            tensor.zero_()
        elif tensor.ndim >= 2:
            fan_in = tensor.numel() // tensor.shape[0]
            std = 0.02 if parts[-2:-1] in (["wte"], ["wpe"]) else fan_in**-0.5
            # Python's own hash of a string differs between processes; this one does not.
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
            drawn = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
            tensor.copy_(drawn.normal_(0, std, generator=generator))
        elif parts[-1] in ("weight", "running_var"):
            tensor.fill_(1)
        else:
            tensor.zero_()

    return init


def materialize(model, init, device):
    """Give a meta-device model storage on `device` and values from `init(qualified name, tensor)`, in place.

    `Module.to_empty` would give each user of a tied weight a copy of its own. Here a tied weight stays one object,
    filled once, under its first name.
    """
    real = {}  # meta tensor -> the real one that replaces it
    own = {"recurse": False, "remove_duplicate": False}
    for module in model.modules():
        for name, tensor in [*module.named_parameters(**own), *module.named_buffers(**own)]:
            if tensor not in real:
                storage = torch.empty_like(tensor, device=device)
                if isinstance(tensor, nn.Parameter):
                    storage = nn.Parameter(storage, requires_grad=tensor.requires_grad)
                real[tensor] = storage
            setattr(module, name, real[tensor])
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        init(name, tensor)


def loss(outputs, targets):
    """Mean cross entropy of logits [..., classes] to int64 [...]: a scalar, computed in fp32 in every precision."""
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())
