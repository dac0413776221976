"""What a rank says when another one is gone, or waits in another collective. Only with gloo."""

import contextlib

import torch.distributed as dist

from common.ranks import trace

GRACE = 2.0  # seconds in which a peer that was waited for may report what it waits in
OFTEN = "call the engine equally often on every rank: forward, backward, step, and collectives such as save()"
# What to do, by what both places say in which ranks wait, in either order: the first row that fits.
CURES = (
    (
        "the buffers (",
        "the buffers (",
        "a buffer has another size on each rank, as a cache that grows: build the engine with broadcast_buffers=False",
    ),
    (
        "(backward, ",
        "(backward, ",
        "their graphs differ at the backward of that unit: each loss must depend on every forward that waits for it, "
        "reach every checkpoint that is around several units, and what one rank reads of another module's weights, all "
        "must read",
    ),
    (
        "(forward, ",
        "(forward, ",
        "their forwards run other layers, as with layer dropout: choose them alike on every rank, or run forward and "
        "backward within engine.gathered()",
    ),
    ("(evaluation, ", "", f"{OFTEN}; or evaluate and generate within engine.gathered()"),
    ("", "", f"{OFTEN}; with equally many batches, or the last ones within engine.gathered()"),
)


class RankLost(RuntimeError):
    """A rank died, fell silent or waits in another collective: the message names it, and where this rank was."""


def told(error, group, peer, here):
    """The `RankLost` for a call of `group` with rank `peer` that failed while this rank was in the collective `here`.

    A rank that loses another ends soon and is lost to others: all name the first.
    """
    rank, partner = dist.get_rank(), dist.get_global_rank(group, peer)
    in_vain, store, theirs = "Timed out" in str(error), group.get_group_store(), None
    gone = f"rank {partner} gave no answer in time" if in_vain else f"rank {partner} was lost"
    with contextlib.suppress(dist.DistError):  # the store may be gone as well
        if in_vain:
            store.set(f"waits/{rank}", here)
        # A rank that times out closes its connections first, and reports what it waited in a moment later.
        said, within = [f"waits/{partner}"], GRACE if in_vain else GRACE / 4
        trace.comes_true(lambda: store.check(said) or store.check(["gone"]), within)
        if store.check(said):
            theirs = store.get(*said).decode()
            store.set(f"waits/{rank}", here)
        else:
            gone = store.compare_set("gone", "", gone).decode()
    if theirs is not None:
        apart = f"rank {rank} waits for rank {partner} in {here}, and rank {partner} waits in {theirs}"
        pairs = ((here, theirs), (theirs, here))
        cure = next(cure for one, other, cure in CURES if any(one in a and other in b for a, b in pairs))
        return RankLost(f"the ranks part: {apart}; {cure}")
    alone = f", which is in none; {OFTEN}" if in_vain else ""
    return RankLost(f"{gone}: rank {rank} was in {here} with rank {partner}{alone}")
