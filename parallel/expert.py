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

import torch
from torch import nn

from common.errors import InputError
from common.models.moe import MixtureOfExperts


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
        router, experts: the layer's; `experts` [(number, expert)] those of this rank, in order.
        route: `route(tokens)` returns probabilities and chosen experts, both [tokens, choices].
        comm: the Collectives of the expert axis.
    """

    def __init__(self, router, experts, route, comm):
        super().__init__()
        self.router, self.route, self.comm = router, route, comm
        self.experts = nn.ModuleDict({str(number): expert for number, expert in experts})

    def forward(self, x):
        tokens = x.flatten(0, -2)  # [tokens, width]
        if torch.is_grad_enabled() and not tokens.requires_grad:
            tokens = tokens.detach().requires_grad_()  # else ranks without tokens would miss backward's exchanges
        probability, choice = self.route(self.router, tokens)
        order = choice.flatten().argsort(stable=True)  # of (token, choice) pairs, by expert
        sent, received = self.count(choice)
        by_rank = [of.sum(dim=1).tolist() for of in (sent, received)]
        arrived = Exchange.apply(tokens[order // choice.shape[1]], self.comm, *by_rank)
        returned = Exchange.apply(self.compute(arrived, received), self.comm, *reversed(by_rank))
        answers = torch.empty_like(returned).index_copy(0, order, returned).view(*choice.shape, -1)
        return (probability[..., None] * answers).sum(dim=1).view_as(x)

    def count(self, choice):
        """How many tokens go to each expert of each rank, and how many come from each rank: [E, experts of a rank]."""
        size = self.comm.size
        sent = choice.flatten().bincount(minlength=size * len(self.experts))
        received = self.comm.buffer(len(sent), dtype=sent.dtype)
        self.comm.all_to_all(sent, received, "the numbers of tokens").wait()
        return [of.view(size, -1).cpu() for of in (sent, received)]

    def compute(self, arrived, received):
        """The answers of this rank's experts to the tokens that have come, in their order."""
        pieces, numbers = arrived.split(received.flatten().tolist()), received.T.tolist()
        answers = []
        for index, (expert, lengths) in enumerate(zip(self.experts.values(), numbers, strict=True)):
            own = torch.cat(pieces[index :: len(self.experts)])  # there may be none: its gradient is zero, and comes
            answers.append(expert(own).split(lengths))
        return torch.cat([answer for of_rank in zip(*answers, strict=True) for answer in of_rank])


def zoo_route(router, tokens):
    """The zoo's: the one expert that the router likes best."""
    return router(tokens).softmax(dim=-1).max(dim=-1, keepdim=True)


def split(model, axes):
    """Keep of each layer of experts this expert rank's, in place; `axes` then knows their names.

    Raises:
        InputError: the expert ranks do not divide the experts, or there are none.
    """
    comm, names = axes.expert, set(dict(model.named_parameters()))
    layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, MixtureOfExperts)]
    if not layers:
        raise InputError("the model has no layer of experts that can be split: the zoo's MixtureOfExperts alone can")
    for path, layer in layers:
        number, left = divmod(len(layer.experts), comm.size)
        if left:
            raise InputError(f"{comm.size} expert ranks do not divide the {len(layer.experts)} experts of {path!r}")
        mine = range(comm.rank * number, (comm.rank + 1) * number)
        split_layer = ExpertParallel(layer.router, [(index, layer.experts[index]) for index in mine], zoo_route, comm)
        place, _, name = path.rpartition(".")
        setattr(model.get_submodule(place), name, split_layer)
        axes.experts |= {f"{path}.experts.{name}" for name, _ in split_layer.experts.named_parameters()}
    axes.elsewhere = names - set(dict(model.named_parameters()))
