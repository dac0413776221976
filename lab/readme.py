"""`python -m lab.readme`: write the recorded results into the READMEs, between their markers.

So every figure there comes from a file under results/, which names its hardware. A test holds the pages to the files.
readme.toml has the source of each text.
"""

import importlib
import inspect
import itertools
import json
import re
import tomllib
from collections import Counter
from pathlib import Path

from common import models
from common.calls import TABLE as CALLS
from common.engine.mixed_precision import DTYPES
from common.engines import ENGINES, STAGES, find_engine
from common.measure.tables import Table, show_bytes
from common.outputs import ROOT, check_clone, one_line_errors, parser_of
from common.report import MOVED
from lab.bench_results import as_markdown
from lab.figures import described

AT_RANKS = 4  # of the scores' bytes
BENCH_CASE = {"model": "gpt-mini", "precision": "fp32", "world_size": 2}  # of the first page
OFFLOAD_CASE = {"precision": "bf16", "world_size": 2}  # of its page
OFFLOAD_BESIDE = ("stage2_grad", "offload", "deepspeed2", "deepspeed_offload", "torch_ddp")
TOLD = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
IDEAS, SAID = TOLD["ideas"], TOLD["first_page"]
MEASURED = {  # on an engine's page
    "model_state_bytes": "{}",
    "wire_bytes_per_step": "{}, sent per step",
    "host_state_bytes": "{}, on the host",
    "disk_state_bytes": "{}, on disk",
    **{name: f"{said} per step" for name, said in MOVED.items()},
}
PAGES = {"offload.nvme": "offload/INFINITY.md", "zeropp.hybrid": "zeropp/HYBRID.md"}  # others have a README.md


@one_line_errors()
def main(arguments=None):
    """Parse the (empty) arguments and write the pages."""
    parser_of("lab.readme", __doc__).parse_args(arguments)
    check_clone("results/scores")
    for path, text in pages().items():
        path.write_text(text)


def pages():
    """The READMEs as they should read: {path: text}."""
    texts = {page: {name: made(*what) for name, what in parts.items()} for page, parts in TOLD["pages"].items()}
    demo = _read("demo.json")
    for row in demo["rows"]:
        texts.setdefault(page_of(row["engine"]), {})["measured"] = stage_table(demo, row)
    return {ROOT / page: fill((ROOT / page).read_text(), parts) for page, parts in texts.items()}


def made(command, *names):
    """The text that a command's `table` makes of each record, or a function, module:name, of all of them."""
    module, _, function = command.partition(":")
    found, records = importlib.import_module(module), map(_read, names)
    if function:
        made_of = getattr(found, function)(*records)
        return made_of if isinstance(made_of, str) else made_of.markdown()
    tables = map(found.table, records) if names else [found.table()]
    return "\n\n".join(table.markdown() for table in tables)


def page_of(engine):
    """The page about an engine."""
    return PAGES.get(engine, f"{engine}/README.md")


def _read(name):
    return json.loads((ROOT / "results" / name).read_text())


def fill(page, parts):
    """Put each text between the markers of its name."""
    for name, text in parts.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        page = between.sub(lambda match, text=text: f"{match[1]}\n{text.strip()}\n\n{match[2]}", page)
    return page


def stages_table(demo):
    """A row for each stage: idea, formulas, and what was counted, as Markdown."""
    sent_by = {row["engine"]: sum(row["wire_bytes_per_step"].values()) for row in demo["rows"]}
    between = {row["engine"]: sum(row["internode_bytes_per_step"].values()) for row in demo["rows"]}
    rows = []
    for row in demo["rows"]:
        stage = row["engine"]
        idea, in_fp32, in_16_bit, traffic = IDEAS[stage]
        held, sent = show_bytes(sum(row["model_state_bytes"].values())), f"{traffic}: {show_bytes(sent_by[stage])}"
        if stage.startswith("zeropp"):
            sent += f"; between nodes {show_bytes(between[stage])}, stage 3 {show_bytes(between['stage3_param'])}"
        source = Path(inspect.getsourcefile(find_engine(stage))).relative_to(ROOT)
        cells = (f"[`{stage}`]({page_of(stage)})", idea, f"{in_fp32}: {held}", in_16_bit, sent)
        rows.append((*cells, f"[{_length(source)}]({source})"))
    further = {room: f"{sum(map(_length, files)):,}" for room, files in SAID["further"].items()}
    note = SAID["note"].format(model=described(demo), **further)
    return Table("", SAID["header"], rows, words=(0, 1), note=note).markdown()


def speed(*benches):
    """How stages' step times compare with those of the libraries, in a sentence."""
    ratios = [
        ratio["ratio"]
        for record in benches
        for row in record["rows"]
        if row["engine"] in STAGES and BENCH_CASE.items() <= row.items()
        for peer, ratio in row["ratios_to_peers"].items()
        if peer != "the bound"
    ]
    machines = " and ".join(record["hardware"].partition(",")[0] for record in benches)
    return SAID["speed"].format(least=min(ratios), most=max(ratios), **BENCH_CASE, machines=machines)


def offload_bench(results):
    """ZeRO-Offload's rows of a bench with those that it compares with, as Markdown."""
    rows = [row for row in results["rows"] if row["engine"] in OFFLOAD_BESIDE and OFFLOAD_CASE.items() <= row.items()]
    return as_markdown({**results, "rows": rows})


def path():
    """The files to read first, with their lengths, as Markdown."""
    rows = [(f"[`{file}`]({file})", str(_length(file)), what) for file, what in TOLD["path"].items()]
    return Table("", ("file", "lines", "what it says"), rows, words=(0, 2)).markdown()


def _length(file):
    return len((ROOT / file).read_text().splitlines())


def stage_table(demo, row):
    """One stage's measured and predicted bytes, as Markdown."""
    rows = []
    for name, said in MEASURED.items():
        for what, predicted in row.get(f"predicted_{name}", {}).items():
            measured = row[name].get(what, 0)
            if measured or name not in ("host_state_bytes", "disk_state_bytes"):
                rows.append((said.format(what), f"{measured:,} B", f"{predicted:,} B"))
    title = f"Measured by `make demo` ({described(demo)}; {demo['hardware']}):"
    return Table(title, ("per rank", "measured", "predicted"), rows).markdown()


def reduction_table(results):
    """The memory reduction by stage and world size, as Markdown."""
    cells, rows = {(row["world_size"], row["engine"]): row for row in results["rows"]}, []
    for size in sorted({size for size, _ in cells}):
        row = [cells[size, engine] for engine in STAGES]
        held = [f"{show_bytes(sum(c['model_state_bytes'].values()))} ({c['reduction']:.2f}x)" for c in row]
        rows.append((str(size), *held))
    return Table("", ("ranks", *STAGES), rows, words=()).markdown()


def equivalence_table(results):
    """How many cells of the matrix have which verdict, by precision and stage, as Markdown."""
    cells = results["cells"]
    engines = [engine for engine in ENGINES if any(cell["engine"] == engine for cell in cells)]
    rows = []
    for precision in DTYPES:
        counts = (
            Counter(c["verdict"] for c in cells if (c["engine"], c["precision"]) == (engine, precision))
            for engine in engines
        )
        told = (", ".join(f"{number} {verdict}" for verdict, number in count.items()) or "-" for count in counts)
        rows.append((precision, *told))
    sizes = ", ".join(map(str, sorted({cell["world_size"] for cell in cells})))
    header = ("precision", *engines)
    title = f"{len(cells)} cells at world sizes {sizes}; {results['hardware']}"
    return Table(title, header, rows, words=range(len(header))).markdown()


def teeth_table(results):
    """How many planted faults a sample of the suite notices, and the suite's minutes by room, as Markdown."""
    rows, lists = [], dict.fromkeys(row["of"] for row in results["rows"])
    for of in (*lists, "in all"):
        found = [row["samples"] for row in results["rows"] if of in (row["of"], "in all")]
        rows.append((of, str(len(found)), str(found.count(1)), str(len(found) - found.count(None))))
    header = ("faults in", "planted", "noticed by one sample", "by three in a row")
    left = results["planted"] - len(results["rows"])
    note = f"Left out are faults planted by code, or not yet: {left}. {results['hardware']}"
    teeth = Table("", header, rows, note=note)
    counts, seconds = results["suite"]["counts"], results["suite"]["seconds_by_room"]
    rooms = sorted(seconds, key=seconds.get, reverse=True)
    rows = [(f"`{room}/`", f"{seconds[room] / 60:.1f}") for room in rooms]
    note = f"{counts['passed']:,} tests passed, {counts['failed']} failed in {counts['seconds'] / 60:.1f} minutes, "
    note += f"two at a time; {results['suite']['hardware']}"
    return "\n\n".join([teeth.markdown(), Table("", ("tests in", "minutes"), rows, note=note).markdown()])


def calls_table():
    """What is looked at before each call, where it is refused, and how many cells there are of both, as Markdown."""
    calls, states, places = CALLS["before"], CALLS["states"], CALLS["refused"]
    why = {
        call: [*looks, *(where for where, row in places.items() if call in row["calls"])]
        for call, looks in calls.items()
    }
    refused = Counter(s for s, call in itertools.product(states, calls) if not set(states[s]).isdisjoint(why[call]))
    number = refused.total()
    note = (
        f"{len(states)} states and {len(calls)} calls: {len(states) * len(calls) - number} cells are right, {number} "
    )
    note += "refused. In fp32 stages 0 to 2 keep a weight written past the engine, and refuse fewer."
    rows = [(f"`{call}`", ", ".join(of) or "-", ", ".join(why[call][len(of) :]) or "-") for call, of in calls.items()]
    lines = [(where, f"`{row['line']}`") for where, row in places.items()]
    stand = [(state, str(refused[state]), ", ".join(of) or "-") for state, of in states.items()]
    tables = (
        Table("", ("call", "looks before it", "refused"), rows, words=(0, 1, 2), note=note),
        Table("", ("look", "refuses unless"), CALLS["looks"].items(), words=(0, 1)),
        Table("", ("refused", "line"), lines, words=(0, 1)),
        Table("", ("where an engine may stand", "calls refused", "why"), stand, words=(0, 2)),
    )
    return "\n\n".join(table.markdown() for table in tables)


def calls_alone():
    """The calls that a rank may make by itself."""
    return ", ".join(f"`{call}`" for call in CALLS["alone"]["calls"])


def scores_table():
    """How every engine scores, as Markdown: verdicts, bytes per parameter, settings."""
    scores = map(_read, (ROOT / "results/scores").glob("*.json"))
    scores = sorted(scores, key=lambda score: (score["engine"] not in ENGINES, score["engine"]))
    parameters = models.count(models.build(scores[0]["model"]))
    header = ("engine", "bitwise", "within a norm", "fails", "not claimed", "held, bytes per parameter", "sent")
    rows = []
    for score in scores:
        verdicts = Counter(score["verdicts"])
        near = verdicts["ulp"] + verdicts["tolerance"]
        counts = verdicts["bitwise"], near, verdicts["fail"], sum(score["not_claimed"].values())
        held, sent = (
            [row for row in score[name] if (row["world_size"], row["precision"]) == (AT_RANKS, "fp32")]
            for name in ("bytes_held", "bytes_sent")
        )
        in_states = [sum(row[state] for state in ("parameters", "gradients", "optimizer")) for row in held]
        held = _per_parameter(zip(in_states, (row["formula"] for row in held), strict=True), parameters)
        sent = _per_parameter(((row["sent"], row["formula"]) for row in sent), parameters)
        rows.append((score["name"], *map(str, counts), held, sent))
    model = f"{scores[0]['model']} at {AT_RANKS} ranks, fp32 with AdamW"
    note = f"Bytes: {model}; in brackets the formula of the stage that the engine follows. {scores[0]['hardware']}."
    settings = [
        f"- `{score['engine']}` ({', '.join(f'{name} {version}' for name, version in score['versions'].items())}): "
        f"{score['settings']}"
        for score in scores
        if score["settings"]
    ]
    return "\n".join([Table("", header, rows, note=note).markdown(), "", *settings])


def _per_parameter(pairs, parameters):
    return "".join(f"{measured / parameters:.2f} ({formula / parameters:.2f})" for measured, formula in pairs) or "-"


if __name__ == "__main__":
    main()
