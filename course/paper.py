"""Pencil and paper: bytes at three moments, when links bound a step, the best split of a machine.

    python -m course.paper my_sheet.toml --seed 7      write a sheet of your own, whose numbers the seed draws
    python -m course.paper my_sheet.toml               check the answers that you have written into it

What is right is not typed in here: the engine says it, on tensors without values, and the planner. So a file's answers
are right for its seed alone. The exit status is 0 where all of them are right, 1 where one is not or is left open.
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
from common.engines import STAGES, find_engine
from common.errors import InputError
from common.measure.memory import Timeline
from common.models.gpt import GPT, GPTConfig
from common.outputs import one_line_errors, parser_of, write_text
from common.tiers.accounting import STATES
from course.pages.answers import is_number, judge
from course.pages.scaling import ways
from lab.plan.__main__ import ADVISED, USABLE, of_size
from lab.plan.formulas import SWITCHES, WAYS
from lab.simulate.hardware import PRESETS
from lab.simulate.world import Setting, batch_of, engine_of, simulated_world

OPEN = "?"
HEAD = """Pencil and paper. Put your answer in place of each "?": a number such as 1.5e9, or one of the names that are
given, in quotes. Numbers may be 3 % off. Then, in the repository's root,

    python -m course.paper {file}

says of each whether it is right, and what a wrong one has probably left out. Psi is the number of parameters; the
optimizer is Adam. In bf16 it keeps a copy of the parameters in fp32, the master weights. GB are 1e9 bytes."""


@dataclass(frozen=True)
class Question:
    """A question of a sheet.

    Attributes:
        name: the key in the file.
        ask: what is asked.
        right: a number, or one of `names`.
        hints: [(a wrong answer, what to think of)].
        names: of which one is to be chosen; () where a number is asked for.
    """

    name: str
    ask: str
    right: float | str
    hints: tuple = ()
    names: tuple = ()


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
        colour = "green" if verdict == "right" else "yellow"
        console.print(f"{name:26} [{colour}]{escape(verdict)}[/]")
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
    parts = [commented(HEAD.format(file=file)), f"seed = {seed}"]
    for group, (given, questions) in groups(seed).items():
        parts.append(f"\n\n[{group}]\n{commented(given)}")
        parts += [f'\n{commented(question.ask)}\n{question.name} = "{OPEN}"' for question in questions]
    return "\n".join(parts) + "\n"


def commented(text):
    """Text as comments of TOML; lines that are indented stay as they are."""
    lines = []
    for paragraph in text.split("\n\n"):
        kept = paragraph.startswith("    ")
        lines += [*(paragraph.split("\n") if kept else textwrap.wrap(paragraph, 98, break_on_hyphens=False)), ""]
    return "\n".join(f"# {line}".rstrip() for line in lines[:-1])


def check(path):
    """Hold a file's answers against what is right.

    Returns:
        {group.name: "right", "open", "not yet: " and a hint, or "no answer: " and what one looks like}

    Raises:
        InputError: there is no such file, or it is no sheet.
    """
    try:
        found = tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; give a sheet, or write one with --seed 7") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read as a sheet: {error}") from error
    if type(found.get("seed")) is not int:
        raise InputError(f"{path} has no seed, so nobody knows its numbers; write a sheet with --seed 7")
    verdicts = {}
    for group, (_, questions) in groups(found["seed"]).items():
        answers = found.get(group)
        answers = answers if isinstance(answers, dict) else {}
        verdicts |= {f"{group}.{one.name}": verdict(answers.get(one.name), one) for one in questions}
    return verdicts


def verdict(answer, question):
    """What there is to say of an answer; None is a missing one."""
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

    size = 4 if precision == "fp32" else 2
    p, g, masters = (built[state] for state in STATES)
    stepped = after["optimizer"]
    whole, shared = "no stage shards more than it has to: what is whole here?", f"what does stage {stage} shard?"
    first = [
        (p + g + stepped, "Adam makes its moments in its first update"),
        (p + masters, "the room for gradients is made with the engine"),
        (p + g, "the master weights are there from the beginning"),
        (16 * psi, f"16 bytes for each parameter is stage 0 after a step; {shared}"),
        (16 * psi / ranks, f"that is stage 3 after a step; {whole}"),
        ((2 * size + 4 * (size == 2)) * psi, shared),
        ((2 * size + 4 * (size == 2)) * psi / ranks, whole),
    ]
    then = [
        (p + g + masters, "the update has made Adam's moments"),
        (p + stepped, "the engine keeps the room of its gradients for the next step"),
        (p + g + masters + (stepped - masters) * size / 4, "Adam's moments are in fp32"),
        (16 * psi, f"that is stage 0; {shared}"),
        (16 * psi / ranks, f"that is stage 3; {whole}"),
    ]
    then += [(p + g + 8 * psi / n, "the master weights stay, beside the moments") for n in (1, ranks)]
    alive = [
        (kept / ranks, "no stage shards activations: each rank has those of its own samples"),
        (ranks * kept, "count the samples of one rank"),
        (kept / samples, "that is one sample; a rank has more"),
        (kept * 4 / size if size == 2 else kept / 2, f"an element has {size} bytes in {precision}"),
        (kept / size, "those are elements; how many bytes has one?"),
        (otherwise, f"that is {'without' if kind else 'with'} checkpoints"),
    ]
    told = "keeps activation checkpoints: of a block its input alone" if kind else "keeps all activations"
    given = (
        f"Bytes at three moments. Stage {stage} trains a GPT in {precision} on {ranks} ranks, {samples} samples of "
        f"{sequence} tokens on each. It has {layers} blocks of width {width}, a vocabulary of 256, and {psi:,} "
        f"parameters. It {told}.\n\nA block keeps for its backward, in elements of each token: its input, the outputs "
        f"of both norms, q, k and v, what attention gives, the sum after it (each the width), and what is before and "
        f"after the GELU (four times the width each). Behind the blocks the last norm's input and output stay, and "
        f"of each word of the vocabulary the logarithm of its softmax, which is in fp32 always."
    )
    states = sum(built.values())
    return given, [
        Question("after_building", "Bytes of model states on a rank when the engine has been built.", states, first),
        Question("activations", "Bytes of activations on a rank when its first forward has ended.", kept, alive),
        Question(
            "before_the_step",
            "Bytes of model states and activations when the first backward has ended, before the update.",
            sum(before.values()),
            [*first, (states + kept, "backward gives activations back as it goes")],
        ),
        Question("after_the_step", "And after the update.", sum(after.values()), then),
    ]


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
    gpu = PRESETS[draw.choice(sorted(PRESETS))]
    per_node, nodes = draw.choice((4, 8)), draw.choice((4, 8, 16))
    gpu = replace(gpu, between=draw.choice((3.125, 6.25, 12.5, 25)) * 1e9, ranks_per_node=per_node)
    shape, way = of_size(draw.choice(("1.5e9", "7e9", "13e9", "30e9"))), WAYS[draw.choice((1, 2, 3))]
    tokens, checkpoints = draw.choice((2048, 4096, 16384, 65536)), draw.choice((False, True))
    ranks = nodes * per_node
    row = ways(shape, gpu, ranks, batch=tokens // 2048, checkpoints=checkpoints)[way.title]
    sent, sending, computing = row["sent"], row["seconds"]["collectives"], row["computes"]
    psi, part, operations = shape.parameters, 1 - 1 / ranks, 8 if checkpoints else 6
    rate, least = gpu.flops[2] * gpu.fraction, sending / computing * tokens
    kept = (psi - shape.rest) / shape.layers + shape.rest
    third = way.engine == "stage3_param"
    slower = [
        (gpu.fraction, f"a GPU reaches {gpu.fraction:.0%} of its peak"),
        ((14 - operations) / operations, "with checkpoints forward is computed twice: 8 operations, else 6"),
        (2 / operations, "that is forward alone"),
    ]
    given = (
        f"When links bound a step. {nodes} nodes of {per_node} GPUs train a model of {psi:.4g} parameters in bf16 by "
        f"{way.title}, {'with' if checkpoints else 'without'} activation checkpoints; the root and the last block, "
        f"{kept:.4g} of its parameters, end the forward and begin the backward. A GPU's peak is "
        f"{gpu.flops[2] / 1e12:.4g} TFLOPS, of which it reaches {gpu.fraction:.0%}. It sends {gpu.inside / 1e9:.4g} GB "
        f"a second to others of its node. To other nodes all GPUs of a node together send {gpu.between / 1e9:.4g} GB a "
        f"second. Collectives are rings, which leave each node once, by one of its GPUs. A parameter takes 6 "
        f"floating-point operations for each token, and 2 more where checkpoints compute forward again. A step has one "
        f"micro-batch, of {tokens:,} tokens on a GPU."
    )
    bound = ("collectives", "computation")
    return given, [
        Question(
            "sent",
            "Bytes that a GPU sends in a step.",
            sent,
            [
                (2 * (2 + (not third)) * psi * part, "stage 3 gathers parameters twice, stages 1 and 2 once"),
                (2 * sent, "a gradient or a parameter in bf16 has 2 bytes"),
                (sent / 2, "those are elements; an element has 2 bytes"),
                (6 * psi * part, "nearly: what stays gathered is gathered once"),
            ],
        ),
        Question(
            "collectives_seconds",
            "Seconds that they take.",
            sending,
            [
                (sent / gpu.inside, "that is inside a node: which of the links is the slowest?"),
                (sent * per_node / gpu.between, "a ring leaves a node once, and not once for each of its GPUs"),
                (sent / per_node / gpu.between, "all of the ring's bytes cross the node's link"),
            ],
        ),
        Question(
            "computation_seconds",
            "Seconds that computation takes.",
            computing,
            [(computing * factor, hint) for factor, hint in slower]
            + [(computing * ranks, "count the tokens of one GPU"), (1 / rate, "multiply by the operations")],
        ),
        Question(
            "bound",
            f"Which takes longer, and bounds the step: {' or '.join(bound)}?",
            bound[computing > sending],
            [(name, "compare the two times above") for name in bound],
            bound,
        ),
        Question(
            "tokens",
            "From how many tokens on a GPU does computation outlast the collectives?",
            least,
            [(least / factor, hint) for factor, hint in slower]
            + [
                (least * ranks, "those are the tokens of all GPUs"),
                (sent / gpu.inside / computing * tokens, "that is inside a node: which link is the slowest?"),
            ],
        ),
    ]


# ---- the best split of a machine --------------------------------------------------------------------------------


PLUS = {  # what ZeRO++ does with a switch of it, and without
    "quantize_weights": ("gathers in int8", "gathers in bf16"),
    "hierarchical": ("keeps a second shard in each node for backward", "keeps no second shards"),
    "quantize_gradients": ("and reduces in int4 in two hops", "and reduces in bf16, in one ring"),
}
TOO_LARGE = "it does not fit: count parameters, gradients and optimizer states one by one, and what comes beside"
LOWER = "it fits, and so does one before it"


def machine(draw):
    """Which offer to take, and how to train there, by the planner: drawn until no two answers lie close together."""
    names, order = tuple(way.title for way in WAYS), [*ADVISED, 4]  # of equals ZeRO++ comes last
    obvious = draw.choice((False, True))  # the fastest links are the best offer
    off = draw.choice((None, *SWITCHES))
    while True:
        gpu, ranks = PRESETS[draw.choice(sorted(PRESETS))], draw.choice((16, 32))
        psi, samples = draw.choice(("3e9", "7e9", "13e9", "20e9", "30e9", "70e9", "175e9")), draw.choice((1, 4, 8))
        rates, sizes = draw.sample((3.125, 6.25, 12.5, 25, 50, 100), 3), draw.sample((2, 4, 8, 16), 3)
        offers, rows = dict(zip("ABC", zip(sizes, rates, strict=True), strict=True)), {}
        for offer, (per_node, rate) in offers.items():
            at, own = replace(gpu, between=rate * 1e9, ranks_per_node=per_node), [f"{off}=False"] if off else []
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
            return TOO_LARGE
        if row["takes"] == least:
            return "it is as fast, but one before it is as well"
        return f"it fits, but its {max(row['seconds'], key=row['seconds'].get)} take longer than another's"

    listed = "\n".join(
        f"    {key}  nodes of {p}, which send {rate:g} GB a second each" for key, (p, rate) in offers.items()
    )
    beside = "\n".join(
        f"    {title:27} {(row['transient'] + row['activations']) / 1e9:.3g} GB"
        for (key, title), row in rows.items()
        if key == offer
    )
    switches = ", ".join(told[switch == off] for switch, told in PLUS.items())
    given = (
        f"The best split of a machine. {ranks} GPUs, each with {gpu.holds / 1e9:g} GB, of which {USABLE:.0%} can be "
        f"used, train a model of {float(psi):.4g} parameters in bf16 with activation checkpoints; a GPU's micro-batch "
        f"has {2048 * samples:,} tokens, and a step one micro-batch. The GPU reaches "
        f"{gpu.flops[2] * gpu.fraction / 1e12:.4g} TFLOPS and needs 8 operations for a parameter and token. It sends "
        f"{gpu.inside / 1e9:g} GB a second inside a node, moves {gpu.bus / 1e9:g} GB a second each way over the bus to "
        f"the host, where it has {gpu.host_holds / 1e9:.4g} GB, and {gpu.disk / 1e9:g} GB a second each way to a disk "
        f"that has room for all. It can be had in three ways:\n\n{listed}\n\nBeside model states a GPU "
        f"needs, for what is gathered or under way and for activations:\n\n{beside}\n\nZeRO++ (zeropp/README.md) "
        f"{switches}. A step takes as long as the slowest of computation, collectives, bus and disk, which run "
        f"beside each other. Of ways that are equally fast take the one that comes first, ZeRO++ last."
    )
    return given, [
        Question(
            "lowest",
            "The first of these that fits: " + ", ".join(f'"{names[number]}"' for number in ADVISED) + ".",
            lowest,
            [(title, LOWER if rows[offer, title]["fits"] else TOO_LARGE) for title in names],
            names,
        ),
        Question(
            "offer",
            "On which offer is the fastest way that fits the fastest: A, B or C?",
            offer,
            [(key, "another is faster: what leaves a node, over which link, and what fits?") for key in offers],
            tuple(offers),
        ),
        Question(
            "fastest",
            f'Which way is that? One of those, or "{WAYS[4].title}".',
            best,
            [(title, of_fastest(title)) for title in names],
            names,
        ),
    ]


if __name__ == "__main__":
    main()
