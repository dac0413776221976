"""Exercises: the stages' engines with their heart taken out, written anew from the engines.

    python -m common.course.exercises          write notebooks/exercises/stage1.py, stage2.py and stage3.py

A test compares what is there with what this writes, so that no exercise falls behind its engine.
"""

import argparse
import ast
import textwrap
from dataclasses import dataclass, replace
from pathlib import Path

from common.errors import InputError
from common.outputs import one_line_errors

ROOT = Path(__file__).parent.parent.parent
WIDTH = 116


@dataclass(frozen=True)
class Part:
    """What is taken out of an engine.

    Attributes:
        method: whose body it is.
        task: what to write, without saying how.
        begin: text of the first line that is taken out; "" for the whole body.
    """

    method: str
    task: str
    begin: str = ""


@dataclass(frozen=True)
class Exercise:
    """A stage's exercise.

    Attributes:
        package: of the engine.
        held, sent: what a rank keeps, and sends in a step.
        parts: in the order of the file.
        at_hand: {what there is: what it does}.
    """

    package: str
    held: str
    sent: str
    parts: tuple
    at_hand: dict

    @property
    def path(self):
        return ROOT / "notebooks" / "exercises" / f"{self.package.partition('_')[0]}.py"

    @property
    def engine(self):
        return ROOT / self.package / "engine.py"


BUCKETS = {
    "Owned(parameters=, gradients=, optimizer=)": "what `owned` returns: three slices of the bucket",
    "self.rank, self.world_size": "r and N",
    "bucket.whole()": "all elements of a bucket, a slice",
    "bucket.shard(rank)": "those of a rank's shard, a slice",
    "bucket.local": "[N x shard] this rank's own gradients, once they are in",
    "bucket.reduced": "[shard] where the mean of this rank's shard is expected",
    "bucket.seal()": "makes `local` ready to travel: zeros as padding, and where no gradient came",
    "bucket.handle": "the reduction under way, a Handle; None before. Yours to assign: others wait for it",
    "bucket.gathering": "the all-gather under way, a Handle; None if there is none. Yours to assign as well",
    "bucket.name": "what traces and messages call it: the `label` of a collective",
    "handle.wait()": "returns when the collective is done",
}
COLLECTIVES = {
    "self.comm.all_reduce(tensor, label)": "-> Handle; every rank gets the mean, in place",
    "self.comm.reduce_scatter(tensor, shard, label)": "-> Handle; the mean of this rank's part of `tensor`, in `shard`",
    "self.comm.all_gather(shard, tensor, label)": "-> Handle; all ranks' shards, in `tensor`",
}
STEP = {"self.step_shard(bucket)": "the optimizer's step over this rank's shard"}
OWNED = Part("owned", "What must a rank keep between steps, of each of the three, to step its shard?")

EXERCISES = (
    Exercise(
        "stage1_os",
        "(8 + 8/N) Ψ bytes",
        "2 (N-1)/N Ψ elements, as in stage 0",
        (
            OWNED,
            Part("reduce", "A rank steps its own shard. Of which gradients does it need the mean?"),
            Part("update", "Step, and hand on what is new. A bucket may travel while the next is stepped."),
            Part("gather", "A rank has new values of its own shard, and needs those of all."),
            Part("synchronize", "When it returns, anybody may read the parameters, and all are new."),
        ),
        {
            **BUCKETS,
            "bucket.parameters": "[N x shard] all parameters of the bucket; the model's are views of it",
            **COLLECTIVES,
            **STEP,
            "self.buckets": "in the order in which gradients fill them",
        },
    ),
    Exercise(
        "stage2_grad",
        "(4 + 12/N) Ψ bytes, and never more than two buckets of gradients on their way",
        "2 (N-1)/N Ψ elements, as in stage 0",
        (
            OWNED,
            Part(
                "take_room", "`bucket.local` gets a tensor, unless it has one. Two of them at most are alive at once."
            ),
            Part("reduce", "What is kept is the mean of a shard. What becomes of the room that held the whole?"),
        ),
        {
            **BUCKETS,
            "bucket.local is None": "it has no room: so it is before its first gradient, and again when it has left",
            "bucket.padded_numel": "elements of the whole bucket, padding included",
            "bucket.kind.dtype": "of its gradients",
            **COLLECTIVES,
            "self.comm.device": "where tensors live",
            "self.travelling": "a list, empty when backward begins: the handles of buckets that have left, the oldest "
            "first, until somebody has waited for them",
        },
    ),
    Exercise(
        "stage3_param",
        "16/N Ψ bytes, and a few units' parameters in use",
        "up to 3 (N-1)/N Ψ elements",
        (
            OWNED,
            Part("gather", "Room for the whole unit, and all shards on their way to it; nothing where that has begun."),
            Part("all_gather", "From where to where do a bucket's shards go?"),
            Part(
                "free",
                "What had all parameters gives its memory back, whoever else holds a view of it; the shard stays. "
                "A use outside the unit shall show.",
                "bucket.full.untyped_storage().resize_(0)",
            ),
            Part(
                "end_backward",
                "Its weights are not needed any more, and its gradients are there, if it will not run again.",
            ),
            Part("reduce_scatter", "Of which gradients is the mean kept, and where?"),
        ),
        {
            "bucket.parameters": "[shard] what this rank keeps",
            "bucket.full": "[N x shard] room for the whole bucket; its storage may shrink to nothing and grow again",
            "bucket.full.nbytes": "bytes of it, whatever its storage has",
            "bucket.views": "{name: the parameter as a view of `full`}",
            "bucket.nothing.views": "{name: NaN in the parameter's shape}",
            "bucket.nothing.restore()": "makes those NaN again, whatever was written there",
            "bucket.members": "{name: the model's parameter}",
            **BUCKETS,
            "unit.buckets, unit.gathered": "of a unit; whether it is gathered, or about to be",
            "self.turns.remains(unit)": "whether it ran more often in forward than backward has come to it",
            "unit.open": "its backward has begun and not ended",
            "self.reducing": "whether this backward communicates gradients",
            "self.reduce(unit)": "sends the gradients of a unit, by `reduce_scatter`",
            **COLLECTIVES,
        },
    ),
)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)  # there are none
    with one_line_errors():
        for exercise in EXERCISES:
            if exercise.engine.resolve() == exercise.path.resolve():
                raise InputError(
                    f"{exercise.package}/engine.py is what you write; an exercise as given is in the archive"
                )
            exercise.path.parent.mkdir(exist_ok=True)
            exercise.path.write_text(written(exercise))
            print(exercise.path.relative_to(ROOT))


def apart(exercises):
    """The same exercises with more parts: what an earlier one asks for stands in no later one either."""
    asked, found = [], []  # (the lines of a part, where it is asked for)
    for exercise in exercises:
        parts = {part.method: part for part in exercise.parts}
        methods, lines = _methods(exercise)
        for name, method in methods.items():
            body = bare(lines[slice(*_place(method, Part(name, ""), lines))])
            before = [where for text, where in asked if text in body]
            if name not in parts and before:
                parts[name] = Part(name, f"You have written this before, in {before[-1]}.")
        asked += [(text, f"`{name}` of {exercise.path.name}") for name, text in solutions(exercise).items()]
        found.append(replace(exercise, parts=tuple(parts[name] for name in methods if name in parts)))
    return found


def solutions(exercise):
    """What the engine has in the place of each part: {method: its lines, as `bare` gives them}."""
    methods, lines = _methods(exercise)
    return {part.method: bare(lines[slice(*_place(methods[part.method], part, lines))]) for part in exercise.parts}


def bare(lines):
    """Lines as one text without indentation and empty ones, so that it is found wherever it stands."""
    return "\n".join(line.strip() for line in lines if line.strip())


def _methods(exercise):
    """An engine's methods {name: node}, in the order of the file, and the file's lines."""
    lines = exercise.engine.read_text().splitlines()
    (engine,) = (node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef))
    return {node.name: node for node in engine.body if isinstance(node, ast.FunctionDef)}, lines


def written(exercise):
    """The text of an exercise."""
    methods, lines = _methods(exercise)
    tree = ast.parse("\n".join(lines))
    taken = 0
    for number, part in reversed(list(enumerate(exercise.parts, 1))):  # from below, so that line numbers stay
        first, last = _place(methods[part.method], part, lines)
        indent = " " * (len(lines[first]) - len(lines[first].lstrip()))
        of = sum(bool(line.strip()) for line in lines[first:last])
        task = f"PART {number} of {len(exercise.parts)}, {of} line{'s' * (of > 1)} here. {part.task}"
        comment = textwrap.wrap(task, WIDTH - len(indent), initial_indent="# ", subsequent_indent="# ")
        open_part = f'raise NotImplementedError("part {number}, {part.method}, is still open")'
        lines[first:last] = [indent + line for line in [*comment, open_part]]
        taken += of
    head = tree.body[0].end_lineno
    docstring = ast.get_docstring(tree)
    return "\n".join([f'"""{_task(exercise, taken)}\n\n{docstring}\n"""', *lines[head:], ""])


def _place(method, part, lines):
    """The lines that are taken out, as a slice's ends: what follows the docstring, or the part's first line."""
    first = method.body[0].end_lineno if ast.get_docstring(method) else method.body[0].lineno - 1
    if part.begin:
        first = next(n for n in range(first, method.end_lineno) if part.begin in lines[n])
    return first, method.end_lineno


def _task(exercise, taken):
    """What stands above the engine's own docstring."""
    wide = max(map(len, exercise.at_hand)) + 2
    at_hand = []
    for what, does in exercise.at_hand.items():
        at_hand += textwrap.wrap(
            does, WIDTH - 4, initial_indent=f"    {what:{wide}}", subsequent_indent=" " * (wide + 4)
        )
    return "\n".join(
        [
            f"Exercise. From {exercise.package}/engine.py {taken} lines are missing, in {len(exercise.parts)} parts.",
            "",
            "Write them all, and ask as often as you like; from then on the answers are about what is wrong:",
            "",
            f"    python -m common.grade {exercise.path.relative_to(ROOT)}",
            "",
            "What a rank may keep and send, with Adam in fp32, over N ranks and Ψ parameters:",
            "",
            f"    held    {exercise.held}",
            f"    sent    {exercise.sent}",
            "",
            "At hand:",
            "",
            *at_hand,
            "",
            "The rest stands as in the engine, and what it says of itself as well:",
        ]
    )


if __name__ == "__main__":
    main()
