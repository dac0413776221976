"""A residual network in the CIFAR style: convolutions, and BatchNorm with buffers to keep in step."""

from contextlib import nullcontext

import torch.nn.functional as F
from torch import nn

from common.models.recompute import run_blocks


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut, which is a 1x1 convolution if the shape changes.

    Shapes: [batch, before, height, width] -> [batch, after, height / stride, width / stride].
    """

    def __init__(self, before, after, stride):
        super().__init__()
        self.conv_1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn_1 = nn.BatchNorm2d(after)
        self.conv_2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn_2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Identity()
        if before != after or stride > 1:
            conv = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(after))

    def forward(self, x):
        inside = self.bn_2(self.conv_2(F.relu(self.bn_1(self.conv_1(x)))))
        return F.relu(inside + self.shortcut(x))


class ResNet(nn.Module):
    """Classify an image made of 3 * side * side bytes as the byte that follows, modulo `classes`.

    Every group of `depth` blocks has the width of its entry in `channels`; every group but the first
    halves the image.

    Shapes: inputs float32 [batch, 3, side, side] in [-1, 1], targets int64 [batch], logits [batch, classes].

    Source: He et al., arXiv 1512.03385, sec. 4.2.
    """

    checkpoint_activations = None
    saving = nullcontext()

    def __init__(self, side, channels, depth, classes=10):
        super().__init__()
        self.window = 3 * side * side + 1
        self.side = side
        self.classes = classes
        self.stem = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(channels[0])
        self.saved_per_sample = 0
        blocks = []
        before = channels[0]
        for group, after in enumerate(channels):
            for index in range(depth):
                stride = 2 if group > 0 and index == 0 else 1
                blocks.append(ResidualBlock(before, after, stride))
                self.saved_per_sample += before * side * side
                before, side = after, -(-side // stride)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, classes)

    def inputs_and_targets(self, windows):
        """Split uint8 [batch, window] into float32 [batch, 3, side, side] and int64 [batch]."""
        images = windows[:, :-1].reshape(-1, 3, self.side, self.side).float() / 127.5 - 1
        return images, windows[:, -1].long() % self.classes

    def forward(self, inputs):
        x = F.relu(self.bn(self.stem(inputs)))
        x = run_blocks(self.blocks, x, self.checkpoint_activations, self.saving)
        return self.head(x.mean(dim=(2, 3)))
