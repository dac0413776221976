"""`python -m lab.readme`: write the recorded results into the READMEs, between their markers.

So every figure there comes from a file under results/, which names its hardware. A test holds the pages to the files.
"""

import importlib
import json
import re
from collections import Counter

from common import models
from common.engine.mixed_precision import DTYPES
from common.engines import ENGINES, STAGES
from common.measure.tables import Table, show_bytes
from common.outputs import ROOT, check_clone, one_line_errors, parser_of
from common.report import MOVED
from interop.deepspeed import keys
from interop.fsdp import supported
from lab import bench_results

DELAYS = ("offload_delay.json", "offload_delay_slow.json")  # two learning rates
INFINITY = ("disk_step", "ablation", "largest")  # commands of lab/offload/
ZEROPP = ("two_nodes", "convergence", "pack_time")  # and of lab/zeropp/
AT_RANKS = 4  # of the scores' bytes
ALONE = ("alone_cpu.json", "alone_cpu_batch128.json")  # two batches
BENCHES = ("bench_cpu.json", "bench_cpu_second_machine.json")
BENCH_CASE = ("gpt-mini", "fp32", 2)  # of the first page
IDEAS = {  # what is sharded; model states with Adam in fp32 and 16-bit, in bytes; elements sent
    "stage0_ddp": ("nothing: data parallelism", "16 Ψ", "16 Ψ", "2 (N-1)/N Ψ"),
    "stage1_os": ("optimizer states", "(8 + 8/N) Ψ", "(4 + 12/N) Ψ", "2 (N-1)/N Ψ"),
    "stage2_grad": ("and gradients", "(4 + 12/N) Ψ", "(2 + 14/N) Ψ", "2 (N-1)/N Ψ"),
    "stage3_param": ("and parameters", "16/N Ψ", "16/N Ψ", "up to 3 (N-1)/N Ψ"),
    "offload": ("as stage 2, beside the device", "4 Ψ", "2 Ψ", "2 (N-1)/N Ψ"),
    "offload.nvme": ("as stage 3, on disk", "0", "0", "up to 3 (N-1)/N Ψ"),
    "zeropp": ("as stage 3, in fewer bits", "(16/N + 4/P) Ψ", "(16/N + 2/P) Ψ", "in 4 to 8 bits"),
}
PATH = {  # the first page's
    "stage0_ddp/minimal.py": "data parallelism on one page, from torch alone",
    "stage0_ddp/engine.py": "buckets, averaged beside backward",
    "stage1_os/engine.py": "sharded optimizer states",
    "stage2_grad/engine.py": "sharded gradients: `owned` says who keeps what",
    "stage3_param/engine.py": "sharded parameters, gathered when they are needed",
    "common/engine/base.py": "what all engines do alike in a step",
    "common/engine/bucket.py": "parameters that travel together",
    "common/engine/layout.py": "where each element lives",
    "common/ranks/collectives.py": "every byte between ranks: exact sums, counted",
    "common/ranks/lanes.py": "what runs beside the computation",
}
SOURCES = {"offload": "offload/cpu.py", "offload.nvme": "offload/nvme.py"}  # others have an engine.py
PAGES = {"offload.nvme": "offload/INFINITY.md"}  # others have a README.md


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, of which there are none, and write the pages."""
    parser_of("lab.readme", __doc__).parse_args(arguments)
    check_clone("results/scores")
    for path, text in pages().items():
        path.write_text(text)


def pages():
    """The READMEs as they should read: {path: text}."""
    demo, benches = _read("demo.json"), [_read(name) for name in BENCHES]
    texts = {
        "README.md": {"stages": stages_table(demo), "speed": speed(benches), "path": path()},
        "results/README.md": {
            "demo": _table("lab.compare", "demo.json"),
            "reduction": reduction_table(_read("memory_reduction.json")),
            "activations": _table("lab.activations", "activations.json"),
            "bench": bench_results.as_markdown(benches[0]),
            "bench_small_models": bench_results.as_markdown(_read("bench_cpu_small_models.json")),
            "bench_second_machine": bench_results.as_markdown(benches[1]),
            "alone": bench_results.alone_as_markdown(*map(_read, ALONE)),
            "capacity": _table("lab.capacity", "capacity_cpu.json"),
            "accumulated": _table("lab.compare", "accumulated.json"),
            "scaling": _table("lab.plan.scaling", "scaling.json"),
        },
        "tests/README.md": {
            "museum": _table("interop.museum", "museum.json"),
            "equivalence": equivalence_table(_read("equivalence.json")),
            "scores": scores_table([_read(path) for path in (ROOT / "results/scores").glob("*.json")]),
        },
    }
    beside = _table("interop.beside_deepspeed", "words_deepspeed.json")
    texts["interop/DEEPSPEED.md"] = {"keys": keys.table().markdown(), "beside": beside}
    texts["interop/FULLY_SHARD.md"] = {"words": supported.table().markdown()}
    texts |= {page_of(row["engine"]): {"measured": stage_table(demo, row)} for row in demo["rows"]}
    texts["offload/README.md"] |= {
        "capacity": _table("lab.capacity", "offload_capacity_1.json", "offload_capacity_4.json"),
        "delay": _table("lab.offload.delay", *DELAYS),
        "bench": bench_results.as_markdown(_read("bench_offload.json")),
    }
    texts["offload/INFINITY.md"] |= {
        "capacity": _table("lab.capacity", "infinity_capacity_1.json", "infinity_capacity_4.json"),
        "tiling": _table("lab.offload.tiling", "infinity_tiling.json"),
        **{name: _table(f"lab.offload.{name}", f"infinity_{name}.json") for name in INFINITY},
    }
    texts["zeropp/README.md"] |= {name: _table(f"lab.zeropp.{name}", f"zeropp_{name}.json") for name in ZEROPP}
    return {ROOT / page: fill((ROOT / page).read_text(), parts) for page, parts in texts.items()}


def page_of(engine):
    """The page about an engine."""
    return PAGES.get(engine, f"{engine}/README.md")


def _table(command, *names):
    """The tables that a command makes of its records. Engines go by their names."""
    return "\n\n".join(importlib.import_module(command).table(_read(name)).markdown() for name in names)


def _read(name):
    return json.loads((ROOT / "results" / name).read_text())


def fill(page, parts):
    """Put each text between the markers of its name."""
    for name, text in parts.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        page = between.sub(lambda match, text=text: f"{match[1]}\n{text.strip()}\n\n{match[2]}", page)
    return page


def stages_table(demo):
    """The stages beside each other: idea, formulas, and what was counted, as Markdown."""
    sent_by = {row["engine"]: sum(row["wire_bytes_per_step"].values()) for row in demo["rows"]}
    between = {row["engine"]: sum(row["internode_bytes_per_step"].values()) for row in demo["rows"]}
    rows = []
    for row in demo["rows"]:
        stage = row["engine"]
        idea, in_fp32, in_16_bit, traffic = IDEAS[stage]
        held, sent = show_bytes(sum(row["model_state_bytes"].values())), f"{traffic}: {show_bytes(sent_by[stage])}"
        if stage == "zeropp":
            sent += f"; between nodes {show_bytes(between[stage])}, stage 3 {show_bytes(between['stage3_param'])}"
        source = source_of(stage)
        cells = (f"[`{stage}`]({page_of(stage)})", idea, f"{in_fp32}: {held}", in_16_bit, sent)
        rows.append((*cells, f"[{_length(source)}]({source})"))
    header = (
        "stage",
        "what is sharded",
        "held by a rank, bytes",
        "in 16-bit",
        "sent by a rank in a step, elements",
        "lines",
    )
    note = (
        "Ψ: parameters of the model; N: ranks (processes, one for each GPU); P: ranks of a node. Bytes are counted: "
        f"{_what(demo)}, in nodes of 2; for `offload` and `offload.nvme`, on the device. Lines: of the engine's file, "
        "as `wc -l` counts them; Infinity and ZeRO++ derive from stage 3's, and ZeRO++ has "
        f"{_length('zeropp/transports.py') + _length('zeropp/quantize.py')} lines more in `transports.py` and "
        "`quantize.py`."
    )
    return Table("", header, rows, words=(0, 1), note=note).markdown()


def speed(benches):
    """How stages' step times compare with those of the libraries, in a sentence."""
    model, precision, size = BENCH_CASE
    case = {"model": model, "precision": precision, "world_size": size}
    ratios = [
        ratio["ratio"]
        for record in benches
        for row in record["rows"]
        if row["engine"] in STAGES and case.items() <= row.items()
        for peer, ratio in row["ratios_to_peers"].items()
        if peer != "the bound"
    ]
    machines = " and ".join(_processor(record["hardware"]) for record in benches)
    return (
        f"A step of stages 0 to 3 takes {min(ratios):.2f} to {max(ratios):.2f} times as long as that of the library "
        "that you would otherwise use (torch's DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed): "
        f"{model}, {precision}, {size} CPU ranks with gloo, on {machines}. "
        "[All times, with their intervals](results/README.md#how-fast)."
    )


def path():
    """The files to read first, with their lengths, as Markdown."""
    rows = [(f"[`{file}`]({file})", str(_length(file)), what) for file, what in PATH.items()]
    return Table("", ("file", "lines", "what it says"), rows, words=(0, 2)).markdown()


def source_of(engine):
    """The file of an engine."""
    return SOURCES.get(engine, f"{engine}/engine.py")


def _length(file):
    return len((ROOT / file).read_text().splitlines())


def _what(demo):
    """What make demo trains."""
    return f"{demo['model']}, {demo['parameters']:,} parameters, {demo['precision']}, {demo['world_size']} ranks"


def _processor(hardware):
    return hardware.partition(",")[0]


def stage_table(demo, row):
    """One stage's measured and predicted bytes, as Markdown."""
    rows = [
        (state, measured, row["predicted_model_state_bytes"][state])
        for state, measured in row["model_state_bytes"].items()
    ]
    for collective, predicted in row["predicted_wire_bytes_per_step"].items():
        rows.append((f"{collective}, sent per step", row["wire_bytes_per_step"].get(collective, 0), predicted))
    for where, name in (("on the host", "host_state_bytes"), ("on disk", "disk_state_bytes")):
        for state, measured in row.get(name, {}).items():
            if measured:
                rows.append((f"{state}, {where}", measured, row[f"predicted_{name}"][state]))
    for name, said in MOVED.items():
        for way, predicted in row.get(f"predicted_{name}", {}).items():
            rows.append((f"{said.format(way)} per step", row[name].get(way, 0), predicted))
    rows = [(what, *(f"{count:,} B" for count in counts)) for what, *counts in rows]
    title = f"Measured by `make demo` ({_what(demo)}; {demo['hardware']}):"
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
        rows.append((precision, *(_in_words(count) for count in counts)))
    sizes = ", ".join(map(str, sorted({cell["world_size"] for cell in cells})))
    header = ("precision", *engines)
    title = f"{len(cells)} cells at world sizes {sizes}; {results['hardware']}"
    return Table(title, header, rows, words=range(len(header))).markdown()


def scores_table(scores):
    """How every engine scores, as Markdown: verdicts, bytes per parameter, settings."""
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


def _in_words(counts):
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.items()) or "-"


if __name__ == "__main__":
    main()
