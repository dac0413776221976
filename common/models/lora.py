"""Low-rank adapters: a frozen model in which a few small matrices beside its Linear layers are all that trains."""

import torch.nn.functional as F
from torch import nn

from common.models.gpt import GPT


class LoRALinear(nn.Linear):
    """A frozen Linear layer plus `scale` * B A x, with trained A and B of low rank.

    It keeps the weight and bias of the layer that it replaces, under their names, so that a state dict of the base
    fits. B begins as zeros: the layer starts as the one it replaces.

    Shapes: [..., in] -> [..., out]; lora_a (A) [rank, in], lora_b (B) [out, rank].

    Source: Hu et al., arXiv 2106.09685, sec. 4.1, with scale = alpha / rank.
    """

    def __init__(self, linear, rank, alpha):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = alpha / rank
        self.lora_a = nn.Parameter(self.weight.new_empty(rank, self.in_features).normal_(0, self.in_features**-0.5))
        self.lora_b = nn.Parameter(self.weight.new_zeros(self.out_features, rank))

    def forward(self, x):
        return super().forward(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def add_adapters(model, rank, alpha):
    """Freeze a model and put adapters into its blocks, in place: every Linear layer there becomes a LoRALinear.

    The paper adapts attention alone (sec. 4.2); here the feed-forward layers have adapters too, of scale alpha / rank.
    """
    model.requires_grad_(False)
    for module in list(model.blocks.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank, alpha))


class LoRAGPT(GPT):
    """A GPT in which only the adapters train; shapes as in GPT."""

    def __init__(self, config, rank, alpha):
        super().__init__(config)
        add_adapters(self, rank, alpha)
