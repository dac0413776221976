"""The cases that tell whether an engine is right: small trainings, and what is watched in them.

Models are so small that what goes wrong can be printed: inputs and outputs are [samples, WIDTH] in fp32.
`course.grader.observing` has ranks train them.
"""

import functools
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
SAMPLES = 4  # of a rank
SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
STAGES_TO_3 = ("stage1_os", "stage2_grad", "stage3_param")
EVERYWHERE = (*STAGES_TO_3, "offload", "overlap")


class Blocks(nn.Module):
    """Some blocks of two linear layers; `run(blocks, x, step)` says how they are called."""

    def __init__(self, run, blocks=3):
        super().__init__()
        self.run, self.steps = run, 0
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(blocks)
        )

    def forward(self, x):
        self.steps += self.training
        return self.run(self.blocks, x, self.steps)


def in_a_row(blocks, x, step):
    for block in blocks:
        x = x + block(x)
    return x


def without_the_second_at_times(blocks, x, step):
    """The second block runs in odd steps only."""
    return in_a_row(blocks if step % 2 else [blocks[0], blocks[2]], x, step)


def the_first_again_at_the_end(blocks, x, step):
    return in_a_row([*blocks, blocks[0]], x, step)


def computed_again(blocks, x, step):
    """A checkpoint around the first two, of which backward runs the forward again."""
    return in_a_row(blocks[2:], checkpoint(in_a_row, blocks[:2], x, step, use_reentrant=False), step)


@dataclass(frozen=True)
class Case:
    """A training, or what can be asked without one.

    Attributes:
        promise: what it shows.
        model: what is trained, in words.
        blocks: how many the model has.
        run: how it calls them.
        ranks: how many train it.
        optimizer: a factory.
        options: what else the engine takes.
        steps, backwards: how many, the latter for each step.
        lane: when collectives run: "late", as late as they may, or "early", to their end when they are called; "" is
            beside the computation, as elsewhere.
        watched: the last step's live bytes are followed.
        beside: what is under way while something is computed is noted: of a phase, or "all".
        elsewhere: tensors that are made without a device have no memory.
        written: freed weights are written to.
        foreign: gradients come by another backward than the engine's.
        rounded: no training, but numbers that are quantized and come back.
        points: that the promise is worth.
        stages: those it is about, by the keys of their exercises.
    """

    promise: str
    model: str = "three blocks of two linear layers"
    blocks: int = 3
    run: object = in_a_row
    ranks: int = 2
    optimizer: object = SGD
    options: tuple = ()
    steps: int = 3
    backwards: int = 1
    lane: str = ""
    watched: bool = False
    beside: str = ""
    elsewhere: bool = False
    written: bool = False
    foreign: bool = False
    rounded: bool = False
    points: int = 1
    stages: tuple = STAGES_TO_3

    @property
    def classes(self):
        """What a submission has in the place of an engine, if anything."""
        return ("Blocks", "SecondShards", "TwoHops") if self.stages == ("zeropp",) else ()


ONE_BLOCK = {"model": "one block of two linear layers", "blocks": 1}
SMALL_BUCKETS = (("bucket_mb", 0.0005),)
BESIDE = {"optimizer": ADAMW, "steps": 2, "lane": "late"}
TWO_NODES = {"ranks": 4, "stages": ("zeropp",)}


def plus_plus(*switches, **options):
    """Options of ZeRO++ with these switches, in nodes of two ranks and blocks of 8."""
    off = dict.fromkeys(("quantize_weights", "hierarchical", "quantize_gradients"), False)
    return tuple({**off, **dict.fromkeys(switches, True), "block": 8, "ranks_per_node": 2, **options}.items())


# Smallest first. The first that fails is what a student reads about.
CASES = {
    "owned": Case("the ownership table is the stage's", **ONE_BLOCK, steps=0),
    "trained": Case(
        "a step ends with the weights of the stage, on every rank",
        **ONE_BLOCK,
        lane="early",
        points=3,
        stages=EVERYWHERE,
    ),
    "late": Case("nothing is read before it has arrived", **ONE_BLOCK, lane="late", stages=EVERYWHERE),
    "owned by three": Case("the table is the stage's on 3 ranks too", **ONE_BLOCK, ranks=3, steps=0),
    "three": Case(
        "3 ranks end with the weights of the stage as well", **ONE_BLOCK, ranks=3, points=2, stages=EVERYWHERE
    ),
    "elsewhere": Case("tensors are made on the engine's own device", **ONE_BLOCK, steps=2, elsewhere=True),
    "clipped": Case(
        "clipping, AdamW and several buckets change nothing",
        optimizer=ADAMW,
        options=(("clip_norm", 0.1), *SMALL_BUCKETS),
        stages=EVERYWHERE,
    ),
    "unused": Case(
        "a layer that got no gradient counts as one with a gradient of zero",
        "three blocks, of which the second runs in odd steps only",
        run=without_the_second_at_times,
        options=(("clip_norm", 10.0), *SMALL_BUCKETS),
        steps=2,
        stages=EVERYWHERE,
    ),
    "16-bit": Case(
        "in bf16, and with two backwards a step, the bits are the same",
        optimizer=ADAMW,
        options=(("precision", "bf16"),),
        backwards=2,
        stages=EVERYWHERE,
    ),
    "repeated": Case(
        "a layer that runs twice is right, and its gradients travel once",
        "three blocks, and the first of them again",
        run=the_first_again_at_the_end,
        options=SMALL_BUCKETS,
        stages=EVERYWHERE,
    ),
    "computed again": Case(
        "activation checkpoints find the weights",
        "three blocks, the first two within a checkpoint",
        run=computed_again,
        stages=("stage3_param",),
    ),
    "room": Case(
        "what comes and goes within a step is no more than in the stage",
        options=SMALL_BUCKETS,
        steps=2,
        lane="late",
        watched=True,
        stages=EVERYWHERE,
    ),
    "beside": Case(
        "collectives are under way while the next is computed",
        **BESIDE,
        options=SMALL_BUCKETS,
        beside="all",
        points=2,
        stages=(*STAGES_TO_3, "offload"),
    ),
    "beside backward": Case(
        "reductions are under way while backward goes on",
        **BESIDE,
        options=(("bucket_mb", 0.001),),  # of several parameters, so that one travels while the next fills
        beside="backward",
        points=4,
        stages=("overlap",),
    ),
    "beside step": Case(
        "all-gathers are under way while the next shards are stepped",
        **BESIDE,
        options=SMALL_BUCKETS,
        beside="step",
        points=4,
        stages=("overlap",),
    ),
    "early": Case("nothing leaves before it is ready", options=SMALL_BUCKETS, lane="early", stages=EVERYWHERE),
    "foreign": Case(
        "gradients of another engine's backward wait for the step, and those of no engine's are refused",
        options=SMALL_BUCKETS,
        steps=1,
        foreign=True,
    ),
    "written": Case(
        "freed weights read as NaN, whatever was written to them", steps=2, written=True, stages=("stage3_param",)
    ),
    "in two": Case(
        "half of a shard stays on the device, and is stepped there",
        options=(("ratio", 0.5), *SMALL_BUCKETS),
        points=2,
        stages=("offload",),
    ),
    "delayed": Case(
        "a delayed update lands when the next step begins, and runs beside the forward before it",
        optimizer=ADAMW,
        options=(("delayed_update", True), *SMALL_BUCKETS),
        steps=4,
        lane="late",
        beside="all",
        points=2,
        stages=("offload",),
    ),
    "rounded": Case(
        "every number comes back to within half a step of its block",
        "numbers in blocks of 8",
        blocks=1,
        options=plus_plus("quantize_weights", "quantize_gradients"),
        steps=0,
        rounded=True,
        points=4,
        stages=("zeropp",),
    ),
    "second parts": Case(
        "the ranks of a node share a copy of the parameters, each with its own part",
        **ONE_BLOCK,
        options=plus_plus("hierarchical"),
        steps=0,
        **TWO_NODES,
    ),
    "two hops": Case(
        "gradients go inside the node and then across, and the means are the engine's",
        **ONE_BLOCK,
        options=plus_plus("quantize_gradients"),
        lane="early",
        points=4,
        **TWO_NODES,
    ),
    "second shards": Case(
        "after an update each node is filled once, and gathers by itself from then on",
        options=plus_plus("hierarchical"),
        backwards=2,
        points=2,
        **TWO_NODES,
    ),
    "three places": Case(
        "nodes of three ranks end with the engine's weights as well",
        **ONE_BLOCK,
        ranks=6,
        options=plus_plus("hierarchical", "quantize_gradients", ranks_per_node=3),
        points=2,
        stages=("zeropp",),
    ),
    "all three": Case(
        "with all switches, in bf16 and with clipping, the bits are the engine's",
        optimizer=ADAMW,
        options=plus_plus(
            *("quantize_weights", "hierarchical", "quantize_gradients"),
            **{"error_feedback": True, "precision": "bf16", "clip_norm": 0.1},
        ),
        backwards=2,
        points=2,
        **TWO_NODES,
    ),
    "hops beside": Case(
        "both hops are under way while the next is computed, and nothing is read before it has arrived",
        options=plus_plus("hierarchical", "quantize_gradients"),
        steps=2,
        lane="late",
        beside="backward",
        points=2,
        **TWO_NODES,
    ),
}
