"""`python -m lab.optimizers`: every optimizer of some libraries: stepped with plain torch's bits, or refused, and why.

Each trains a small model in stages 0 and 3; and in a plain loop, which keeps and steps everything on every rank, by the
mean of all ranks' gradients, added in their order. What the door of the engines refuses steps shards all the same in a
stage 3 without that door: so it shows what the refusal is worth. A library that is not installed is left out.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import time
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

import torch
from torch import nn

from common.engines import find_engine
from common.errors import InputError
from common.measure.hardware import hardware
from common.measure.tables import Table, say
from common.outputs import ROOT, asked, check_clone, one_line_errors, parser_of, publish
from common.ranks.world import LocalWorld, RankFailed
from stage3_param import Engine

RANKS, STEPS, BUCKET_MB = 2, 40, 0.01
WIDTH, HIDDEN = 64, 136  # of matrices with 8,704 elements: block formats leave small tensors as they are
STAGES, OPEN = ("stage0_ddp", "stage3_param"), "lab.optimizers:Open"
PLAIN = "interop.peers.plain:AverageAfterBackward"
ENDS = EQUAL, REFUSED, WRONG, FAILS, UNTRIED = "equal bits", "refused", "WRONG", "fails", "untried"
TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class Open(Engine):
    """Stage 3 without its door."""

    def check_optimizer(self, optimizer):
        return (0, 0), True, ""


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train, show and write the results."""
    parser = parser_of("lab.optimizers", __doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these optimizers, or libraries (default: all)")
    parser.add_argument("--limit-seconds", type=float, default=120.0, help="of a training (default: %(default)s)")
    options = asked(parser, arguments)
    check_clone("interop")
    results = survey(options.only, options.limit_seconds)
    publish(options, results, [table(results), causes(results)])


def survey(only=None, limit_seconds=120.0):
    """Train with every optimizer, or with those named, on one pair of ranks: the JSON of `lab.optimizers`."""
    wanted = [(of, name) for of in TOLD["libraries"] for name in classes(of) if not only or {of, name} & set(only)]
    if not wanted:
        raise InputError(f"--only {' '.join(only)}: no library that is installed has such an optimizer")
    rows, world = [], None
    for library, name in wanted:
        row, began = {"library": library, "optimizer": name}, time.perf_counter()
        for engine in (*STAGES, OPEN):
            if engine in STAGES or said_of(row).startswith(REFUSED):
                if world is None or not world.alive:
                    world = LocalWorld(RANKS, oversubscribe=True, log=os.devnull)
                row[engine] = verdict(world, library, name, engine, limit_seconds)
        rows.append(row | {"seconds": round(time.perf_counter() - began, 1)})
        say(f"{library} {name}: {said_of(row)}")
    world.close()
    known = {of for of, _ in wanted} & set(importlib.metadata.packages_distributions())
    return {
        "world_size": RANKS,
        "steps": STEPS,
        "hardware": hardware(torch.device("cpu")),
        "versions": {of: importlib.metadata.version(of) for of in sorted(known)},
        "rows": rows,
    }


def verdict(world, library, name, engine, limit_seconds):
    """How an optimizer fares in an engine. After a failure ranks may be out of step, so their world is closed."""
    try:
        of_ranks = world.run(fares, library, name, engine, timeout=limit_seconds)
    except RankFailed as failure:
        return f"{UNTRIED}: {str(failure).splitlines()[-1]}"
    if any(said.startswith(FAILS) for said in of_ranks):
        world.close()
    return " / ".join(dict.fromkeys(of_ranks))


def fares(world, library, name, engine):
    """On a rank: one of ENDS, and why."""
    try:
        found = trained(world, library, name, engine)
    except InputError as error:
        return f"{REFUSED}: {error}"
    except Exception as error:
        return f"{FAILS}: {type(error).__name__}: {error}"
    try:
        expected = trained(world, library, name, PLAIN)
    except Exception as error:
        return f"{UNTRIED}: plain torch fails: {type(error).__name__}: {error}"
    if not all(value.isfinite().all() for value in expected.values()):
        return f"{UNTRIED}: plain torch's weights are not finite"
    off = max((found[name] - value).abs().max().item() for name, value in expected.items())
    return EQUAL if off == 0.0 else f"{WRONG}: off by {off:.1g}"


def trained(world, library, name, engine):
    """The weights of a small model after some steps."""
    torch.manual_seed(0)
    blocks = [(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2)]
    model = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
    key = TOLD["matrices"].get(name)
    groups = grouped(model.parameters(), key) if key == "whole" else None

    def make(parameters):
        options = TOLD["arguments"].get(library, {}).get(name, {})
        optimizer = classes(library)[name](grouped(parameters, key) if key == "use_muon" else parameters, **options)
        if hasattr(optimizer, "train"):  # schedule-free: it has other weights to evaluate
            optimizer.train()
        return optimizer

    made = find_engine(engine)(model, make, param_groups=groups, bucket_mb=BUCKET_MB)
    for step in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(RANKS * step + world.rank))
        made.backward((made(x) - x.flip(1)).square().sum(1).mean() / 8)
        torch.manual_seed(step)  # some optimizers draw
        made.step()
    return made.full_state_dict()


def grouped(parameters, key):
    """Groups of matrices, with this key, and of the rest; from parameters or groups of them."""
    held = [p for of in parameters for p in (of["params"] if isinstance(of, dict) else [of])]
    parts = {True: [p for p in held if p.ndim == 2], False: [p for p in held if p.ndim != 2]}
    return [{"params": part, key: matrices} for matrices, part in parts.items() if part]


def classes(library):
    """The optimizers of a library, or of a page's code: {name: class}; none if it is not installed."""
    module, _, attribute = TOLD["libraries"][library].partition(":")
    if module.endswith(".md"):
        code = re.search(r"```python\n(import torch\n+class .*?)```", (ROOT / module).read_text(), re.DOTALL)[1]
        exec(compile(code, module, "exec"), found := {})
    elif importlib.util.find_spec(module.partition(".")[0]) is None:
        return {}
    else:
        found = vars(importlib.import_module(module))
    kinds = {name: kind for name, kind in sorted(found.get(attribute, found).items()) if isinstance(kind, type)}
    base = torch.optim.Optimizer
    return {name: kind for name, kind in kinds.items() if issubclass(kind, base) and kind is not base}


def cause(said):
    """What a refusal, or another verdict, is called in the table."""
    return next((called for words, called in TOLD["causes"].items() if words in said), said)


def said_of(row):
    """The stages' verdict: the worse of the two."""
    return next((row[stage] for stage in STAGES if row[stage] != EQUAL), EQUAL)


def table(results):
    """A row for each library: how many of its optimizers fare how."""
    counts = defaultdict(Counter)
    for row in results["rows"]:
        counts[row["library"]][said_of(row).partition(":")[0]] += 1
    rows = []
    for of, ends in counts.items():
        numbers = [ends.total(), *(ends[end] for end in ENDS)]
        rows.append((f"{of} {results['versions'].get(of, '')}", *(str(number or "-") for number in numbers)))
    title = f"{results['world_size']} ranks, {results['steps']} steps in fp32, in stages 0 and 3"
    return Table(title, ("", "optimizers", *ENDS), rows, note=results["hardware"])


def causes(results):
    """A row for each cause: who is refused for it, and how these step shards without the door."""
    found = defaultdict(list)
    for row in results["rows"]:
        if (said := said_of(row)) != EQUAL:
            found[cause(said)].append(row)
    rows = []
    for why, refused in sorted(found.items(), key=lambda pair: -len(pair[1])):
        ends = Counter(row.get(OPEN, UNTRIED).partition(":")[0] for row in refused)
        by = defaultdict(list)
        for row in refused:
            by[row["library"]].append(row["optimizer"])
        who = "; ".join(f"{library}: {', '.join(names)}" for library, names in by.items())
        rows.append((why, str(len(refused)), ", ".join(f"{n} {end}" for end, n in ends.most_common()), who))
    return Table("", ("refused as it", "", "without the door", "which"), rows, words=(0, 2, 3))


if __name__ == "__main__":
    main()
