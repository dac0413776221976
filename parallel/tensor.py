"""Tensor parallelism: a tensor rank holds a piece of each large matrix, and computes that piece's part of a layer.

    y = x W    W cut by columns: a rank has some of y's columns      nothing is sent
    z = y V    V cut by rows: a rank has one of z's summands         `AddUp`, in forward

A sublayer, attention or feed-forward, is a matrix cut by columns, for whole heads, and one cut by rows. In backward a
rank has one of the summands of x's gradient: `AddUpBackward`. So a block sends four sums of [batch, length, width] in a
step. Norms, and biases after a sum, are whole on every rank, with equal gradients.

The vocabulary is cut too. A rank embeds the tokens that are its own, and gives zeros for others; and it has the logits
of its own tokens, from which `VocabParallelLoss` takes the cross entropy.

Sums are added in rank order in fp32 and rounded once, on all ranks alike, so what is whole stays equal to the bit. The
unsplit model adds in the order of its kernels: it differs in rounding, from the first step on.

Source: Megatron-LM, arXiv 1909.08053, sec. 3. The gradient of a sublayer's input is added up once, not once for each
matrix.
"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from common.engine.layout import round_up
from common.errors import InputError
from common.loss import IGNORED
from common.ranks.axes import ALIKE
from common.tensors import checksum

BY_COLUMNS = {"qkv": 3, "query": 1, "key": 1, "value": 1, "up": 1, "gate": 1}  # a layer's name -> blocks of its columns
BY_ROWS = ("out", "down")


class Cut(NamedTuple):
    """How a parameter is cut: along a dimension of `size`, each of `blocks` equal blocks into a piece for each rank.

    With one block the last pieces are padded with zeros, as the vocabulary's are.
    """

    dimension: int
    blocks: int
    size: int

    def piece(self, whole, rank, ranks):
        """A rank's piece of a whole parameter, copied."""
        rows = whole.transpose(0, self.dimension)
        rows = torch.cat([rows, rows.new_zeros(-self.size % ranks, *rows.shape[1:])]) if self.blocks == 1 else rows
        own = rows.unflatten(0, (self.blocks, ranks, -1))[:, rank].flatten(0, 1)
        return own.transpose(0, self.dimension).clone(memory_format=torch.contiguous_format)

    def join(self, pieces):
        """The whole parameter, from all ranks' pieces."""
        blocks = [piece.transpose(0, self.dimension).unflatten(0, (self.blocks, -1)) for piece in pieces]
        return torch.cat(blocks, dim=1).flatten(0, 1)[: self.size].transpose(0, self.dimension)


def add_up(tensor, comm):
    """The sum of all ranks' tensors, of any shape. Sends 2(N-1)/N of it, padded to a multiple of N."""
    flat = tensor.new_zeros(round_up(tensor.numel(), comm.size))
    flat[: tensor.numel()] = tensor.reshape(-1)
    comm.all_reduce(flat, "a tensor-parallel sum", mean=False).wait()
    return flat[: tensor.numel()].view(tensor.shape)


class AddUp(torch.autograd.Function):
    """The sum over ranks in forward; each summand's gradient is the sum's. Megatron-LM's g."""

    @staticmethod
    def forward(context, tensor, comm):
        return add_up(tensor, comm)

    @staticmethod
    def backward(context, gradient):
        return gradient, None


class AddUpBackward(torch.autograd.Function):
    """The tensor itself in forward; in backward the sum of the ranks' gradients. Megatron-LM's f."""

    @staticmethod
    def forward(context, tensor, comm):
        context.comm = comm
        return tensor.view_as(tensor)

    @staticmethod
    def backward(context, gradient):
        return add_up(gradient, context.comm), None


class RowParallelLinear(nn.Linear):
    """A Linear layer cut by rows of its input: [..., in / T] -> [..., out], the bias added once, after the sum."""

    def __init__(self, linear, comm):
        super().__init__(linear.in_features // comm.size, linear.out_features, device="meta")
        self.weight, self.bias, self.comm = linear.weight, linear.bias, comm

    def forward(self, x):
        total = AddUp.apply(F.linear(x, self.weight), self.comm)
        return total if self.bias is None else total + self.bias


def own_of(tokens, rows, vocabulary, comm):
    """Tokens as numbers of this rank's rows, and which are others'. One that the vocabulary lacks is left as it is.

    So it is an IndexError on every rank, as unsplit: no rank has as many rows, padding included.
    """
    unknown = (tokens < 0) | (tokens >= vocabulary)
    own = torch.where(unknown, tokens, tokens - comm.rank * rows)
    return own, ((own < 0) | (own >= rows)) & ~unknown


class VocabParallelEmbedding(nn.Embedding):
    """An embedding of this rank's tokens: int64 [...] -> [..., width], the sum over ranks."""

    def __init__(self, embedding, comm):
        super().__init__(*embedding.weight.shape, device="meta")
        self.weight, self.comm, self.vocabulary = embedding.weight, comm, embedding.num_embeddings

    def forward(self, tokens):
        own, others = own_of(tokens, len(self.weight), self.vocabulary, self.comm)
        embedded = F.embedding(own.masked_fill(others, 0), self.weight).masked_fill(others[..., None], 0)
        return AddUp.apply(embedded, self.comm)


class CutDropout(nn.Dropout):
    """Dropout where tensor ranks hold different features: of the stream that they share it draws a seed for each.

    So streams outside stay in step, and an activation checkpoint, which restores them, drops the same again.
    """

    rank = 0  # the tensor rank; `split` sets it

    def forward(self, x):
        if not self.training or self.p in (0, 1):  # nothing is drawn
            return super().forward(x)
        seed = int(torch.randint(2**62, ())) + self.rank
        keep = torch.rand(x.shape, generator=torch.Generator(x.device).manual_seed(seed), device=x.device) >= self.p
        return x * keep / (1 - self.p)


class Streams:
    """After a forward that draws, as dropout does, tensor ranks compare their streams: what is whole needs one mask.

    A rank sends 8 bytes to each other one; the model's attribute `draws` says so.
    """

    def __init__(self, comm):
        self.comm, self.before = comm, None

    def states(self):
        """The states of the random streams, uint8 [bytes]."""
        device = torch.cuda.get_rng_state(self.comm.device) if self.comm.device.type == "cuda" else torch.empty(0)
        return torch.cat([torch.get_rng_state(), device.byte()])

    def note(self, model, args):
        self.before = None if self.comm.simulated or not torch.is_grad_enabled() else self.states()

    def compare(self, model, args, out):
        """Raise InputError on every rank if they differ."""
        model.draws = self.before is not None and not torch.equal(self.before, self.states())
        if model.draws:
            own = torch.tensor([checksum(self.before)], device=self.comm.device)
            if (self.comm.everyones(own, "the random streams") != own).any():
                raise InputError(f"what tensor ranks drop of whole activations differs; {ALIKE}")


class VocabParallelLoss:
    """`common.models.loss` of logits whose columns are cut: [..., vocabulary / T] and int64 [...] to a scalar."""

    def __init__(self, axes):
        self.comm, self.cuts = axes.tensor, axes.cuts

    def __call__(self, logits, targets):
        vocabulary = self.cuts.get("head.weight", self.cuts.get("wte.weight")).size
        logits, targets = logits.flatten(0, -2).float(), targets.flatten()
        first, columns = self.comm.rank * logits.shape[1], torch.arange(logits.shape[1], device=logits.device)
        logits = logits.masked_fill(first + columns >= vocabulary, -torch.inf)  # padding
        logits = logits - self.comm.maximum(logits.detach().amax(dim=1), "the largest logits")[:, None]
        own, others = own_of(targets, len(columns), vocabulary, self.comm)
        others |= targets == IGNORED
        of_target = -F.nll_loss(logits, own.masked_fill(others, 0), reduction="none").masked_fill(others, 0)
        total, of_target = AddUp.apply(torch.stack([logits.exp().sum(dim=1), of_target]), self.comm)
        return ((total.log() - of_target) * (targets != IGNORED)).sum() / (targets != IGNORED).sum()


def split(model, axes):
    """Cut a GPT or a Llama of the zoo for this tensor rank, in place; `axes` then knows how. Next, see `cut_init`.

    Raises:
        InputError: the tensor ranks do not divide heads or columns, or a layer is none of the zoo's.
    """
    comm, tied = axes.tensor, "head.weight" not in dict(model.named_parameters())

    def cut_layer(layer, path, dimension, blocks=1):
        for name, parameter in layer.named_parameters(recurse=False):
            if dimension < parameter.ndim:  # else it is a bias after the sum
                cut = axes.cuts[f"{path}.{name}"] = Cut(dimension, blocks, parameter.shape[dimension])
                piece = nn.Parameter(cut.piece(parameter.detach(), comm.rank, comm.size), parameter.requires_grad)
                setattr(layer, name, piece)

    for path, layer in list(model.named_modules()):
        place, _, name = path.rpartition(".")
        sublayer, linear = model.get_submodule(place), type(layer) is nn.Linear
        if linear and name in BY_COLUMNS:
            columns = layer.out_features // BY_COLUMNS[name]
            heads = columns // getattr(sublayer, "head_width", 1)
            if heads % comm.size:
                what = f"{heads} {'columns' if heads == columns else 'heads'} of {path!r}"
                raise InputError(f"{comm.size} tensor ranks do not divide the {what}")
            cut_layer(layer, path, 0, BY_COLUMNS[name])
        elif linear and name in BY_ROWS:
            cut_layer(layer, path, 1)
            setattr(sublayer, name, RowParallelLinear(layer, comm))
            sublayer.register_forward_pre_hook(partial(_add_up_in_backward, comm))
        elif name == "wte":
            cut_layer(layer, path, 0)
            model.wte = VocabParallelEmbedding(layer, comm)
        elif name == "head":
            if tied:
                layer.weight = model.wte.weight
            else:
                cut_layer(layer, path, 0)
            layer.register_forward_pre_hook(partial(_add_up_in_backward, comm))
        elif isinstance(layer, CutDropout):
            layer.rank = comm.rank
        elif name != "wpe" and not isinstance(layer, (nn.LayerNorm, nn.RMSNorm)) and [*layer.parameters(recurse=False)]:
            raise InputError(f"{path!r} is a {type(layer).__name__}, and the zoo's GPT and Llama alone can be split")
    axes.whole = {name for name, _ in model.named_parameters()} - axes.cuts.keys()
    streams = Streams(comm)
    model.register_forward_pre_hook(streams.note)
    model.register_forward_hook(streams.compare)


def _add_up_in_backward(comm, module, args):
    return AddUpBackward.apply(args[0], comm), *args[1:]


def cut_init(init, axes):
    """An `init` for a model that was split: the values that `init(name, tensor)` gives whole parameters, cut."""

    @torch.no_grad()
    def of_piece(name, tensor):
        if name not in axes.cuts:
            return init(name, tensor)
        own = axes.cuts[name]
        shape = [own.size if dimension == own.dimension else size for dimension, size in enumerate(tensor.shape)]
        whole = tensor.new_full(shape, torch.nan)
        init(name, whole)
        comm = axes.tensor or axes.expert
        return tensor.copy_(own.piece(whole, comm.rank, comm.size))

    return of_piece
