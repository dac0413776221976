"""Matrices that their optimizer sees whole: where a shard holds them whole, and where shards cut them.

Stages 0 to 2 deal them to shards whole, see `layout`. Engines that shard parameters cut them evenly, as all else: there
a step puts each together on one rank, its owner. Over N ranks and M elements of matrices:

    1. each       the optimizer steps the momentum of its pieces, and hands out what is to be made orthogonal
    2. send       pieces go to the owners of their matrices                           about (N-1)/N M/N elements sent
    3. answer     an owner puts its matrices together and calls the optimizer's
                  function, which no other rank does; pieces of the results go back   about (N-1)/N M/N
    4. finish     every rank steps its pieces by those that came back

Owners are dealt over the whole model, so that equal matrices in units of their own have different ones. A unit's pieces
travel while matrices of the unit before it are made orthogonal.
"""

from dataclasses import dataclass

import torch

from common.engine.layout import deal
from common.optim import Whole
from common.tensors import length


@dataclass
class Pieces(Whole):
    """Pieces of parameters in a flat tensor: what the optimizer hands out goes to the bucket's `Exchange`."""

    exchange: object

    def each(self, weights, update, function, finish):
        self.exchange.take([update[:0], *(update[part] for part, _ in self.parts)], function, finish)


class Exchange:
    """Brings a bucket's matrices together on their owners, {(bucket, name): rank}, and what comes of them back.

    Its Collectives, `comm`, are of the ranks that have one copy of everything, cut evenly.
    """

    def __init__(self, comm, bucket, owner_of):
        self._comm, self._name, self._slots = comm, bucket.name, bucket.slots
        ranks, kept = range(comm.size), bucket.padded_numel // comm.size
        parts = [bucket.overlaps(slice(rank * kept, (rank + 1) * kept)) for rank in ranks]
        lengths = [{name: length(there) for name, there, _ in part} for part in parts]
        self.lengths = {name: [of.get(name, 0) for of in lengths] for name in bucket.slots}  # of its pieces, by rank
        self.owned = [[name for name in bucket.slots if owner_of[bucket, name] == rank] for rank in ranks]
        # For each rank the lengths of this rank's pieces of its matrices, and of its pieces of this rank's matrices.
        self._mine = [[self.lengths[name][comm.rank] for name in names] for names in self.owned]
        self._theirs = [[self.lengths[name][rank] for name in self.owned[comm.rank]] for rank in ranks]
        self.taken, self.itemsize = [], 0  # pieces that are not sent yet; bytes of an element, once one was sent
        for shard in bucket.optimizer_shards:
            shard.master.whole = Pieces(bucket.whole_in(shard.part), self)

    def sent(self):
        """Bytes that this rank sends in a step like the last one, and those of them that leave its node."""
        both = zip(self._mine, self._theirs, strict=True)
        return self._comm.sent_of([(sum(mine) + sum(theirs)) * self.itemsize for mine, theirs in both])

    def take(self, pieces, function, finish):
        """Take what the optimizer hands out, in the order of the shard."""
        self.taken += pieces
        self._function, self._finish, self.itemsize = function, finish, pieces[0].itemsize

    def send(self):
        """Phase 2. Begin to send this rank's pieces to their owners."""
        taken, self.taken = torch.cat(self.taken).to(self._comm.device), []
        self._nothing, mine = taken[:0], [lengths[self._comm.rank] for lengths in self.lengths.values()]
        pieces = dict(zip(self.lengths, taken.split(mine), strict=True))
        self._begin([[pieces[name] for name in names] for names in self.owned], self._theirs, "matrices")

    def answer(self):
        """Phase 3. Put this rank's own matrices together, call the function, and begin to send the pieces back."""
        results, arrived = [], zip(*self._arrived(self._theirs), strict=True)
        for name, pieces in zip(self.owned[self._comm.rank], arrived, strict=True):
            result = self._function(torch.cat(pieces).view(self._slots[name].shape))
            results.append(result.reshape(-1).split(self.lengths[name]))
        self._begin([[of[rank] for of in results] for rank in range(self._comm.size)], self._mine, "updates")

    def come_back(self):
        """Phase 4. Wait for this rank's pieces; return what steps those in a flat tensor, one shard after another."""
        of_owners = zip(self.owned, self._arrived(self._mine), strict=True)
        pieces = {name: piece for names, of in of_owners for name, piece in zip(names, of, strict=True)}
        left, finish = torch.cat([pieces[name] for name in self.lengths]), self._finish
        self._function = self._finish = self._arriving = self._handle = None  # they hold the optimizer's groups

        def finish_pieces(weights):
            nonlocal left
            for part, shape in weights.whole.parts:
                piece, left = left.tensor_split([length(part)])
                finish(weights.detach()[part], piece.to(weights.device), shape)

        return finish_pieces

    def _begin(self, pieces, lengths, what):
        sent = [torch.cat([self._nothing, *of]) for of in pieces]
        self._arriving = [self._comm.buffer(sum(of), dtype=self._nothing.dtype) for of in lengths]
        self._handle = self._comm.exchange(sent, self._arriving, f"{what} of {self._name}")

    def _arrived(self, lengths):
        self._handle.wait()
        return [arrived.split(of) for arrived, of in zip(self._arriving, lengths, strict=True)]


def exchanges(comm, buckets):
    """The `Exchange` of each bucket whose matrices shards cut, {bucket: Exchange}, for the ranks of a Collectives."""
    cut = [bucket for bucket in buckets if bucket.kind.whole and not bucket.kind.dealt]
    members = [((bucket, name), parameter) for bucket in cut for name, parameter in bucket.members.items()]
    dealt = deal(members, cut[0].kind, comm.size) if cut else ()
    owner_of = {slot.name: rank for rank, slots in enumerate(dealt) for slot in slots}
    return {bucket: Exchange(comm, bucket, owner_of) for bucket in cut}


def finish(exchanges, finish_shard):
    """Finish a step: `finish_shard(shard, by)` does so for an optimizer shard, by what came back. A collective."""
    taken = {bucket: exchange for bucket, exchange in exchanges.items() if exchange.taken}
    for exchange in taken.values():
        exchange.send()
    for exchange in taken.values():
        exchange.answer()
    for bucket, exchange in taken.items():
        by = exchange.come_back()
        for shard in bucket.optimizer_shards:
            finish_shard(shard, by)
