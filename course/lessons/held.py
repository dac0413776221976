"""What a rank holds at a moment of a step: a letter for each shard of each bucket, and bytes, area by area.

The areas are the device, the host and the disk. Off the device a rank has at most its own shard, so one letter is
enough there.
"""

from collections import defaultdict

import torch

from common.measure.memory import HOST, storage_bytes
from offload.disk import OnDisk

# What a rank has of a shard of parameters, gradients or optimizer states.
ABSENT, ROOM, OWN, UNDER_WAY, HERE, NEW, ROUNDED, STALE = ".rothnqs"
AREAS = {"device": "device", "cpu": "host", "nvme": "disk"}  # tiers, as the pages call them
REDUCTIONS = ("all_reduce", "reduce_scatter", "all_to_all", "mean")


class Held:
    """What a rank holds of an engine. The recorder reports what begins, arrives and is stepped."""

    def __init__(self, engine):
        self.engine, self.ranks = engine, range(engine.world_size)
        self.buckets = {bucket.name: bucket for bucket in engine.buckets}
        tiers = getattr(engine, "tier", {"device": engine})
        self.areas = [AREAS[name] for name, tier in tiers.items() if tier is not None]
        on_disk = "disk" in self.areas
        self.places = {  # place on disk -> (bucket, state)
            place: (bucket.name, state)
            for bucket in (engine.buckets if on_disk else ())
            for state, _, place in bucket.at_rest(engine.optimizer)
            if isinstance(place, OnDisk)
        }
        self.begun = {}  # bucket -> kinds of the collectives and copies in flight
        # (bucket, state) -> letter: what of the disk lies in the host's buffers, where what is read ahead by the step
        # before stands already; and what this step has begun to write there.
        self.lent = {whose: UNDER_WAY for place, whose in self.places.items() if place._lent}
        self.written = {}
        self._buffers = defaultdict(list)  # bucket -> tensors that its collectives use until they arrive
        self._fresh, self._stepped = {}, set()  # shards whose parameters are new; buckets whose states are
        # Places there are taken once; what is read from them stands in the optimizer for a while.
        self._on_disk = {"disk": sum(engine.accounting.held("nvme").values())} if on_disk else {}

    # ---- what happens ------------------------------------------------------------------------------------------

    def begins(self, name, kind, buffers=()):
        """A collective or a copy of a bucket begins."""
        self.uses(name, buffers)
        self.begun.setdefault(name, []).append(kind)

    def uses(self, name, buffers):
        """What is in flight for a bucket uses these tensors, and its own gradients."""
        self._buffers[name] += filter(torch.is_tensor, [*buffers, self.buckets[name].local_gradients])

    def arrives(self, name):
        """All of that is over. Returns what it was."""
        kinds = self.begun.pop(name)
        self._buffers.pop(name, None)
        if self.engine.comm.traffic.phase == "step" and "all_gather" in kinds:
            self._fresh[name] = self.ranks
        return kinds

    def steps(self, name, shard):
        """The optimizer steps an optimizer shard of a bucket: what was read for it is ready."""
        bucket = self.buckets[name]
        self._stepped.add(name)
        if self._area_of(bucket, "parameters") == self._area_of(bucket, "optimizer"):
            self._fresh[name] = shards(bucket, shard.part)
        self.lent |= {whose: HERE for whose in self.lent if whose[0] == name}

    # ---- letters -----------------------------------------------------------------------------------------------

    def cells(self):
        """{bucket: (parameters, gradients, optimizer states, secondary shards)}, the last if the engine has some.

        Each is a string: a letter for each shard on the device, one for this rank's own on the host, one on disk.
        """
        of = [self._parameters, self._gradients, self._states]
        of += [self._second] if secondary_shards(self.engine) else []
        return {name: tuple(letters(bucket) for letters in of) for name, bucket in self.buckets.items()}

    def _area_of(self, bucket, state):
        """Where a state of a bucket lies between its uses."""
        return AREAS[self.engine.placed(bucket)[state][0][1].name] if len(self.areas) > 1 else "device"

    def _kept(self, bucket, state):
        """The shards of a state that this rank keeps on the device."""
        on_device = self._area_of(bucket, state) == "device"
        return shards(bucket, getattr(self.engine.owned(bucket), state)) if on_device else ()

    def _row(self, bucket, state, letters, at_rest):
        """The letters of a state: `letters` of shards on the device, and beside it `at_rest` where it lies.

        The host meanwhile has what is read from disk.
        """
        passing = self.lent.get((bucket.name, state), ABSENT)
        if passing == HERE and bucket.name in self._stepped and state != "gradients":
            passing = NEW
        beside = {"host": passing, "disk": ABSENT, self._area_of(bucket, state): at_rest}
        on_device = [letters.get(shard, ABSENT) for shard in self.ranks]
        return "".join([*on_device, *(beside[area] for area in self.areas[1:])])

    def _parameters(self, bucket):
        fresh, coming = self._fresh.get(bucket.name, ()), bucket.gathering is not None
        whole = bucket.full_parameters is not None and bucket.full_parameters.untyped_storage().nbytes() > 0
        held = self.ranks if whole else self._kept(bucket, "parameters")
        letters = {shard: NEW if shard in fresh else HERE for shard in held}
        if whole and not coming and self._rounds(bucket):
            letters = dict.fromkeys(self.ranks, ROUNDED)
        if coming:
            letters |= {shard: UNDER_WAY for shard in self.ranks if shard != self.engine.rank}
        if "to_device" in self.begun.get(bucket.name, ()):
            letters[self.engine.rank] = UNDER_WAY
        return self._row(bucket, "parameters", letters, self.written.get((bucket.name, "parameters"), HERE))

    def _gradients(self, bucket):
        arrived = bucket.has_gradient or bucket.handle is not None
        # Whether they are being reduced.
        leaves = any(kind.partition(" ")[0] in REDUCTIONS for kind in self.begun.get(bucket.name, ()))
        if arrived:
            found = {shard: HERE for own in bucket.optimizer_shards for shard in shards(bucket, own.part)}
        else:
            found = {shard: OWN for name in bucket.reported for shard in shards(bucket, bucket.slots[name])}
        room = self.ranks if bucket.local_gradients is not None else self._kept(bucket, "gradients")
        letters = dict.fromkeys(self.ranks, UNDER_WAY) if leaves else {k: found.get(k, ROOM) for k in room}
        return self._row(bucket, "gradients", letters, HERE if arrived and not leaves else ROOM)

    def _states(self, bucket):
        letter = NEW if bucket.name in self._stepped else HERE
        at_rest = HERE if self._area_of(bucket, "optimizer") == "disk" else letter
        letters = dict.fromkeys(self._kept(bucket, "optimizer"), letter)
        return self._row(bucket, "optimizer", letters, self.written.get((bucket.name, "optimizer"), at_rest))

    def _second(self, bucket):
        current = bucket in getattr(bucket.gather_with, "current", ())
        letter = STALE if not current else ROUNDED if self._rounds(bucket) else HERE
        letter = UNDER_WAY if "all_gather" in self.begun.get(bucket.name, ()) else letter
        return self._row(
            bucket, "second", dict.fromkeys(shards(bucket, self.engine.owned(bucket).secondary), letter), ABSENT
        )

    def _rounds(self, bucket):
        """Whether its parameters are gathered rounded; a gather to look at them, and not to compute, does not round."""
        return getattr(self.engine, "quantize_weights", False) and bucket.kind.block > 1

    # ---- bytes -------------------------------------------------------------------------------------------------

    def states(self):
        """The tensors of model states on the device, gathered units and gradient buffers."""
        kept = [tensor for tensors in self.engine.accounting.kept().values() for tensor in tensors]
        return kept + [
            part for bucket in self.engine.buckets for part in (bucket.full_parameters, bucket.local_gradients)
        ]

    def bytes(self):
        """{"held": bytes on the device, in flight and receive buffer included, "host": bytes, "disk": bytes}."""
        in_flight = [buffer for buffers in self._buffers.values() for buffer in buffers]
        found = {"held": storage_bytes([*self.states(), *in_flight, self.engine.comm.receive_buffer])}
        if "host" in self.areas:
            found["host"] = storage_bytes(tensor for tensors in on_host(self.engine).values() for tensor in tensors)
        return found | self._on_disk


def shards(bucket, part):
    """The shards of a bucket that a slice or a slot of it touches, as a range."""
    begin, end = (part.start, part.stop) if isinstance(part, slice) else (part.offset, part.end)
    return range(begin // bucket.shard_numel, -(-end // bucket.shard_numel))


def secondary_shards(engine):
    """The secondary shards of parameters that a rank keeps for its node, if the engine has any."""
    return [bucket.secondary for bucket in engine.buckets if getattr(bucket, "secondary", None) is not None]


def on_host(engine):
    """The tensors that an engine has on the host: {state: [...], "staging buffers": [...]}; {} without a host.

    Staging buffers, through which everything from a disk passes, are pinned memory of the host with a GPU. A CPU rank
    has them in private memory; they are shown with the host all the same.
    """
    tiers = [tier for name, tier in getattr(engine, "tier", {}).items() if name != "device" and tier is not None]
    at_rest = engine.accounting._at_rest().items() if tiers else ()
    found = {state: tensors for (state, tier), tensors in at_rest if tier == "cpu"}
    found["staging buffers"] = [buffer for tier in tiers for buffer in tier.buffers()]
    return {name: tensors for name, tensors in found.items() if tensors}


def live(engine):
    """`engine.live()` for a timeline, with the host and secondary shards apart."""
    beside = {HOST: [tensor for tensors in on_host(engine).values() for tensor in tensors]}
    # A storage counts in the first class that names it.
    return {**beside, "secondary shards": secondary_shards(engine)} | {**engine.live(), **beside}
