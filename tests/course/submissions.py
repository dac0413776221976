"""What students hand in, by name: an engine with other lines in some methods, and the idea that its answer names."""

import ast
from dataclasses import dataclass, field

from common.ranks.world import LocalWorld
from course.exercises import ALL, EXERCISES
from course.parts import methods_of, place, waiting

TAKES = "self.take_room(bucket)"
SEALS = "bucket.seal()"
STEPS = "    self.step_shard(bucket)"
GATHERS = "    self.gather(bucket)"
SYNCS = "self.synchronize()"
TRAVELS = "self.travelling.append(bucket.handle)"
NO_ROOM = "if bucket.local is None:"
GONE = "bucket.local = None"
EACH = "for bucket in self.buckets:"
GATHERED = ["for bucket in [b for b in self.buckets if b.gathering]:"]
SHARD = "shard = bucket.parameters[bucket.shard(self.rank)]"
GATHER = "bucket.gathering = self.comm.all_gather(shard, bucket.parameters, bucket.name)"
REDUCE = "bucket.handle = self.comm.reduce_scatter(bucket.local, bucket.reduced, bucket.name)"
LEAVES = [GONE, TRAVELS]
FILLING = "    filling = sum(other.local is not None for other in self.buckets)"
WAITS = ["    while self.travelling and len(self.travelling) + filling > 1:", "        self.travelling.pop(0).wait()"]
ROOM = "    bucket.local = torch.empty(bucket.padded_numel, dtype=bucket.kind.dtype, device=self.comm.device)"
GROWS = "        bucket.full.untyped_storage().resize_(bucket.full.nbytes)"
FETCH = "        bucket.gathering = self.comm.all_gather(bucket.parameters, bucket.full, bucket.name)"
BEGUN = ["if not unit.gathered:", "    unit.gathered = True", "    for bucket in unit.buckets:"]
AT_ONCE = ["        bucket.gathering.wait()", "        for name, parameter in bucket.members.items():"]
AT_ONCE += ["            parameter.data = bucket.views[name]", "        bucket.gathering = None"]
OVER = ["unit.open = False", "self.free(unit)"]
REDUCES = "    self.reduce(unit)"
LAST = "if self.reducing and not self.turns.remains(unit):"


@dataclass(frozen=True)
class Submission:
    """A file of a student.

    Attributes:
        name: what is done.
        stage: 1, 2 or 3, or the name of a later exercise.
        idea: what the answer is about, a key of hints.toml; "" for a submission that passes.
        parts: {method: its lines}.
        head: what stands in the place of the class, if anything.
        typical: it runs by default, and the others of later exercises where all is tried.
    """

    name: str
    stage: int | str
    idea: str
    parts: dict = field(default_factory=dict)
    head: str = ""
    typical: bool = True

    def __str__(self):
        return f"{self.exercise.path.stem.replace('stage', 'stage ')}, {self.name}"

    @property
    def exercise(self):
        name = self.stage if isinstance(self.stage, str) else f"stage{self.stage}"
        return next(exercise for exercise in ALL if exercise.path.stem == name)

    def write(self, folder):
        """The file, in a folder."""
        file = folder / self.exercise.path.name
        if self.exercise in EXERCISES:
            file.write_text(self.head or changed(self.exercise.engine.read_text(), self.parts))
        else:
            file.write_text(self.head or filled(self.exercise, self.parts))
        return file


def changed(text, parts):
    """An engine's text with other lines in some methods."""
    lines = text.splitlines()
    methods = {node.name: node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)}
    for method, body in sorted(parts.items(), key=lambda part: -methods[part[0]].lineno):  # from below
        lines[methods[method].body[0].end_lineno : methods[method].end_lineno] = [f"        {line}" for line in body]
    return "\n".join(lines)


def filled(exercise, parts):
    """An engine's text with other lines in the place of some parts."""
    text = exercise.solution
    for method, body in parts.items():
        methods, lines = methods_of(text)
        part = next(part for part in exercise.parts if part.method == method)
        first, last = place(methods[method], part, lines)
        indent = " " * (len(lines[first]) - len(lines[first].lstrip()))
        lines[first:last] = [indent + line for line in body]
        text = "\n".join(lines) + "\n"
    return text


def of(stage, typically=True):
    """What makes a submission of this exercise: of a name, an idea, and the lines of some methods."""

    def made(name, idea, typical=typically, head="", **parts):
        return Submission(name, stage, idea, parts, head, typical)

    return made


one, two, three = of(1), of(2), of(3)
off, lap = of("offload", typically=False), of("overlap", typically=False)


def plus(name, idea, typical=False, **parts):
    """One of ZeRO++; `pack`, `values`, `second` and `reduce` are the parts."""
    methods = {
        "pack": "Blocks.pack",
        "values": "Blocks._values",
        "second": "SecondShards.second",
        "reduce": "TwoHops.reduce",
    }
    return Submission(name, "zeropp", idea, {methods[part]: body for part, body in parts.items()}, typical=typical)


def imports(package):
    return f"from {package}.engine import Engine\n"


BY_IMPORTLIB = 'import importlib\n\nEngine = importlib.import_module("stage2_grad").Engine\n'
BY_FIND = 'from common.engines import find_engine\n\nEngine = find_engine("stage3_param")\n'
BY_TEXT = 'from pathlib import Path\n\nexec(Path("stage1_os/engine.py").read_text())\n'
BY_PATH = "import importlib.util\n\nspec = importlib.util.spec_from_file_location('own', 'stage2_grad/engine.py')\n"
BY_PATH += "own = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(own)\nEngine = own.Engine\n"
ZEROPP = ALL[-2].solution
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
        reduce=[TAKES, SEALS, "while len(self.travelling) > 1:", "    self.travelling.pop(0).wait()", REDUCE, *LEAVES],
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
        update=[EACH, STEPS, EACH, GATHERS, SYNCS],
    ),
    one("a reduction that is waited for at once", "waited for at once", reduce=[SEALS, REDUCE, "bucket.handle.wait()"]),
    two(
        "a reduction that is waited for at once",
        "waited for at once",
        reduce=[TAKES, SEALS, REDUCE, "bucket.handle.wait()", *LEAVES],
    ),
    two("a synchronous all-gather", "waited for at once", gather=[SHARD, GATHER, "bucket.gathering.wait()"]),
    two(
        "room without a device",
        "elsewhere",
        take_room=[NO_ROOM, FILLING, *WAITS, ROOM.replace(", device=self.comm.device", "")],
    ),
    three("a gather that is waited for at once", "no prefetch", gather=[*BEGUN, GROWS, FETCH, *AT_ONCE]),
    three("prefetch that is dead", "no prefetch", prefetch=["return"]),
    three(
        "a reduction that is waited for at once",
        "waited for at once",
        end_backward=[*OVER, LAST, REDUCES, "    for bucket in unit.trainable:", "        bucket.handle.wait()"],
    ),
    three(
        "self.reducing left out", "foreign backward", end_backward=[*OVER, "if not self.turns.remains(unit):", REDUCES]
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
    two("a typo on self", "name", reduce=[TAKES, SEALS, REDUCE, GONE, "self.traveling.append(bucket.handle)"]),
    two("no room is taken", "nothing there", take_room=["return"]),
    two("room is given back before it leaves", "nothing there", reduce=[TAKES, SEALS, GONE, REDUCE, TRAVELS]),
    one("seal forgotten", "unused", reduce=[REDUCE]),
    two("seal forgotten", "padding", reduce=[TAKES, REDUCE, *LEAVES]),
    one("update calls engine.step()", "calls itself", update=["self.step()", SYNCS]),
    one("update calls the optimizer", "step_shard", update=["self.optimizer.step()", EACH, GATHERS, SYNCS]),
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
        reduce=[SEALS, "bucket.handle = self.comm.reduce_scatter(bucket.local, bucket.reduced[:-1], bucket.name)"],
    ),
    one(
        "no handle kept",
        "no handle",
        reduce=[SEALS, "self.comm.reduce_scatter(bucket.local, bucket.reduced, bucket.name)"],
    ),
    one("gathered before the step", "gathered too early", update=[EACH, GATHERS, STEPS, SYNCS]),
    one("nobody waits for the parameters", "not waited for", update=[EACH, STEPS, GATHERS]),
    one("never gathered", "not gathered", update=[EACH, STEPS]),
    one("nothing is stepped", "not stepped", update=[EACH, GATHERS, SYNCS]),
    one("stepped twice", "factor", update=[EACH, STEPS, STEPS, GATHERS, SYNCS]),
    one(
        "rank 0's shard is sent by all",
        "another shard",
        gather=["shard = bucket.parameters.chunk(self.world_size)[0].clone()", GATHER],
    ),
    one(
        "nothing is reduced",
        "not reduced",
        reduce=[
            SEALS,
            "mine = bucket.local[bucket.shard(self.rank)].clone()",
            REDUCE,
            "bucket.handle.wait()",
            "bucket.reduced.copy_(mine)",
        ],
    ),
    one(
        "an all-reduce",
        "half of an all-reduce",
        reduce=[SEALS, "bucket.handle = self.comm.all_reduce(bucket.local, bucket.name)"],
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
    two("room that does not wait", "two rooms", take_room=[NO_ROOM, ROOM]),
    two("room of fp32", "16-bit", take_room=[NO_ROOM, FILLING, *WAITS, ROOM.replace("dtype=bucket.kind.dtype, ", "")]),
    three("storage does not grow", "no memory", gather=[*BEGUN, FETCH]),
    three(
        "storage grows by elements",
        "no memory",
        gather=[*BEGUN, "        bucket.full.untyped_storage().resize_(bucket.full.numel())", FETCH],
    ),
    three("the unit is not marked", "not marked", gather=["for bucket in unit.buckets:", GROWS[4:], FETCH[4:]]),
    three("not freed after backward", "not freed", end_backward=["unit.open = False", LAST, REDUCES]),
    three("visits are not asked", "sent twice", end_backward=[*OVER, "if self.reducing:", REDUCES]),
)

# ---- the second half ------------------------------------------------------------------------------------------------


IN_TWO = "on_host, on_device = layout.cut_in_two(bucket.shard(self.rank), 1 - self.ratio)"
BOTH = 'shard = [(on_host, self.tier["cpu"]), (on_device, self.tier["device"])]'
SOME = "shard = [(part, tier) for part, tier in shard if length(part)]"
PLACED = 'return {"parameters": [(bucket.whole(), self.tier["device"])], "gradients": shard, "optimizer": shard}'
MEAN = "mean = bucket.local[bucket.shard(self.rank)]"
REDUCTION = "reduction = self.comm.reduce_scatter(bucket.local, mean, bucket.name)"
DOWN = "bucket.handle = self.bus.down(bucket, mean, after=reduction)"
STEPPING = "bucket.stepping = [self.step_piece(bucket, piece) for piece in bucket.pieces]"
ALL_STEPS = ["for step in steps:", "    step.wait()"]
RISES = "bucket.rising = self.bus.up(bucket)"

TOP = "top = part.abs().amax(dim=-1)"
TINY = "torch.finfo(torch.float32).tiny"
SCALE = f"scale = (top / self.largest).clamp_(min={TINY})"
OR_NAN = "scales.copy_(torch.where(top.isfinite(), scale, torch.nan))"
ROUNDED = "steps = (part / scale[..., None]).round_().clamp_(-self.largest, self.largest)"
PIECES = "pieces = bucket.local.view(nodes, places, shard).transpose(0, 1)"
MESSAGES = "messages, received = self._messages(bucket, places, nodes), self._messages(bucket, places, nodes)"
PACK = "self._pack(bucket, 0, scale, pieces, messages)"
INSIDE = "self.inside.all_to_all(messages.view(-1), received.view(-1), bucket.name)"
SUMS = "sums = self.comm.buffer(nodes, shard, dtype=torch.float32)"
ADD_UP = 'self.comm.work("add up", partial(self.blocks.add_up, received, sums))'
OUTGOING = "outgoing, incoming = self._messages(bucket, nodes), self._messages(bucket, nodes)"
AGAIN = "self._pack(bucket, 1, scale, sums, outgoing)"
ACROSS = "self.across.all_to_all(outgoing.view(-1), incoming.view(-1), bucket.name)"
FIRST_HOP = [MESSAGES, PACK, INSIDE]
SECOND_HOP = [SUMS, ADD_UP, OUTGOING, AGAIN, ACROSS]
AS_IT_LIES = PIECES.replace(".transpose(0, 1)", "")
NODES_FIRST = MESSAGES.replace("places, nodes", "nodes, places")
SWAPPED = [line.replace("nodes", "places") for line in SECOND_HOP]

ANY_ROOM = [NO_ROOM, ROOM]
BEGINS = [TAKES, SEALS, REDUCE, GONE]

SUBMISSIONS += (
    # ---- offload
    off(
        "the reduction writes elsewhere",
        "",
        reduce=["mean = torch.empty_like(bucket.local[bucket.shard(self.rank)])", REDUCTION, DOWN, *LEAVES],
    ),
    off(
        "everything on the device",
        "placement",
        True,
        placed=['shard = [(bucket.shard(self.rank), self.tier["device"])]', PLACED],
    ),
    off("the ratio is left out", "placement", placed=['shard = [(bucket.shard(self.rank), self.tier["cpu"])]', PLACED]),
    off(
        "the host's part is the last",
        "placement",
        placed=["on_device, on_host = layout.cut_in_two(bucket.shard(self.rank), self.ratio)", BOTH, SOME, PLACED],
    ),
    off(
        "gradients stay on the device",
        "placement",
        placed=[
            IN_TWO,
            BOTH,
            SOME,
            PLACED.replace('"gradients": shard', '"gradients": [(bucket.shard(self.rank), self.tier["device"])]'),
        ],
    ),
    off(
        "nothing goes down",
        "sent too little",
        reduce=[MEAN, "bucket.handle = self.comm.reduce_scatter(bucket.local, mean, bucket.name)", *LEAVES],
    ),
    off(
        "the whole gradient goes down",
        "another shard",
        reduce=[MEAN, REDUCTION, "bucket.handle = self.bus.down(bucket, bucket.local, after=reduction)", *LEAVES],
    ),
    off(
        "it goes down before it is reduced",
        "not waited for",
        True,
        reduce=[MEAN, REDUCTION, "bucket.handle = self.bus.down(bucket, mean, after=None)", *LEAVES],
    ),
    off(
        "the reduction is waited for at once",
        "waited for at once",
        reduce=[MEAN, REDUCTION, "reduction.wait()", DOWN, *LEAVES],
    ),
    off("room is kept", "room kept", reduce=[MEAN, REDUCTION, DOWN, TRAVELS]),
    off("nobody is told that a bucket travels", "two rooms", reduce=[MEAN, REDUCTION, DOWN, GONE]),
    off(
        "steps are waited for at once",
        "waited for at once",
        update=[EACH, "    " + STEPPING, "    for step in bucket.stepping:", "        step.wait()"],
    ),
    off("it comes up before it is stepped", "nothing there", bring_up=[RISES]),
    off("gathered before it has come up", "not waited for", gather=[SHARD, GATHER]),
    off("the copy up is not kept", "not waited for", bring_up=[*ALL_STEPS, "self.bus.up(bucket)"]),
    off(
        "a synchronous all-gather",
        "waited for at once",
        gather=[SHARD, GATHER.replace("name)", "name, after=bucket.rising)"), "bucket.gathering.wait()"],
    ),
    # ---- zeropp
    plus(
        "blocks by name",
        "",
        pack=[TOP, f"scale = torch.maximum(top / self.largest, top.new_tensor({TINY}))", OR_NAN, ROUNDED],
    ),
    plus("cut off, and not rounded", "bound", True, pack=[TOP, SCALE, OR_NAN, ROUNDED.replace("round_", "trunc_")]),
    plus(
        "one scale for all",
        "one scale",
        pack=[
            "top = part.abs().amax(dim=(-2, -1), keepdim=True)[..., 0].expand(part.shape[:-1])",
            SCALE,
            OR_NAN,
            ROUNDED,
        ],
    ),
    plus(
        "a scale for 2 to the bits",
        "bound",
        pack=[TOP, SCALE.replace("self.largest)", "(self.largest + 1))"), OR_NAN, ROUNDED],
    ),
    plus("a block of zeros divides by zero", "zeros", pack=[TOP, "scale = top / self.largest", OR_NAN, ROUNDED]),
    plus("an infinity becomes a number", "no NaN", pack=[TOP, SCALE, "scales.copy_(scale.nan_to_num())", ROUNDED]),
    plus("a scale is an infinity", "no NaN", True, pack=[TOP, SCALE, "scales.copy_(scale)", ROUNDED]),
    plus("what rounds past the largest number", "too large", True, values=["return steps.mul_(scales[..., None])"]),
    plus(
        "steps that stay in their range are not clamped",
        "",
        pack=[TOP, SCALE, OR_NAN, "steps = (part / scale[..., None]).round_()"],
    ),
    plus("scales are not written", "bound", pack=[TOP, SCALE, ROUNDED]),
    plus("codes come back as they are", "bound", values=["return steps.clamp_(-largest, largest)"]),
    plus(
        "every rank keeps the first part", "table", second=["return slice(0, bucket.padded_numel // self.inside.size)"]
    ),
    plus(
        "parts by the number in the world",
        "table",
        second=[
            "numel = bucket.padded_numel // self.inside.size",
            "return slice(self.comm.rank * numel, (self.comm.rank + 1) * numel)",
        ],
    ),
    plus("a shard of the world", "table", second=["return bucket.shard(self.comm.rank)"]),
    plus(
        "pieces in the order of the ranks",
        "pieces",
        True,
        reduce=["pieces = bucket.local.view(places, nodes, shard)", MESSAGES, PACK, INSIDE, *SECOND_HOP],
    ),
    plus(
        "nodes and places the wrong way round",
        "nodes and places",
        reduce=[PIECES.replace("nodes, places", "places, nodes"), NODES_FIRST, PACK, INSIDE, *SWAPPED],
    ),
    plus(
        "one hop",
        "one hop",
        reduce=[
            AS_IT_LIES,
            MESSAGES,
            PACK,
            INSIDE.replace("inside", "comm"),
            "received = received.view(-1, received.shape[-1])",
            "return self._mean(bucket, received, bucket.local, messages)",
        ],
    ),
    plus(
        "across first",
        "one hop",
        reduce=[
            *(AS_IT_LIES, NODES_FIRST, PACK, INSIDE.replace("inside", "across")),
            *(*SWAPPED[:-1], ACROSS.replace("across", "inside")),
        ],
    ),
    plus(
        "sums of the node are not added up on the lane",
        "reads nothing",
        reduce=[PIECES, *FIRST_HOP, SUMS, "self.blocks.add_up(received, sums)", *SECOND_HOP[2:]],
    ),
    plus(
        "the mean is taken twice",
        "divided twice",
        reduce=[
            *(PIECES, *FIRST_HOP, *SECOND_HOP[:2]),
            *('self.comm.work("mean", lambda: sums.div_(places))', *SECOND_HOP[2:]),
        ],
    ),
    *(
        Submission(name, "zeropp", "solution", head=f"{ZEROPP}\n{how}", typical=False)
        for name, how in (
            ("a class imported", "from zeropp.quantize import Blocks\n"),
            ("a class looked up", "import zeropp.transports\n\nTwoHops = zeropp.transports.TwoHops\n"),
            ("a page imported", "from zeropp.minimal import quantize\n"),
            (
                "a class loaded by its path",
                BY_PATH.replace("stage2_grad/engine", "zeropp/quantize").replace("Engine", "Blocks"),
            ),
        )
    ),
    plus("a hop is waited for", "waited for at once", reduce=[PIECES, MESSAGES, PACK, INSIDE + ".wait()", *SECOND_HOP]),
    # ---- overlap
    lap(
        "the older bucket is waited for before the next leaves",
        "",
        take_room=ANY_ROOM,
        reduce=[TAKES, SEALS, "while self.travelling:", "    self.travelling.pop(0).wait()", REDUCE, *LEAVES],
    ),
    lap("as it is given", "waited for at once", True, head=waiting(ALL[-1])),
    lap("waits are taken out, and nothing else", "two rooms", True, take_room=ANY_ROOM, reduce=BEGINS),
    lap(
        "room waits for all that travel",
        "waited for at once",
        take_room=[NO_ROOM, "    while self.travelling:", "        self.travelling.pop(0).wait()", ROOM],
    ),
    lap("nobody says that a bucket travels", "two rooms", reduce=BEGINS),
    lap(
        "reductions are hidden, and all-gathers are not", "waited for at once", gather=[SHARD, GATHER, "bucket.land()"]
    ),
    lap("stepped first, and then gathered", "waited for at once", update=[EACH, STEPS, EACH, GATHERS, SYNCS]),
    lap("nobody waits for the parameters", "not waited for", update=[EACH, STEPS, GATHERS]),
    lap("gathered before the step", "gathered too early", update=[EACH, GATHERS, STEPS, SYNCS]),
    lap(
        "the handle is thrown away",
        "no handle",
        reduce=[TAKES, SEALS, REDUCE.replace("bucket.handle = ", "handle = "), GONE, "self.travelling.append(handle)"],
    ),
)


def within(worlds):
    """`run` of ranks, as the grader takes it, within the grader's own limits."""
    return lambda ranks, *call, timeout: LocalWorld.run(worlds(ranks), *call, timeout=timeout)
