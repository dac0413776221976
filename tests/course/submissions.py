"""What students hand in, by name: an engine with other lines in some methods, and the idea that its answer names."""

import ast
from dataclasses import dataclass, field

from common.course.exercises import EXERCISES
from common.ranks.world import LocalWorld

EACH = "for bucket in self.buckets:"
GATHERED = ["for bucket in [b for b in self.buckets if b.gathering]:"]
SHARD = "shard = bucket.parameters[bucket.shard(self.rank)]"
GATHER = "bucket.gathering = self.comm.all_gather(shard, bucket.parameters, bucket.name)"
REDUCE = "bucket.handle = self.comm.reduce_scatter(bucket.local, bucket.reduced, bucket.name)"
LEAVES = ["bucket.local = None", "self.travelling.append(bucket.handle)"]
FILLING = "    filling = sum(other.local is not None for other in self.buckets)"
WAITS = ["    while self.travelling and len(self.travelling) + filling > 1:", "        self.travelling.pop(0).wait()"]
ROOM = "    bucket.local = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)"
GROWS = "        bucket.full.untyped_storage().resize_(bucket.full.nbytes)"
FETCH = "        bucket.gathering = self.comm.all_gather(bucket.parameters, bucket.full, bucket.name)"
BEGUN = ["if not unit.gathered:", "    unit.gathered = True", "    for bucket in unit.buckets:"]
AT_ONCE = ["        bucket.gathering.wait()", "        for name, parameter in bucket.members.items():"]
AT_ONCE += ["            parameter.data = bucket.views[name]", "        bucket.gathering = None"]
OVER = ["unit.open = False", "self.free(unit)"]
LAST = "if self.reducing and not self.turns.remains(unit):"


@dataclass(frozen=True)
class Submission:
    """A file of a student.

    Attributes:
        name: what is done.
        stage: 1, 2 or 3.
        idea: what the answer is about, a key of `hints.HINTS`; "" for a submission that passes.
        parts: {method: its lines}.
        head: what stands in the place of the class, if anything.
    """

    name: str
    stage: int
    idea: str
    parts: dict = field(default_factory=dict)
    head: str = ""

    def __str__(self):
        return f"stage {self.stage}, {self.name}"

    def write(self, folder):
        """The file, in a folder."""
        exercise = EXERCISES[self.stage - 1]
        file = folder / exercise.path.name
        file.write_text(self.head or changed(exercise.engine.read_text(), self.parts))
        return file


def changed(text, parts):
    """An engine's text with other lines in some methods."""
    lines = text.splitlines()
    methods = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    for method, body in sorted(parts.items(), key=lambda part: -methods[part[0]].lineno):  # from below
        lines[methods[method].body[0].end_lineno : methods[method].end_lineno] = [f"        {line}" for line in body]
    return "\n".join(lines)


def one(name, idea, head="", **parts):
    return Submission(name, 1, idea, parts, head)


def two(name, idea, head="", **parts):
    return Submission(name, 2, idea, parts, head)


def three(name, idea, head="", **parts):
    return Submission(name, 3, idea, parts, head)


def imports(package):
    return f"from {package}.engine import Engine\n"


BY_IMPORTLIB = 'import importlib\n\nEngine = importlib.import_module("stage2_grad").Engine\n'
BY_FIND = 'from common.train import find_engine\n\nEngine = find_engine("stage3_param")\n'
BY_TEXT = 'from pathlib import Path\n\nexec(Path("stage1_os/engine.py").read_text())\n'
BY_PATH = "import importlib.util\n\nspec = importlib.util.spec_from_file_location('own', 'stage2_grad/engine.py')\n"
BY_PATH += "own = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(own)\nEngine = own.Engine\n"
INHERITED = "import stage3_param\n\n\nclass Engine(stage3_param.Engine):\n    pass\n"

SUBMISSIONS = (
    # ---- right, in other words
    one(
        "all shards at once, by a list",
        "",
        synchronize=[*GATHERED, "    bucket.gathering.wait()", "    bucket.gathering = None"],
    ),
    one("a shard by view", "", gather=["shard = bucket.parameters.view(self.world_size, -1)[self.rank]", GATHER]),
    two(
        "the older bucket is waited for before the next leaves",
        "",
        reduce=[
            "self.take_room(bucket)",
            "bucket.seal()",
            "while len(self.travelling) > 1:",
            "    self.travelling.pop(0).wait()",
            REDUCE,
            *LEAVES,
        ],
    ),
    three(
        "buckets are freed by name",
        "",
        end_backward=[
            *OVER,
            "if not self.turns.remains(unit) and self.reducing:",
            "    for bucket in unit.trainable:",
            "        if bucket.handle is None:",
            "            self.reduce_bucket(bucket)",
        ],
    ),
    # ---- passed once, and wrong
    one("knows 2 ranks only", "two ranks only", gather=["shard = bucket.parameters.chunk(2)[self.rank]", GATHER]),
    one(
        "a table for 2 ranks",
        "two ranks only",
        owned=[
            "everything, half = bucket.whole(), bucket.padded_numel // 2",
            "shard = slice(self.rank * half, (self.rank + 1) * half)",
            "return Owned(parameters=everything, gradients=everything, optimizer=shard)",
        ],
    ),
    one(
        "a synchronous all-gather",
        "waited for at once",
        gather=[SHARD, "self.comm.all_gather(shard, bucket.parameters, bucket.name).wait()"],
    ),
    one(
        "all shards are stepped before any is gathered",
        "waited for at once",
        update=[EACH, "    self.step_shard(bucket)", EACH, "    self.gather(bucket)", "self.synchronize()"],
    ),
    one(
        "a reduction that is waited for at once",
        "waited for at once",
        reduce=["bucket.seal()", REDUCE, "bucket.handle.wait()"],
    ),
    two(
        "a reduction that is waited for at once",
        "waited for at once",
        reduce=["self.take_room(bucket)", "bucket.seal()", REDUCE, "bucket.handle.wait()", *LEAVES],
    ),
    two("a synchronous all-gather", "waited for at once", gather=[SHARD, GATHER, "bucket.gathering.wait()"]),
    two(
        "room without a device",
        "elsewhere",
        take_room=[
            "if bucket.local is None:",
            FILLING,
            *WAITS,
            "    bucket.local = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype)",
        ],
    ),
    three("a gather that is waited for at once", "no prefetch", gather=[*BEGUN, GROWS, FETCH, *AT_ONCE]),
    three("prefetch that is dead", "no prefetch", prefetch=["return"]),
    three(
        "a reduction that is waited for at once",
        "waited for at once",
        end_backward=[
            *OVER,
            LAST,
            "    self.reduce(unit)",
            "    for bucket in unit.trainable:",
            "        bucket.handle.wait()",
        ],
    ),
    three(
        "self.reducing left out",
        "foreign backward",
        end_backward=[*OVER, "if not self.turns.remains(unit):", "    self.reduce(unit)"],
    ),
    one("a solution imported", "solution", head=imports("stage1_os")),
    two("a solution imported by importlib", "solution", head=BY_IMPORTLIB),
    three("a solution looked up", "solution", head=BY_FIND),
    one("a solution executed", "solution", head=BY_TEXT),
    two("a solution loaded by its path", "solution", head=BY_PATH),
    three("a solution inherited", "solution", head=INHERITED),
    three(
        "a method borrowed while it runs",
        "solution",
        free=["from stage3_param import Engine as Right", "Right.free(self, unit)"],
    ),
    # ---- words
    one("a typo in a method", "name", reduce=["bucket.seel()", REDUCE]),
    one("a name that is nowhere", "name", gather=[GATHER]),
    two(
        "a typo on self",
        "name",
        reduce=[
            "self.take_room(bucket)",
            "bucket.seal()",
            REDUCE,
            "bucket.local = None",
            "self.traveling.append(bucket.handle)",
        ],
    ),
    two("no room is taken", "nothing there", take_room=["return"]),
    two(
        "room is given back before it leaves",
        "nothing there",
        reduce=[
            "self.take_room(bucket)",
            "bucket.seal()",
            "bucket.local = None",
            REDUCE,
            "self.travelling.append(bucket.handle)",
        ],
    ),
    one("seal forgotten", "unused", reduce=[REDUCE]),
    two("seal forgotten", "padding", reduce=["self.take_room(bucket)", REDUCE, *LEAVES]),
    one("update calls engine.step()", "calls itself", update=["self.step()", "self.synchronize()"]),
    one(
        "update calls the optimizer",
        "step_shard",
        update=["self.optimizer.step()", EACH, "    self.gather(bucket)", "self.synchronize()"],
    ),
    one(
        "the notebook's all_gather",
        "past the meter",
        gather=[
            "import torch.distributed as dist",
            SHARD,
            "parts = list(bucket.parameters.chunk(self.world_size))",
            "dist.all_gather(parts, shard)",
        ],
    ),
    one(
        "arguments the wrong way round",
        "lengths",
        gather=[SHARD, "bucket.gathering = self.comm.all_gather(bucket.parameters, shard, bucket.name)"],
    ),
    one("too few arguments", "call", gather=["bucket.gathering = self.comm.all_gather(bucket.parameters)"]),
    one(
        "a shard of the wrong length",
        "lengths",
        reduce=[
            "bucket.seal()",
            "bucket.handle = self.comm.reduce_scatter(bucket.local, bucket.reduced[:-1], bucket.name)",
        ],
    ),
    one(
        "no handle kept",
        "no handle",
        reduce=["bucket.seal()", "self.comm.reduce_scatter(bucket.local, bucket.reduced, bucket.name)"],
    ),
    one(
        "gathered before the step",
        "gathered too early",
        update=[EACH, "    self.gather(bucket)", "    self.step_shard(bucket)", "self.synchronize()"],
    ),
    one(
        "nobody waits for the parameters",
        "not waited for",
        update=[EACH, "    self.step_shard(bucket)", "    self.gather(bucket)"],
    ),
    one("never gathered", "not gathered", update=[EACH, "    self.step_shard(bucket)"]),
    one("nothing is stepped", "not stepped", update=[EACH, "    self.gather(bucket)", "self.synchronize()"]),
    one(
        "stepped twice",
        "factor",
        update=[
            EACH,
            "    self.step_shard(bucket)",
            "    self.step_shard(bucket)",
            "    self.gather(bucket)",
            "self.synchronize()",
        ],
    ),
    one(
        "rank 0's shard is sent by all",
        "another shard",
        gather=["shard = bucket.parameters.chunk(self.world_size)[0].clone()", GATHER],
    ),
    one(
        "nothing is reduced",
        "not reduced",
        reduce=[
            "bucket.seal()",
            "mine = bucket.local[bucket.shard(self.rank)].clone()",
            REDUCE,
            "bucket.handle.wait()",
            "bucket.reduced.copy_(mine)",
        ],
    ),
    one(
        "an all-reduce",
        "half of an all-reduce",
        reduce=["bucket.seal()", "bucket.handle = self.comm.all_reduce(bucket.local, bucket.name)"],
    ),
    one(
        "everything is kept",
        "table",
        owned=[
            "everything = bucket.whole()",
            "return Owned(parameters=everything, gradients=everything, optimizer=everything)",
        ],
    ),
    two(
        "the whole gradient is kept",
        "table",
        owned=[
            "everything, shard = bucket.whole(), bucket.shard(self.rank)",
            "return Owned(parameters=everything, gradients=everything, optimizer=shard)",
        ],
    ),
    two("room that does not wait", "two rooms", take_room=["if bucket.local is None:", ROOM]),
    two(
        "room of fp32",
        "16-bit",
        take_room=[
            "if bucket.local is None:",
            FILLING,
            *WAITS,
            "    bucket.local = torch.empty(bucket.padded_numel, device=self.comm.device)",
        ],
    ),
    three("storage does not grow", "no memory", gather=[*BEGUN, FETCH]),
    three(
        "storage grows by elements",
        "no memory",
        gather=[*BEGUN, "        bucket.full.untyped_storage().resize_(bucket.full.numel())", FETCH],
    ),
    three("the unit is not marked", "not marked", gather=["for bucket in unit.buckets:", GROWS[4:], FETCH[4:]]),
    three(
        "not freed after backward",
        "not freed",
        end_backward=["unit.open = False", LAST, "    self.reduce(unit)"],
    ),
    three(
        "visits are not asked",
        "sent twice",
        end_backward=[*OVER, "if self.reducing:", "    self.reduce(unit)"],
    ),
)


def within(worlds):
    """`run` of ranks, as the grader takes it, within the grader's own limits."""
    return lambda ranks, *call, timeout: LocalWorld.run(worlds(ranks), *call, timeout=timeout)
