"""Expert parallelism: each of E data ranks in a row holds its share of the experts, and tokens travel to them.

    experts 0 and 1      on ranks 0 and 2: replicas of each other
    experts 2 and 3      on ranks 1 and 3
    all else             on every rank

    1. route       the router chooses experts for this rank's tokens
    2. count       all-to-all: how many tokens come for each expert
    3. dispatch    exchange: tokens go to the ranks that hold their experts, among 0 and 1, and among 2 and 3
    4. compute     an expert takes the tokens of all E ranks, in rank order
    5. combine     exchange: answers come back, and are scaled by the router's probability

In backward gradients take the same ways back. Every rank takes part in every exchange, however many tokens it sends. An
expert without tokens is called with none: its gradients are zero, and come in the same order as on all other ranks.

Source: Lepikhin et al., GShard, arXiv 2006.16668, sec. 3; Rajbhandari et al., DeepSpeed-MoE, arXiv 2201.05596, sec. 5.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from common.errors import InputError
from common.tensors import inside_backward
from parallel.tensor import Cut


class Exchange(torch.autograd.Function):
    """Send rows, [n, width], in order of the ranks that take them; their gradients come back the same way."""

    @staticmethod
    def forward(context, rows, comm, sent, received):
        context.comm, context.sent, context.received = comm, sent, received
        return exchange(rows, comm, sent, received)

    @staticmethod
    def backward(context, gradient):
        return exchange(gradient.contiguous(), context.comm, context.received, context.sent), None, None, None


def exchange(rows, comm, sent, received):
    """Send `sent[k]` rows to rank k; return those of all ranks, `received[k]` of rank k."""
    width = rows.shape[1]
    arrived = comm.buffer(sum(received), width, dtype=rows.dtype)
    parts, places = rows.detach().split(sent), arrived.split(received)
    comm.exchange([part.view(-1) for part in parts], [place.view(-1) for place in places], "tokens").wait()
    return arrived


class ExpertParallel(nn.Module):
    """A layer of experts, of which this rank holds some; parameters keep their names.

    Shapes: [..., width] -> the same shape.

    Args:
        layer: the whole layer.
        library: the `Library` that it comes from.
        number: of experts on each rank.
        comm: the Collectives of the expert axis.

    Attributes:
        routed: how many tokens were "sent" to other ranks' experts and "received" from other ranks since it was last
            cleared, without those of recomputations.
    """

    def __init__(self, layer, library, number, comm):
        super().__init__()
        setattr(self, library.router, getattr(layer, library.router))
        self.experts = library.keep(layer.experts, slice(comm.rank * number, (comm.rank + 1) * number))
        self.library, self.number, self.comm = library, number, comm
        self.routed = Counter()

    def forward(self, x):
        tokens = x.flatten(0, -2)  # [tokens, width]
        if torch.is_grad_enabled() and not tokens.requires_grad:
            tokens = tokens.detach().requires_grad_()  # else ranks without tokens would miss backward's exchanges
        probability, choice = self.library.route(getattr(self, self.library.router), tokens)
        order = choice.flatten().argsort(stable=True)  # of (token, choice) pairs, by expert
        sent, received = self.count(choice)
        by_rank = [of.sum(dim=1).tolist() for of in (sent, received)]
        if not inside_backward():
            away, here = (sum(of) - of[self.comm.rank] for of in by_rank)
            self.routed.update(sent=away, received=here)
        arrived = Exchange.apply(tokens[order // choice.shape[1]], self.comm, *by_rank)
        returned = Exchange.apply(self.library.compute(self.experts, arrived, received), self.comm, *reversed(by_rank))
        answers = torch.empty_like(returned).index_copy(0, order, returned).view(*choice.shape, -1)
        return (probability[..., None] * answers).sum(dim=1).to(x.dtype).view_as(x)

    def count(self, choice):
        """How many tokens go to each expert of each rank, and how many come from each rank: [E, experts of a rank]."""
        size = self.comm.size
        sent = choice.flatten().bincount(minlength=size * self.number)
        received = self.comm.buffer(len(sent), dtype=sent.dtype)
        self.comm.all_to_all(sent, received, "the numbers of tokens").wait()
        return [of.view(size, -1).cpu() for of in (sent, received)]


class Library(NamedTuple):
    """How a library's layers of experts are read, split and computed.

    Args:
        router: the name of the router in the layer.
        route: `route(router, tokens)` returns probabilities and chosen experts, both [tokens, choices].
        keep: `keep(experts, mine)` returns the experts in the slice `mine`, whose parameters keep their names.
        compute: `compute(experts, arrived, received)` returns the answers to tokens that have come,
            [tokens, width], in their order: by rank, and by expert. `received` [E, experts of a rank] counts them.
    """

    router: str
    route: Callable
    keep: Callable
    compute: Callable


def best_expert(router, tokens):
    """The one expert that the zoo's router likes best."""
    return router(tokens).softmax(dim=-1).max(dim=-1, keepdim=True)


def keep_modules(experts, mine):
    """Of modules in a list these, by the names that they had."""
    return nn.ModuleDict({str(index): experts[index] for index in range(mine.start, mine.stop)})


def compute_in_turn(experts, arrived, received):
    """One expert after the other, each with the tokens of all ranks."""
    pieces, numbers = arrived.split(received.flatten().tolist()), received.T.tolist()
    answers = []
    for index, (expert, lengths) in enumerate(zip(experts.values(), numbers, strict=True)):
        own = torch.cat(pieces[index :: len(experts)])  # there may be none: its gradient is zero, and comes
        answers.append(expert(own).split(lengths))
    return torch.cat([answer for of_rank in zip(*answers, strict=True) for answer in of_rank])


def best_experts(router, tokens):
    """The experts that a router of Hugging Face's likes best."""
    _, probability, choice = router(tokens)
    return probability, choice


def keep_rows(experts, mine):
    """Of experts stacked in parameters [experts, ...] these."""
    for name, parameter in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(parameter.detach()[mine].clone(), parameter.requires_grad))
    experts.num_experts = mine.stop - mine.start
    return experts


def compute_stacked(experts, arrived, received):
    """All at once, by the library's own kernels, as if each token had one choice, taken with certainty.

    Without any token it is one of zeros, whose answer is dropped: the gradient is zero, and comes.
    """
    choice = torch.arange(received.shape[1]).repeat(len(received)).repeat_interleave(received.flatten())
    added = int(len(arrived) == 0)
    tokens, choice = F.pad(arrived, (0, 0, 0, added)), F.pad(choice, (0, added)).to(arrived.device)
    return experts(tokens, choice[:, None], tokens.new_ones(len(tokens), 1))[: len(arrived)]


HUGGING_FACE = Library("gate", best_experts, keep_rows, compute_stacked)
LIBRARIES = {  # by a layer's class
    "MixtureOfExperts": Library("router", best_expert, keep_modules, compute_in_turn),
    "MixtralSparseMoeBlock": HUGGING_FACE,
    "Qwen3MoeSparseMoeBlock": HUGGING_FACE,
}


def split(model, axes):
    """Keep of each layer of experts this expert rank's, in place; `axes` then knows their names.

    Raises:
        InputError: the expert ranks do not divide the experts; there are none; or a layer draws random numbers.
    """
    comm, whole = axes.expert, dict(model.named_parameters())
    layers = [(path, layer) for path, layer in model.named_modules() if type(layer).__name__ in LIBRARIES]
    if not layers:
        raise InputError(f"the model has no layer of experts that can be split, which are {', '.join(LIBRARIES)}")
    for path, layer in layers:
        experts = getattr(layer.experts, "num_experts", None) or len(layer.experts)
        number, left = divmod(experts, comm.size)
        if left:
            raise InputError(f"{comm.size} expert ranks do not divide the {experts} experts of {path!r}")
        if getattr(layer, "jitter_noise", 0) > 0:
            raise InputError(f"{path!r} has jitter_noise, which is not split; set router_jitter_noise=0.0")
        split_layer = ExpertParallel(layer, LIBRARIES[type(layer).__name__], number, comm)
        place, _, name = path.rpartition(".")
        setattr(model.get_submodule(place), name, split_layer)
        for name, parameter in split_layer.experts.named_parameters(f"{path}.experts"):
            axes.experts.add(name)
            if parameter.shape != whole[name].shape:  # a piece of a stack
                axes.cuts[name] = Cut(0, 1, len(whole[name]))
    axes.elsewhere = whole.keys() - dict(model.named_parameters()).keys()
