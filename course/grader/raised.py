"""What a rank's traceback points at: the line of the submission, and the idea behind the error."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from course.grader.cases import CASES

FRAME = re.compile(r'^ +File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
ERROR = re.compile(r"^[\w.]+(?:Error|Exception|Exit|Interrupt|Imported).*", re.MULTILINE)

SAID = tomllib.loads(Path(__file__).with_name("grading.toml").read_text(encoding="utf-8"))["raised"]


@dataclass(frozen=True)
class Finding:
    """What is wrong."""

    idea: str  # a key of hints.toml
    where: str  # the smallest case that shows it, in sentences
    shared: bool = False  # it breaks the promise about bytes, which all cases share, and not its case's own


def gave_no_answer(said):
    """Whether the message of a RankFailed reports waiting ranks."""
    return "RanksParted" in said or re.search(r"gave no answer|[Tt]imed out", said) is not None


def raised(name, said, where, given=()):
    """The Finding behind the message of a RankFailed, in the case of this name, of the submission in a file.

    `given` has the names of its methods that are the engine's.
    """
    if "NotImplementedError: part" in said:
        return _open_parts(where)
    rank = re.match(r"rank (\d+)", said)
    of = f"On rank {rank[1]}" if rank else "On a rank"
    parted = re.search(r"RanksParted: (.+)", said)
    if parted:
        return Finding("hang", f"The ranks part: {parted[1]}.")
    if gave_no_answer(said):
        return Finding("endless", f"{said.splitlines()[0]}.".capitalize())
    if "died with exit code" in said:
        return Finding("died", f"{said.splitlines()[0]}.".capitalize())
    error = [said, *ERROR.findall(said)][-1].removeprefix("course.grader.submission.")
    inside = [frame for frame in FRAME.finditer(said) if frame["file"] == where and frame["function"] not in given]
    idea = _idea_of(error, name)
    if not inside:
        return Finding("outside" if idea in ("crash", "name", "call") else idea, f"{of}, in no line of yours: {error}")
    line = f"{of}, line {inside[-1]['line']} in {inside[-1]['function']}: {error}"
    at_import = inside[-1]["function"] == "<module>" and idea not in ("solution", "past the meter")
    return Finding("import" if at_import else idea, line)


def _open_parts(where):
    """The parts that are still to be written, in the order of the file."""
    still = re.findall(r'NotImplementedError\("part (\d+), ([\w.]+), is still open"\)', Path(where).read_text())
    named = [f"part {number}, {method}" for number, method in still]
    return Finding(f"open {still[0][1]}", f"Still open: {'; '.join(named)}.")


def _idea_of(error, name):
    idea = next((idea for said, idea in SAID.items() if re.search(said, error)), "crash")
    return idea if idea in ("import", "solution", "past the meter") else CASES[name].raises or idea
