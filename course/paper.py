"""Pencil and paper: bytes at three moments, when links bound a step, the best split of a machine.

    python -m course.paper my_sheet.toml --seed 7      write a sheet of your own, whose numbers the seed draws
    python -m course.paper my_sheet.toml               check the answers that you have written into it

The engine, on tensors without values, and the planner compute the right answers. So a file's answers are right for its
seed alone. The exit status is 0 if all of them are right, 1 if one is wrong or left open.
"""

import functools
import random
import sys
import textwrap
import tomllib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from common import models
from common.engine.accounting import STATES
from common.engines import STAGES, find_engine
from common.errors import InputError
from common.measure.memory import Timeline
from common.models.gpt import GPT, GPTConfig
from common.outputs import one_line_errors, parser_of, write_text
from course.pages.answers import hints_of, is_number, judge
from course.pages.scaling import ways
from lab.plan.__main__ import ADVISED, USABLE
from lab.plan.formulas import SWITCHES, WAYS
from lab.plan.shapes import of_size
from lab.simulate.hardware import PRESETS
from lab.simulate.world import Setting, batch_of, engine_of, simulated_world

OPEN = "?"
DRAWN = ("a100-80g", "h100-80g", "h200-141g", "v100-32g")  # presets
TEXTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Question:
    """A question of a sheet."""

    name: str  # the key in the file
    ask: str
    right: float | str  # a number, or one of `names`
    hints: list  # [(a wrong answer, what to think of)]
    names: tuple  # to choose from; () if the answer is a number


def main(arguments=None):
    """Write a sheet, or check one."""
    parser = parser_of("course.paper", __doc__)
    parser.add_argument("file", help="the sheet")
    parser.add_argument("--seed", type=int, help="write a new sheet there, with the numbers of this seed")
    options = parser.parse_args(arguments)
    with one_line_errors():
        if options.seed is not None:
            if Path(options.file).exists():
                raise InputError(f"{options.file} is there already, perhaps with answers; name another file")
            write_text(options.file, sheet(options.seed, options.file))
            return
        verdicts = check(options.file)
    console = Console(highlight=False)
    for name, verdict in verdicts.items():
        console.print(f"{name:26} [{'green' if verdict == 'right' else 'yellow'}]{escape(verdict)}[/]")
    right = list(verdicts.values()).count("right")
    console.print(f"{right} of {len(verdicts)} right")
    sys.exit(right < len(verdicts))


# ---- the sheet --------------------------------------------------------------------------------------------------


@functools.cache
def groups(seed):
    """{name: (what is given, [Question])} of a seed."""
    draw = random.Random(seed)
    return {"bytes": moments(draw), "links": links(draw), "machine": machine(draw)}


def sheet(seed, file):
    """The text of a sheet: the questions as comments, the answers open."""
    parts = [commented(TEXTS["head"].format(file=file)), f"seed = {seed}"]
    for group, (given, questions) in groups(seed).items():
        parts.append(f"\n\n[{group}]\n{commented(given)}")
        parts += [f'\n{commented(question.ask)}\n{question.name} = "{OPEN}"' for question in questions]
    return "\n".join(parts) + "\n"


def asked(group, right, known, choices):
    """What is given and asked in a group: the texts of paper.toml, filled with what is known.

    Args:
        right: {question: its answer}.
        known: {a name in the texts and the formulas of mistakes: its value}.
        choices: {question: {a name to choose: what to think of if that is wrong}}; the others ask for numbers.
    """
    texts, questions = TEXTS[group], []
    for name, answer in right.items():
        told, names = texts[name], choices.get(name, {})
        mistakes = texts.get(told.get("as_in"), {}).get("mistakes", {}) | told.get("mistakes", {})
        hints = [*names.items(), *hints_of(mistakes, **known)]
        questions.append(Question(name, told["ask"].format(**known), answer, hints, tuple(names)))
    return texts["given"].format(**known), questions


def commented(text):
    """Text as comments of TOML; indented lines stay as they are."""
    lines = []
    for paragraph in text.split("\n\n"):
        kept = paragraph.startswith("    ")
        lines += [*(paragraph.split("\n") if kept else textwrap.wrap(paragraph, 98, break_on_hyphens=False)), ""]
    return "\n".join(f"# {line}".rstrip() for line in lines[:-1])


def check(path):
    """A file's answers: {group.name: "right", "open", "not yet: " and a hint, or "no answer: " and what one is like}.

    Raises:
        InputError: the file is missing, or is no sheet.
    """
    found = answers_in(path)
    if type(found.get("seed")) is not int:
        raise InputError(f"{path} has no seed, so nobody knows its numbers; write a sheet with --seed 7")
    verdicts = {}
    for group, (_, questions) in groups(found["seed"]).items():
        answers = found.get(group)
        answers = answers if isinstance(answers, dict) else {}
        verdicts |= {f"{group}.{one.name}": verdict(answers.get(one.name), one) for one in questions}
    return verdicts


def answers_in(path):
    """A sheet's tables. Raises InputError if the file is missing, or is no sheet."""
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a sheet") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read as a sheet: {error}") from error


def verdict(answer, question):
    """The verdict on an answer; None is a missing one."""
    if answer == OPEN:
        return "open"
    if answer is None:
        return f'no answer: it is missing; leave it as "{OPEN}" where you do not know'
    if question.names and answer not in question.names:
        return f"no answer: {answer!r}; choose from {', '.join(question.names)}"
    if not question.names and not is_number(answer):
        return f"no answer: {answer!r} is no number; write 1.5e9, for instance, without quotes"
    powers = [] if question.names else [10.0**power * question.right for power in range(-12, 13)]
    hints = [*question.hints, *((wrong, "off by a power of ten: check the unit") for wrong in powers)]
    said = judge(answer, question.right, hints, within=0.03)
    return "right" if said == "solved" else said


# ---- bytes at three moments -------------------------------------------------------------------------------------


def moments(draw):
    """A stage's first step, as the engine takes it on tensors without values."""
    stage, precision, ranks = draw.choice(range(4)), draw.choice(("fp32", "bf16")), draw.choice((8, 16, 32))
    samples, kind = draw.choice((3, 5, 6)), draw.choice((None, models.KINDS[0]))
    layers, width, sequence = draw.choice((3, 4, 6)), 64 * draw.choice((4, 5, 6)), draw.choice((128, 256))
    model = partial(GPT, GPTConfig(layers, width, width // 64, sequence))
    setting = Setting(find_engine(STAGES[stage]), model, ranks, precision=precision, batch=samples)
    psi, built, before, after, kept = first_step(replace(setting, checkpoint_activations=kind))
    *_, otherwise = first_step(replace(setting, checkpoint_activations=None if kind else models.KINDS[0]))

    p, g, masters = (built[state] for state in STATES)
    right = {
        "after_building": p + g + masters,
        "activations": kept,
        "before_the_step": sum(before.values()),
        "after_the_step": sum(after.values()),
    }
    drawn = {"stage": stage, "precision": precision, "ranks": ranks, "samples": samples, "sequence": sequence}
    sizes = {"layers": layers, "width": width, "psi": psi, "size": 4 if precision == "fp32" else 2}
    held = {"p": p, "g": g, "masters": masters, "stepped": after["optimizer"], "kept": kept, "otherwise": otherwise}
    told = "keeps activation checkpoints: of a block its input alone" if kind else "keeps all activations"
    return asked("bytes", right, drawn | sizes | held | {"told": told, "other": "without" if kind else "with"}, {})


def first_step(setting):
    """Ψ; model states by class after building, and with what else is there before the update and after it; activations.

    All as the engine's timeline has them, the activations at the end of forward.
    """
    with simulated_world(setting.world_size):
        engine, model = engine_of(setting)
        inputs, targets = batch_of(model, setting.batch)
        with Timeline(engine) as timeline:
            seen = [now(timeline)]
            loss = models.loss(engine(inputs), targets)
            kept = now(timeline)["activations"]
            engine.backward(loss)
            del loss
            seen.append(now(timeline))
            engine.step()
            seen.append(now(timeline))
    return models.count(model), *({state: at[state] for state in STATES} for at in seen), kept


def now(timeline):
    """{class: live bytes} at this moment."""
    timeline.sample()
    return timeline.samples[-1][1]


# ---- when a step is bound by its links --------------------------------------------------------------------------


def links(draw):
    """A machine whose links are slow, by the planner's time."""
    gpu = PRESETS[draw.choice(DRAWN)]
    per_node, nodes = draw.choice((4, 8)), draw.choice((4, 8, 16))
    gpu = replace(gpu, between=draw.choice((3.125, 6.25, 12.5, 25)) * 1e9, ranks_per_node=per_node)
    shape, way = of_size(draw.choice(("1.5e9", "7e9", "13e9", "30e9"))), WAYS[draw.choice((1, 2, 3))]
    tokens, checkpoints = draw.choice((2048, 4096, 16384, 65536)), draw.choice((False, True))
    ranks = nodes * per_node
    row = ways(shape, gpu, ranks, batch=tokens // 2048, checkpoints=checkpoints)[way.title]
    sent, sending, computing = row["sent"], row["seconds"]["collectives"], row["computes"]
    least = sending / computing * tokens
    right = {
        "sent": sent,
        "collectives_seconds": sending,
        "computation_seconds": computing,
        "bound": "collectives" if sending >= computing else "computation",
        "tokens": least,
    }
    drawn = {"nodes": nodes, "per_node": per_node, "ranks": ranks, "part": 1 - 1 / ranks, "tokens": tokens}
    model = {"psi": shape.parameters, "kept": shape.block + shape.root}
    model["attention"] = shape.layers * shape.width * shape.sequence
    how = {"way": way.title, "third": way.engine == "stage3_param", "operations": 8 if checkpoints else 6}
    how["checkpointing"] = "with" if checkpoints else "without"
    rate = how["operations"] * (shape.parameters + model["attention"]) * tokens / computing
    rates = {"gpu": gpu, "rate": rate, "peak": gpu.flops[2] / 1e12, "fraction": rate / gpu.flops[2]}
    rates |= {"inside": gpu.inside / 1e9, "between": gpu.between / 1e9}
    found = {"sent": sent, "computing": computing, "least": least}
    choices = {"bound": dict.fromkeys(("collectives", "computation"), "compare the two times above")}
    return asked("links", right, drawn | model | how | rates | found, choices)


# ---- the best split of a machine --------------------------------------------------------------------------------


def machine(draw):
    """Which offer to take, and how to train there, by the planner: drawn until no two answers are close."""
    names, order, said = [way.title for way in WAYS], [*ADVISED, 4], TEXTS["choices"]  # of equals ZeRO++ comes last
    obvious = draw.choice((False, True))  # the fastest links are the best offer
    off = draw.choice((None, *SWITCHES))
    while True:
        gpu, ranks = PRESETS[draw.choice(DRAWN)], draw.choice((16, 32))
        psi, samples = draw.choice(("3e9", "7e9", "13e9", "20e9", "30e9", "70e9", "175e9")), draw.choice((1, 4, 8))
        rates, sizes = draw.sample((3.125, 6.25, 12.5, 25, 50, 100), 3), draw.sample((2, 4, 8, 16), 3)
        offers, rows = dict(zip("ABC", zip(sizes, rates, strict=True), strict=True)), {}
        for offer, (per_node, rate) in offers.items():
            at, own = gpu.node_of(per_node, between=rate * 1e9), [f"{off}=False"] if off else []
            for title, row in ways(of_size(psi), at, ranks, batch=samples, own=own).items():
                row["takes"] = max(row["computes"], *row["seconds"].values())
                rows[offer, title] = row
        fitting = {key: row["takes"] for key, row in rows.items() if row["fits"]}
        if not fitting:
            continue
        least = min(fitting.values())
        fastest = [key for key, takes in fitting.items() if takes == least]
        near = [takes for takes in fitting.values() if least < takes < 1.1 * least]
        near += [row for row in rows.values() if abs(row["device"] / (USABLE * gpu.holds) - 1) < 0.05]
        if (
            len({offer for offer, _ in fastest}) == 1
            and not near
            and (offers[fastest[0][0]][1] == max(rates)) == obvious
        ):
            break
    (offer, _), titles = fastest[0], [names[number] for number in order]
    best = next(title for title in titles if (offer, title) in fastest)
    lowest = next(title for title in titles if rows[offer, title]["fits"])

    def of_fastest(title):
        row = rows[offer, title]
        if not row["fits"]:
            return said["too_large"]
        slowest = max(row["seconds"], key=row["seconds"].get)
        return said["as_fast" if row["takes"] == least else "slower"].format(slowest=slowest)

    listed = "\n".join(
        f"    {key}  nodes of {p}, which send {rate:g} GB a second each" for key, (p, rate) in offers.items()
    )
    beside = "\n".join(
        f"    {title:31}  {(row['transient'] + row['activations']) / 1e9:.3g} GB"
        for (key, title), row in rows.items()
        if key == offer
    )
    drawn = {"ranks": ranks, "psi": float(psi), "tokens": 2048 * samples, "offers": listed, "beside": beside}
    part = gpu.shared_by(gpu.ranks_per_node)
    sizes = {"usable": USABLE, "holds": gpu.holds / 1e9, "host": part.host_holds / 1e9}
    rates = {"inside": gpu.inside / 1e9, "bus": part.bus / 1e9, "disk": part.disk / 1e9}
    shape = of_size(psi)
    rates["attention"] = shape.layers * shape.width * shape.sequence
    computing = rows[offer, best]["computes"]
    rates["reached"] = 8 * (shape.parameters + rates["attention"]) * drawn["tokens"] / computing / 1e12
    words = {"ladder": ", ".join(f'"{names[number]}"' for number in ADVISED), "last": names[4]}
    words["switches"] = ", ".join(told[switch == off] for switch, told in said["switches"].items())
    choices = {
        "lowest": {title: said["lower" if rows[offer, title]["fits"] else "too_large"] for title in names},
        "offer": dict.fromkeys(offers, said["slower_offer"]),
        "fastest": {title: of_fastest(title) for title in names},
    }
    return asked("machine", {"lowest": lowest, "offer": offer, "fastest": best}, drawn | sizes | rates | words, choices)


if __name__ == "__main__":
    main()
