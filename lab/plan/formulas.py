"""What a rank holds, sends and moves, by formula: model states, what is in flight, activations; for each engine."""

from dataclasses import dataclass

from lab.simulate.hardware import Hardware

# What a block keeps for its backward, in bytes for each element of its input in 16-bit, if attention keeps no square of
# the sequence; and what each logit takes: in the precision, in fp32, and a gradient.
BLOCK, LOGIT = 34, 12
BUCKET = 25 * 2**20 // 4  # elements, at least
SCALE = 4 / 256  # bytes of an element's part of an fp32 scale
SWITCHES = ("quantize_weights", "hierarchical", "quantize_gradients")  # of ZeRO++: qwZ, hpZ, qgZ; on by default


@dataclass(frozen=True)
class Shape:
    """A model, as formulas see it."""

    name: str
    parameters: float
    layers: int
    rest: float  # parameters outside of its blocks
    width: int | None = None  # this and the next two of a transformer
    vocabulary: int | None = None
    sequence: int | None = None


@dataclass(frozen=True)
class Way:
    """An engine with its options: a row of the table."""

    title: str
    engine: str
    own: tuple = ()


WAYS = (
    Way("stage 0, data parallelism", "stage0_ddp"),
    Way("stage 1", "stage1_os"),
    Way("stage 2", "stage2_grad"),
    Way("stage 3", "stage3_param"),
    Way("ZeRO++", "zeropp"),
    Way("ZeRO-Offload", "offload"),
    Way("ZeRO-Infinity, host", "offload.nvme", (("tiers", "cpu"),)),
    Way("ZeRO-Infinity, disk", "offload.nvme", (("tiers", "nvme"),)),
)


@dataclass(frozen=True)
class Rank:
    """One of the ranks that share a model."""

    shape: Shape
    gpu: Hardware
    ranks: int  # of data parallelism, in all
    per_node: int  # of them
    tensor: int  # this and the next are degrees, which divide the model
    pipeline: int
    width: int  # bytes of a parameter
    batch: int  # samples of a micro-batch
    sequence: int | None  # their length; None where the model has none
    checkpoints: bool  # activations are computed again in backward

    @property
    def psi(self):
        """The parameters that its data-parallel ranks share."""
        return self.shape.parameters / (self.tensor * self.pipeline)

    @property
    def master(self):
        """Bytes of an fp32 master weight and Adam's two moments; in fp32 the parameter is the master."""
        return 12 if self.width == 2 else 8

    def row(self, way):
        """A row of the results.

        `device` adds up what is in flight and activations, each at its peak. If the peaks come at different moments, as
        in stage 3 with many ranks and a large vocabulary, a step needs less. Gradients not yet packed are left out:
        with wide blocks a step needs more.
        """
        device, host, disk = self.states(way)
        sent, out = self.sent(way)
        bus, on_disk = self.moved(way)
        transient, activations = self.transient(way), self.activations()
        return {
            "way": way.title,
            "engine": way.engine,
            "own": dict(way.own),
            "states": device,
            "host": host,
            "disk": disk,
            "transient": transient,
            "activations": activations,
            "device": sum(device.values()) + transient + (activations or 0),
            "sent": sent,
            "sent_by_node": out,
            "bus": bus,
            "disk_moved": on_disk,
            "seconds": {
                "collectives": max(sent / self.gpu.inside, out / self.gpu.between),
                "bus": bus / self.gpu.bus,
                "disk": on_disk / self.gpu.disk,
            },
        }

    def states(self, way):
        """Bytes of model states: {class: on the device}, on the host, on disk."""
        w, n, m, psi = self.width, self.ranks, self.master, self.psi
        parameters, gradients, optimizer = {
            "stage0_ddp": (w, w, m),
            "stage1_os": (w, w, m / n),
            "stage2_grad": (w, w / n, m / n),
            "stage3_param": (w / n, w / n, m / n),
            "zeropp": (w / n + self._second(way), w / n, m / n),
            "offload": (w, 0, 0),
            "offload.nvme": (0, 0, 0),
        }[way.engine]
        device = {"parameters": parameters * psi, "gradients": gradients * psi, "optimizer": optimizer * psi}
        if way.engine == "offload":
            return device, (w + 12) / n * psi, 0  # masters apart from the parameters, in fp32 too
        beside = (2 * w + m) / n * psi if way.engine == "offload.nvme" else 0
        return (device, 0, beside) if dict(way.own).get("tiers") == "nvme" else (device, beside, 0)

    def _switches(self, way):
        """Which of ZeRO++'s switches are on. On one node a secondary shard would repeat the first, so there is none."""
        int8, second, int4 = (dict(way.own).get(switch, True) for switch in SWITCHES)
        return int8, second and self.ranks > self.per_node, int4

    def _second(self, way):
        """Bytes for each parameter of hpZ's secondary shard."""
        return self.width / self.per_node * self._switches(way)[1]

    def transient(self, way):
        """Bytes in flight within a step: buckets, or gathered units and their gradients."""
        rest, block = self.shape.rest / self.tensor, self._block()
        if way.engine in ("stage0_ddp", "stage1_os"):
            return 0
        if way.engine in ("stage2_grad", "offload"):
            return 2 * self.width * min(self.psi, max(BUCKET, rest))
        return self.width * (2 * block + rest + block + rest)  # this unit and the next, and a gradient

    def _block(self):
        """The parameters of a block."""
        return (self.shape.parameters - self.shape.rest) / self.shape.layers / self.tensor

    def _kept(self):
        """The parameters that end the forward: they stay gathered, and save their second gather."""
        return self._block() + self.shape.rest / self.tensor

    def activations(self):
        """Bytes of activations at their peak; None for a model that is no GPT."""
        if self.shape.width is None:
            return None
        tokens, layers = self.batch * self.sequence, self.shape.layers / self.pipeline
        inputs, inside = self.width * self.shape.width * tokens, BLOCK * self.width / 2 * self.shape.width * tokens
        logits = LOGIT * self.shape.vocabulary * tokens / self.tensor
        if not self.checkpoints:
            return layers * inside / self.tensor + logits
        return layers * inputs + max(inside / self.tensor, logits)

    def sent(self, way):
        """Bytes that a rank sends in a step, and bytes that leave its node."""
        if way.engine == "zeropp":
            return self._sent_compressed(way)
        w, n, psi = self.width, self.ranks, self.psi
        third = psi - self._kept() if way.engine in ("stage3_param", "offload.nvme") else 0
        sent = w * (2 * psi + third) * (n - 1) / n
        return sent, sent * (n > self.per_node)  # a ring leaves each node once

    def _sent_compressed(self, way):
        """The same for ZeRO++, by its switches; a scale for each 256 elements."""
        w, n, p, psi = self.width, self.ranks, self.per_node, self.psi
        int8, second, int4 = self._switches(way)
        first = (1 + SCALE if int8 else w) * (n - 1) / n
        again = w * (p - 1) / p if second else first  # from the node's secondary shards, nothing leaves it
        gathered, gathered_out = first * psi + again * (psi - self._kept()), first * psi
        if not second:
            gathered_out = gathered
        reduced = reduced_out = w * psi * (n - 1) / n
        if int4:  # in two hops: within the node, and the node's sums across
            code, nodes = (0.5 + SCALE) * psi, n // p
            reduced, reduced_out = code * ((p - 1) / p + (nodes - 1) / n), code * (nodes - 1) / nodes
        return gathered + reduced, (gathered_out + reduced_out) * (n > p)

    def moved(self, way):
        """Bytes that cross the bus in a step, and that are read from disk and written there."""
        w, shard, kept = self.width, self.psi / self.ranks, self._kept() / self.ranks
        if way.engine == "offload":
            return 2 * w * shard, 0  # gradients down, parameters up
        if way.engine != "offload.nvme":
            return 0, 0
        bus = w * (3 * shard - kept)  # up before forward and before backward, gradients down
        if dict(way.own)["tiers"] != "nvme":
            return bus, 0
        read = w * (3 * shard - kept) + 12 * shard  # for forward and backward; what is stepped
        return bus, read + (2 * w + self.master) * shard

    def compute_seconds(self):
        """Seconds that a micro-batch computes: 6 operations for a parameter and token, 8 with checkpoints."""
        operations = (8 if self.checkpoints else 6) * self.psi * self.batch * (self.sequence or 1)
        return operations / (self.gpu.flops[self.width] * self.gpu.fraction)
