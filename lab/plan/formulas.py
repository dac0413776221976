"""What a rank holds, sends and moves, by formula: model states, what is in flight, activations; for each engine."""

import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from common.errors import InputError

BUCKET = 25 * 2**20 // 4  # elements, at least
SCALE = 4 / 256  # bytes of an element's part of an fp32 scale
LOGIT = 12  # bytes of a logit at the loss: in fp32, its log-softmax, its gradient
MOVED, LOGIT_MOVED = 5, 27  # times that an element which a block keeps is read or written; bytes of a logit
STEPPED = 12  # bytes that a step reads and writes for a parameter, and twice those of the optimizer's states
SWITCHES = ("quantize_weights", "hierarchical", "quantize_gradients")  # of ZeRO++: qwZ, hpZ, qgZ; on by default
LOSS, HEAD, BLOCK, BUCKETS = "the loss", "the head's gradient", "a block's backward", "a second bucket"
FIRST, EMBEDDING = "the first block's backward, which comes last", "the embedding's gradient"
MOMENTS = (LOSS, HEAD, BLOCK, BUCKETS, FIRST, EMBEDDING)  # of a step, at which memory peaks
STATES = ("parameters", "gradients", "optimizer")
IN_UNITS = ("stage3_param", "zeropp", "offload.nvme", "zeropp.hybrid", "fsdp")
NO_SYNC = ("stage0_ddp", "stage1_os", "megatron")  # add up gradients of all micro-batches before they reduce


@dataclass(frozen=True)
class Way:
    """An engine with its options: a row of the table."""

    title: str
    engine: str
    own: tuple = ()

    @property
    def tiers(self):
        """{state: "device", "cpu" or "nvme"} of ZeRO-Infinity; None for all others."""
        tiers = dict(self.own).get("tiers")
        return dict.fromkeys(STATES, tiers) if isinstance(tiers, str) else tiers


WAYS, PEERS = (
    tuple(Way(row["title"], row["engine"], tuple(row.get("own", {}).items())) for row in rows)
    for rows in tomllib.loads(Path(__file__).with_name("ways.toml").read_text(encoding="utf-8")).values()
)


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is divided."""

    world_size: int = 1
    tensor: int = 1  # degrees, which divide the model
    pipeline: int = 1
    width: int = 2  # bytes of a parameter
    batch: int = 1  # samples of a micro-batch
    accumulate: int = 1  # micro-batches of a step
    sequence: int | None = None  # length of a sample; None is the model's
    checkpoints: float = True  # of activations: backward computes them again, or a part of them
    attention: str | None = None  # its kernel; None is the machine's usual one
    sequence_parallel: bool = False  # tensor-parallel ranks share what tensor parallelism leaves whole, too
    per_node: int | None = None  # GPUs of a node; None is the machine's
    moments: int = 8  # bytes of the optimizer's states for a parameter, besides an fp32 master weight in 16-bit
    fp32_gradients: bool = False  # gradients are sent in fp32
    fused_loss: bool = False  # the loss is computed piece by piece, so that no logits are kept
    offload_activations: bool = False  # what checkpoints keep goes to the host


class Rank:
    """One of the ranks that train a Shape on a Hardware as a Job says.

    Attributes:
        ranks: of data parallelism. per_node: how many of them share a node; the last node may have fewer.
        used: GPUs of a node, of all kinds of parallelism.
        rings: groups of data-parallel ranks that share a node's links, as ranks are placed tensor-parallel first, then
            by pipeline, and data-parallel last.
        gpu: the Hardware, with a rank's part of what a node's GPUs share.

    Raises:
        InputError: a degree does not divide the world size or the heads; a length is missing or beyond the positions.
    """

    def __init__(self, shape, machine, job):
        degree = job.tensor * job.pipeline
        if job.world_size % degree:
            raise InputError(
                f"--world-size {job.world_size}: tensor x pipeline, {degree}, does not divide it; choose other degrees"
            )
        self.shape, self.job, self.ranks = shape, job, job.world_size // degree
        used = min(job.per_node or machine.ranks_per_node, job.world_size)  # GPUs of a node
        self.used, self.per_node = used, min(self.ranks, max(1, used // degree))
        self.rings, self.gpu = min(degree, used), machine.shared_by(used)
        self.nodes = min(self.ranks, math.ceil(job.world_size / used))  # on which its data-parallel ranks lie
        self.width, self.tensor = job.width, job.tensor
        self.split = job.tensor if job.sequence_parallel else 1  # ranks that share what tensor parallelism leaves whole
        self.sequence = job.sequence or shape.sequence
        if shape.positions and self.sequence > shape.positions:
            raise InputError(f"--seq {self.sequence}: {shape.name} has {shape.positions} positions at most")
        for heads, of in ((shape.heads, ""), (shape.kv_heads, " of keys and values")):
            if heads % job.tensor:
                raise InputError(f"--tensor {job.tensor}: it does not divide the {heads} heads{of} of {shape.name}")
        if job.pipeline > shape.layers:
            raise InputError(f"--pipeline {job.pipeline}: {shape.name} has {shape.layers} layers; give as many at most")

        self.psi = shape.parameters / degree  # parameters that its data-parallel ranks share; and the trained of them
        self.trained = self.psi * (1 if shape.trained is None else shape.trained / shape.parameters)
        # What ends the forward stays gathered, and saves its second gather.
        self._kept = (self._unit("root") + (self._unit("last") or self._unit("block"))) / job.pipeline
        self.bucket = min(self.trained, max(BUCKET, shape.largest / self.tensor))  # elements
        # Bytes of an element: of master weight and optimizer (in fp32 the parameter is the master), of a gradient shard
        # (sums over micro-batches are in fp32), of one in tiers (a 16-bit mean stays beside the sum), and of one sent.
        self.master = job.moments + (4 if self.width == 2 else 0)
        self.summed = 4 if job.accumulate > 1 else self.width
        self.beside = self.summed + (self.width if self.summed > self.width else 0)
        self.gradient_width = 4 if job.fp32_gradients else self.width

    def _unit(self, name, trained=False):
        """Parameters of a block, of the root or the last unit; or the trained of them."""
        of_trained = getattr(self.shape, f"trained_{name}", None) if trained else None
        return (getattr(self.shape, name) if of_trained is None else of_trained) / self.tensor

    # ---- a row of the table -----------------------------------------------------------------------------------

    def row(self, way):
        """What an engine holds at its worst moment, sends and moves in a step, and how long that takes.

        A step lasts as long as the longest of computation and what overlaps it; then the GPU or the host steps.
        """
        device, host, disk = self.states(way)
        sent, out = self.sent(way)
        bus, on_disk = self.moved(way)
        host += self.offloaded
        bus += 2 * self.job.accumulate * self.offloaded / self.job.pipeline
        moments = [(self.transient(way, moment), self.activations(moment), moment) for moment in MOMENTS]
        transient, activations, worst = max(moments, key=lambda moment: moment[0] + moment[1])
        seconds = {
            "collectives": self.gpu.over_links(sent, out, self.rings),
            "bus": bus / self.gpu.bus,
            "disk": on_disk / self.gpu.disk,
        }
        on_host = way.engine == "offload" or (way.tiers and way.tiers["optimizer"] != "device")
        stepped = self.trained / (1 if way.engine == "stage0_ddp" else self._sharers(way))
        stepping = (STEPPED + 2 * self.job.moments) * stepped
        stepping /= self.gpu.host_memory if on_host else self.gpu.memory
        computing = self.computing() + self._packed(way) / self.gpu.memory
        return {
            "way": way.title,
            "engine": way.engine,
            "own": dict(way.own),
            "states": device,
            "host": host,
            "disk": disk,
            "moment": worst,
            "transient": transient,
            "activations": activations,
            "device": sum(device.values()) + transient + activations,
            "sent": sent,
            "sent_by_node": out,
            "bus": bus,
            "disk_moved": on_disk,
            "seconds": seconds,
            "step_seconds": max(computing, *seconds.values()) + stepping,
        }

    # ---- held -------------------------------------------------------------------------------------------------

    def states(self, way):
        """Bytes of model states: {class: on the device}, on the host, on disk."""
        w, n, m, g = self.width, self._sharers(way), self.master, self.summed
        parameters, gradients, optimizer = {
            "stage0_ddp": (w, w, m),
            "stage1_os": (w, w, m / n),
            "stage2_grad": (w, g / n, m / n),
            "stage3_param": (w / n, g / n, m / n),
            "zeropp": (w / n + self._second(way), g / n, m / n),
            "offload": (w, 0, 0),
            "offload.nvme": (w / n, g / n, m / n),
            "zeropp.hybrid": (w / n, g / n, m / n),
            "megatron": (w, 4, m / n),  # each micro-batch adds to one gradient in fp32
            "fsdp": (4 / n, 4 / n, self.job.moments / n),  # the parameter is the master, and its gradient as wide
        }[way.engine]
        held = {
            "parameters": parameters * self.psi,
            "gradients": gradients * self.trained,
            "optimizer": optimizer * self.trained,
        }
        if way.engine == "offload":
            masters = 4 + self.job.moments  # of their own, in fp32 too
            return held, (self.beside + masters) / n * self.trained, 0
        tiers = way.tiers or dict.fromkeys(STATES, "device")
        if way.tiers:
            held["gradients"] = self.beside / n * self.trained
        if w == 4 and tiers["parameters"] != tiers["optimizer"]:
            held["optimizer"] += 4 / n * self.trained
        by_tier = [{state: held[state] * (tiers[state] == tier) for state in STATES} for tier in ("cpu", "nvme")]
        device = {state: held[state] * (tiers[state] == "device") for state in STATES}
        return device, *(sum(of.values()) for of in by_tier)

    def _sharers(self, way):
        """How many ranks hold the states between them: those of a node in hybrid sharding, else all."""
        return self.per_node if way.engine == "zeropp.hybrid" else self.ranks

    def _switches(self, way):
        """Which of ZeRO++'s switches are on. On one node a secondary shard would repeat the first, so there is none."""
        int8, second, int4 = (dict(way.own).get(switch, True) for switch in SWITCHES)
        return int8, second and self.ranks > self.per_node, int4

    def _second(self, way):
        """Bytes for each parameter of hpZ's secondary shard."""
        return self.width / self.per_node * self._switches(way)[1]

    def transient(self, way, moment):
        """Bytes in flight at a moment: gathered units, buckets of gradients, and the buffer that receives a mean."""
        w, loss, head = self.width, moment == LOSS, moment == HEAD
        block, trained = self._unit("block"), self._unit("block", True)
        unit = trained + self._unit("root", True)
        if way.engine == "megatron":
            return 0
        if way.engine not in IN_UNITS:
            receives = 0 if w == 4 or way.engine == "offload" else 4 * self.bucket
            receives /= 1 if way.engine == "stage0_ddp" else self.ranks
            if way.engine in NO_SYNC:
                # The second micro-batch adds up in fp32, bucket by bucket; a third finds all sums.
                added = self.trained if self.job.accumulate > 2 else self.bucket * (not loss)
                return receives + (4 * added if self.summed > w else 0)
            in_flight = 0 if loss else 2 if moment == BUCKETS else 1
            return receives + w * min(self.trained, in_flight * self.bucket)
        receives = 0 if w == 4 or way.engine == "offload.nvme" else 4 * max(unit, self._unit("last", True))
        receives /= self._sharers(way)
        if loss or head:
            ends = self._unit("root", True) or self._unit("last", True)
            return receives + w * (self._kept + (0 if loss else ends))
        if moment == EMBEDDING:
            embedding = self._unit("root") + self._unit("last") * (not self.shape.tied)
            return receives + w * (embedding + block + unit + self._unit("last", True))
        if moment == FIRST and self.job.accumulate > 1:  # means are added up when all are in
            receives += w * self.trained / self._sharers(way) * (way.tiers is None)
        codes = self._codes_in_flight(way, block, trained, self._layer()[-1]) if way.engine == "zeropp" else 0
        return receives + w * (self._unit("root") + 2 * block + unit) + codes  # the next block is gathered, too

    def _codes_in_flight(self, way, block, trained, freed):
        """Bytes of what ZeRO++ sends and receives: codes of the next block, and of the gradient of the one before.

        No gradient is on its way in the last block's backward, and that one has `freed` bytes when it ends.
        """
        int8, second, int4 = self._switches(way)
        code, n, p = 0.5 + SCALE, self.ranks, self.per_node
        codes = (1 + SCALE) * (1 + 1 / n) * block if int8 and not second else 0
        if int4:  # and sums in fp32: of the node, and of all
            codes += max(0, (2 * code + 4 / n + (2 * code / p + 4 / p if n > p else 0)) * trained - freed)
        return codes

    def _layer(self):
        """Bytes of a layer's activations: of its inputs, of all that it computes, and what it keeps for backward."""
        shape, w, tokens, split = self.shape, self.width, self.job.batch * self.sequence, self.split
        inputs, inside = w * shape.width / split * tokens, w * (shape.whole / split + shape.cut / self.tensor) * tokens
        return inputs, inside, (inputs if self.job.checkpoints else inside) * (not self.job.offload_activations)

    def activations(self, moment):
        """Bytes of activations at a moment, and of gradients that are in no bucket yet.

        With a pipeline the first stage holds as many micro-batches as there are stages, so as much as all layers keep
        of one (arXiv 2205.05198, sec. 4.2.3); the last stage holds one, and the logits.
        """
        shape, w, t = self.shape, self.width, self.tensor
        tokens = self.job.batch * self.sequence
        inputs, inside, kept = self._layer()
        kept *= shape.layers
        ends = kept / self.job.pipeline + 2 * inputs
        logits = shape.vocabulary * tokens / t * (not self.job.fused_loss)
        if moment == LOSS:
            return ends + LOGIT * logits
        embedding = w * shape.vocabulary * shape.width / t * (shape.trained_root != 0)  # a gradient of it
        if moment == HEAD:
            return ends + w * logits + embedding
        if moment == EMBEDDING:
            return inputs + (3 if shape.tied else 1) * embedding
        if moment == BUCKETS:  # what backward has gone through, when the first is full, is freed
            kept *= 1 - self.bucket / self.trained
        if moment == FIRST:
            kept *= 1 - (1 - 1 / shape.layers) / self.job.pipeline
        again = inside - inputs if self.job.checkpoints else 0
        waits = embedding if shape.tied else 0  # the head's, for the embedding's
        return kept + again + inputs + waits + w * (shape.working * tokens + shape.weights) / t

    @property
    def offloaded(self):
        """Bytes that checkpoints keep on the host."""
        return self.job.offload_activations * self.shape.layers * self._layer()[0]

    # ---- sent and moved ---------------------------------------------------------------------------------------

    @property
    def sent_in_sums(self):
        """Bytes that a rank sends in a step for tensor parallelism's sums: `parallel.accounting` counts them exactly.

        Four for a layer, and one more that is computed again. Sequence parallelism sends as much in two halves.
        """
        layers = math.ceil(self.shape.layers / self.job.pipeline)
        inputs = self.width * self.shape.width * self.job.batch * self.sequence
        sums = layers * (4 + self.job.checkpoints) + (2 if self.job.pipeline == 1 else 1)  # embedding, head
        return self.job.accumulate * sums * 2 * (1 - 1 / self.tensor) * inputs

    def sent(self, way):
        """Bytes that a rank sends in a step, and bytes that its data-parallel group sends out of its node."""
        if way.engine == "zeropp":
            return self._sent_compressed(way)
        w, n, k = self.width, self._sharers(way), self.job.accumulate
        reduced, gathered = self.trained * (1 if way.engine in NO_SYNC else k), self.trained
        wide = 4 if way.engine == "megatron" else self.gradient_width
        if way.engine in IN_UNITS:
            gathered = k * (2 * self.psi - self._kept)
        gathered *= self.gradient_width if way.engine == "stage0_ddp" else w  # an all-reduce sends the mean, too
        sent = (wide * reduced + gathered) * (n - 1) / n
        if way.engine == "zeropp.hybrid":  # and the means across, in a ring for each rank of a node
            across = 2 * self.gradient_width * reduced * (1 - n / self.ranks)
            return sent + across / n, across
        return sent, sent * (n > self.per_node)  # a ring leaves each node once

    def _sent_compressed(self, way):
        """The same for ZeRO++, by its switches; a scale for each 256 elements."""
        w, n, p, psi, k = self.width, self.ranks, self.per_node, self.psi, self.job.accumulate
        int8, second, int4 = self._switches(way)
        first = (1 + SCALE if int8 else w) * (n - 1) / n
        again = w * (p - 1) / p if second else first  # from the node's secondary shards, nothing leaves it
        repeated = k * (2 * psi - self._kept) - psi
        gathered, gathered_out = first * psi + again * repeated, first * (psi + (0 if second else repeated))
        reduced = reduced_out = self.gradient_width * self.trained * (n - 1) / n
        if int4:  # in two hops: within the node, and the node's sums across
            code = (0.5 + SCALE) * self.trained
            reduced, reduced_out = code * ((p - 1) / p + (n / p - 1) / n), code * (n / p - 1) / (n / p)
        return gathered + k * reduced, (gathered_out + k * reduced_out) * (n > p)

    def _packed(self, way):
        """Bytes that ZeRO++ reads and writes for its codes, each in one pass."""
        if way.engine != "zeropp":
            return 0
        int8, second, int4 = self._switches(way)
        repeated = 0 if second else self.job.accumulate * (2 * self.psi - self._kept) - self.psi
        gathered = (1 + self.width) * (self.psi + repeated) if int8 else 0
        return gathered + (1 + self.width) * self.job.accumulate * self.trained * int4

    def moved(self, way):
        """Bytes that cross the bus in a step, and that are read from disk and written there."""
        w, k, g = self.width, self.job.accumulate, self.summed
        shard, kept = self.trained / self.ranks, self._kept / self.ranks
        if way.engine == "offload":
            return (k + 1) * w * shard, 0  # gradients to the host, parameters to the device
        if way.tiers is None:
            return 0, 0
        parameters, gradients, optimizer = (way.tiers[state] for state in STATES)
        gathers = w * k * (2 * self.psi / self.ranks - kept)
        bus = gathers * (parameters != "device") + k * w * shard * (gradients != "device")
        on_device = optimizer == "device"  # and so the step
        bus += sum(size * shard for tier, size in ((gradients, g), (parameters, w)) if (tier == "device") != on_device)
        disk = (gathers + w * shard) * (parameters == "nvme")
        if gradients == "nvme":  # each micro-batch writes, the next and the step read; sums are in fp32
            disk += 2 * (w + 4 * (k - 1)) * shard
        if optimizer == "nvme":
            disk += 2 * (4 + self.job.moments) * shard
        return bus, disk

    def computing(self):
        """Seconds that a step computes; a pipeline waits for its first micro-batch to arrive at the last stage."""
        return (self.job.accumulate + self.job.pipeline - 1) * self.compute_seconds()

    def compute_seconds(self):
        """Seconds that a micro-batch computes."""
        return sum(self.computed().values())

    def computed(self):
        """{what: seconds of a micro-batch}: "matrices", "attention", what moves "bytes" through memory, "sums".

        Layers wait for tensor parallelism's sums, and a pipeline's stages for the one that has the head. Matrices take
        6 operations for a parameter and token, and 2 for each time that they are computed again. Causal attention meets
        half of a sample, in two products forward and five backward (arXiv 2307.08691, sec. 2.3).
        """
        shape, again, peak = self.shape, float(self.job.checkpoints), self.gpu.flops[self.width]
        tokens, layers = self.job.batch * self.sequence, math.ceil(shape.layers / self.job.pipeline)
        head = shape.vocabulary * shape.width
        products = 6 + 2 * again - 2 * (1 - self.trained / self.psi)  # no gradient of what is frozen
        products *= ((shape.active or shape.parameters) - head) * layers / shape.layers + head
        _, forward, backward = self.gpu.attending(self.job.attention)
        window = min(shape.window or self.sequence, self.sequence)
        met = window * (2 - window / self.sequence) / 2  # tokens, on the mean
        attending = (4 * (1 + again) / forward + 10 / backward) * layers * shape.attention * met
        moved = (MOVED + 2 * again) * layers * (shape.whole / self.split + shape.cut / self.tensor) * self.width
        moved += LOGIT_MOVED * shape.vocabulary / self.tensor
        rate = self.gpu.inside if self.tensor <= self.used else self.gpu.between / self.used
        return {
            "matrices": products * tokens / self.tensor / (peak * self.gpu.fraction),
            "attention": attending * tokens / self.tensor / peak,
            "bytes": moved * tokens / self.gpu.memory,
            "sums": self.sent_in_sums / self.job.accumulate / rate,
        }
