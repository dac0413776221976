r"""`python -m interop.diagnose train.py:train`: where your function diverges from plain data parallelism, and why.

    python -m interop.diagnose train.py:train --nproc 2 --steps 10
    python -m interop.diagnose train.py:train --engines stage3_param,my_package:MyEngine
    python -m interop.diagnose train.py:train --against my_package:MyEngine --engines my_package:AnotherEngine

The function takes an engine's class and trains with it: `def train(Engine): engine = Engine(model, optimizer) ...`. It
is run under torch's DDP and under each engine, and each run is compared with plain DDP: whole models, whose gradients
are averaged after backward, in rank order. The table shows the first step in which more differs than rounding explains,
the first rank, the parameter that is off by most, by how much of that step, and what it looks like.
It exits with status 1 if an engine diverges.
"""

import ast
import contextlib
import re
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from common.engines import ENGINES, find_engine
from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table
from common.outputs import asked, check_counts, one_line_errors, parser_of, tell
from common.ranks.world import LocalWorld, RankFailed, check_size
from common.train import default_nproc
from interop.diagnose import causes
from interop.diagnose.comparing import Comparison
from interop.diagnose.notes import SAID, notes
from interop.diagnose.recording import in_one_line, record
from interop.diagnose.suspects import SUSPECTS
from interop.peers import TorchDDP
from interop.peers.plain import PlainDDP, PlainOtherwise

DDP = "torch_ddp"
PLAIN = "plain"
NAMED = {DDP: TorchDDP, PLAIN: PlainDDP}


def main(arguments=None):
    """Parse the arguments, run all, show and write the results; exit with 1 if an engine diverges."""
    parser = parser_of("interop.diagnose", __doc__)
    parser.add_argument("target", metavar="FILE:FUNCTION", help="train.py:train")
    parser.add_argument("--nproc", type=int, default=default_nproc(), help="local ranks (default: %(default)s)")
    parser.add_argument("--oversubscribe", action="store_true", help="allow more ranks than there are GPUs or CPUs")
    parser.add_argument(
        "--engines", default=",".join((DDP, *ENGINES)), help="comma-separated (default: torch_ddp, and all)"
    )
    parser.add_argument("--against", default=PLAIN, metavar="ENGINE", help="compare with this one instead of DDP")
    parser.add_argument("--steps", type=int, default=5, help="steps, after which the function is ended (%(default)s)")
    parser.add_argument("--timeout", type=int, default=120, help="seconds that a rank waits for others (%(default)s)")
    with one_line_errors():
        options = asked(parser, arguments)
        check_counts(options, "steps", "timeout")
        check_size(options.nproc, options.oversubscribe)
        names = options.engines.split(",")
        check(options.target, [options.against, *names])
        with contextlib.ExitStack() as worlds:

            def open_world():
                ranks = LocalWorld(options.nproc, oversubscribe=options.oversubscribe, timeout=options.timeout)
                return worlds.enter_context(ranks)

            results = diagnose(options.target, names, options.steps, open_world, options.against)
    tell(options, results, table)
    if any((row["step"] is not None and not row["quantizes"]) or row["failed"] for row in results["rows"]):
        sys.exit(1)


def check(target, names):
    """Refuse a missing file, function or engine before any rank is started."""
    file, _, function = target.rpartition(":")
    if not file.endswith(".py") or not function.isidentifier():
        raise InputError(f"{target}: name a file and a function in it, such as train.py:train")
    if not Path(file).is_file():
        raise InputError(f"{file}: there is no such file")
    try:
        ast.parse(Path(file).read_text(), file)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not Python: {error}") from error
    for name in names:
        engine_of(name)


def engine_of(name):
    """An engine's class, by name; an InputError if there is none."""
    return NAMED.get(name) or find_engine(name)


def diagnose(target, names, steps, open_world, against=PLAIN):
    """Run the function of "train.py:train" under the engines of these names, and compare so many steps.

    `open_world` opens a LocalWorld, again if a failure closed it. `against` names the engine that others are compared
    with. Returns the JSON: a row for each engine, and notes. An InputError says what the function needs.
    """
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(target, steps, open_world, folder)
        plain = runs.right(PlainDDP)
        runs.check_reproducible(plain)
        runs.every_parameter = not any(unused for rank in plain for unused in rank["unused"])
        rounded = runs.right(PlainOtherwise)
        reference = plain if against == PLAIN else runs.right(engine_of(against))
        compared = Comparison(folder, reference, plain, rounded)
        rows, parted = [], {}
        for name in names:
            row, found = found_of(name, runs, compared)
            rows.append(row)
            if found is not None:
                parted[name] = (row, *found)
        suspect(parted, runs, compared)
        size = len(plain)
        results = {"target": target, "world_size": size, "steps": len(reference[0]["steps"]) - 1, "against": against}
        results |= {"hardware": hardware(runs.device), "precision": compared.precision, "rows": rows}
        return {**results, "notes": notes(plain, rows)}


class Runs:
    """Runs of one function, in ranks that outlive each run."""

    every_parameter = True

    def __init__(self, target, steps, open_world, folder):
        self.target, self.steps, self.folder = target, steps, folder
        self.open_world, self.world = open_world, open_world()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def __call__(self, made, steps=None, **how):
        """A run with an engine: [rank] of what `record` returns."""
        if not self.world.alive:
            self.world = self.open_world()
        how = {"every_parameter": self.every_parameter, **how}
        return self.world.run(partial(record, **how), self.target, made, steps or self.steps, self.folder)

    def right(self, made, **how):
        """A run that others are compared with; an InputError if it fails."""
        try:
            return self(made, **how)
        except RankFailed as failure:
            raise InputError(f"{self.target} fails under {made.__name__}: {self.told(failure)}") from failure

    def told(self, failure):
        """A failure in one line, by the user's own lines."""
        said = in_one_line(failure, self.target.rpartition(":")[0])
        return "; ".join([said, *(why for words, why in SAID["failures"].items() if re.search(words, said))])

    def check_reproducible(self, before):
        """Run it under plain DDP once more; an InputError if it does not compute the same."""
        where = first_difference(before, self.right(PlainDDP))
        if where is None:
            return
        seeded = [self.right(PlainDDP, seeded=True) for _ in range(2)]
        why = SAID["unseeded" if first_difference(*seeded) is None else "irreproducible"]
        raise InputError(f"{self.target} is not reproducible: run twice under plain DDP, {where}; {why}")


def first_difference(one, other):
    """Where two runs differ, in words; None if nowhere."""
    for step, _ in enumerate(zip(one[0]["steps"], other[0]["steps"], strict=False)):
        for rank, pair in enumerate(zip(one, other, strict=True)):
            first, second = (side["steps"][step] for side in pair)
            for what in ("losses", "norm", "skipped", "weights"):
                if first[what] != second[what]:
                    when = f"step {step} differs in its {what}" if step else "it begins with other weights"
                    return f"{when} on rank {rank}"
    lengths = [len(side[0]["steps"]) - 1 for side in (one, other)]
    return None if lengths[0] == lengths[1] else f"it makes {lengths[0]} steps or {lengths[1]}"


def found_of(name, runs, compared):
    """Run the function with an engine.

    Returns:
        Its row; and, if it diverges from a cause still to be named, (recording, step, found).
    """
    made = engine_of(name)
    row = {"engine": name, "step": None, "rank": None, "what": None, "parameter": None}
    row |= {"share_of_step": None, "loss": None, "failed": False, "quantizes": getattr(made, "quantizes", False)}
    try:
        other = runs(made, reads=False)
        equal, step, found = compared.parts(other)
        losses = [loss for rank in other for loss in rank["steps"][-1]["losses"]]
        row["not_taken"] = other[0]["not_taken"]
        row["loss"] = sum(losses) / len(losses) if losses else None  # of the last step
        if equal:
            return {**row, "looks_like": causes.EQUAL}, None
        read = runs(made)
    except InputError as error:
        return {**row, "failed": True, "looks_like": f"refuses: {error}"}, None
    except RankFailed as failure:
        return {**row, "failed": True, "looks_like": f"fails: {runs.told(failure)}"}, None
    stale, (_, step, found) = (step, found), compared.parts(read)
    if step is None and stale[0] is not None:
        step, (off, *_) = stale
        return {**row, "step": step, "rank": off.rank, "what": off.what, "looks_like": causes.STALE}, None
    if step is None:
        return {**row, "looks_like": causes.ROUNDING}, None
    begins = next(off for off in found if off.excess > 1)
    found = [begins, *(off for off in found if off is not begins)]
    weights = [off for off in found if off.what == "weights"]
    worst = max(weights, key=lambda off: (off.excess, -off.rank), default=None)
    row |= {"step": step, "rank": begins.rank, "what": begins.what}
    if worst is not None:
        row |= {"parameter": worst.name, "share_of_step": compared.share(read, step, worst.rank, worst.name)}
    row["looks_like"] = next(causes.seen(compared, read, step, found), None)
    return row, None if row["looks_like"] else (read, step, found)


def suspect(parted, runs, compared):
    """Name the remaining causes: run one suspect after the other, until each engine follows one.

    `parted` is {engine: (its row, recording, step, found)}; the rows get their "looks_like".
    """
    nameless = dict(parted)
    for made in SUSPECTS:
        if not nameless:
            return
        try:
            theirs = runs(made, steps=max(step for _, _, step, _ in nameless.values()))
        except (RankFailed, InputError):
            continue
        for name, (row, other, step, found) in list(nameless.items()):
            if causes.alike(compared, other, theirs, step, found):
                row["looks_like"] = f"as if {made.__doc__}"
                del nameless[name]
    for row, other, step, found in nameless.values():
        row["looks_like"] = causes.left(compared, other, step, found)


def table(results):
    """The rows for people, and the notes below."""
    cells = []
    for row in results["rows"]:
        step, rank = ("" if row[name] is None else str(row[name]) for name in ("step", "rank"))
        share = "" if row["share_of_step"] is None else f"{row['share_of_step']:.2g}"
        cells.append((row["engine"], step, rank, row["parameter"] or row["what"] or "", share, row["looks_like"]))
    title = (
        f"{results['target']} on {results['world_size']} ranks, {results['steps']} steps, {results['precision']}, "
        f"against {'plain DDP' if results['against'] == PLAIN else results['against']}\n{results['hardware']}"
    )
    below = "\n".join(f"Note: {note}." for note in results["notes"])
    head = ("engine", "step", "rank", "most in", "of the step", "looks like")
    return Table(title, head, cells, words=(0, 3, 5), caption=below, note=below)


if __name__ == "__main__":
    main()
