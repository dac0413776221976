"""`python -m common.readme`: write the recorded results into the READMEs, between their markers.

So every figure there comes from a file under results/, which names its hardware. A test holds the pages to the files.
"""

import json
import re
from collections import Counter
from pathlib import Path

from common import activations, bench, capacity, models
from common.compare import as_markdown
from common.engine.mixed_precision import DTYPES
from common.train import ENGINES, show_bytes

AT_RANKS = 4  # of the scores' bytes
ALONE = ("alone_cpu.json", "alone_cpu_batch128.json")  # two batches
ROOT = Path(__file__).parent.parent


def pages():
    """The READMEs as they should read: {path: text}."""
    demo = json.loads((ROOT / "results/demo.json").read_text())
    reduction = json.loads((ROOT / "results/memory_reduction.json").read_text())
    texts = {ROOT / "README.md": {"demo": as_markdown(demo), "reduction": reduction_table(reduction)}}
    peaks = json.loads((ROOT / "results/activations.json").read_text())
    texts[ROOT / "README.md"] |= {
        "activations": activations.as_markdown(peaks),
        "bench": bench.as_markdown(json.loads((ROOT / "results/bench_cpu.json").read_text())),
        "alone": bench.alone_as_markdown(*(json.loads((ROOT / "results" / name).read_text()) for name in ALONE)),
        "capacity": capacity.as_markdown(json.loads((ROOT / "results/capacity_cpu.json").read_text())),
        "accumulated": as_markdown(json.loads((ROOT / "results/accumulated.json").read_text())),
        "equivalence": equivalence_table(json.loads((ROOT / "results/equivalence.json").read_text())),
        "scores": scores_table([json.loads(path.read_text()) for path in (ROOT / "results/scores").glob("*.json")]),
    }
    for row in demo["rows"]:
        texts[ROOT / row["engine"] / "README.md"] = {"measured": stage_table(demo, row)}
    return {path: fill(path.read_text(), parts) for path, parts in texts.items()}


def fill(page, parts):
    """Put each text between the markers of its name."""
    for name, text in parts.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        page = between.sub(lambda match, text=text: f"{match[1]}\n{text.strip()}\n\n{match[2]}", page)
    return page


def stage_table(demo, row):
    """One stage's measured and predicted bytes, as Markdown."""
    lines = ["| per rank | measured | predicted |", "| --- | ---: | ---: |"]
    for state, measured in row["model_state_bytes"].items():
        lines.append(f"| {state} | {measured:,} B | {row['predicted_model_state_bytes'][state]:,} B |")
    for collective, predicted in row["predicted_wire_bytes_per_step"].items():
        measured = row["wire_bytes_per_step"].get(collective, 0)
        lines.append(f"| {collective}, sent per step | {measured:,} B | {predicted:,} B |")
    where = f"{demo['model']}, {demo['parameters']:,} parameters, {demo['precision']}, {demo['world_size']} ranks"
    return "\n".join([f"Measured by `make demo` ({where}; {demo['hardware']}):", "", *lines])


def reduction_table(results):
    """The memory reduction by stage and world size, as Markdown."""
    lines = ["| ranks | " + " | ".join(ENGINES) + " |", "| ---: |" + " ---: |" * len(ENGINES)]
    cells = {(row["world_size"], row["engine"]): row for row in results["rows"]}
    for size in sorted({size for size, _ in cells}):
        row = [cells[size, engine] for engine in ENGINES]
        held = [f"{show_bytes(sum(c['model_state_bytes'].values()))} ({c['reduction']:.2f}x)" for c in row]
        lines.append(f"| {size} | " + " | ".join(held) + " |")
    return "\n".join(lines)


def equivalence_table(results):
    """How many cells of the matrix have which verdict, by precision and stage, as Markdown."""
    cells = results["cells"]
    lines = ["| precision | " + " | ".join(ENGINES) + " |", "| --- |" + " --- |" * len(ENGINES)]
    for precision in DTYPES:
        counts = (
            Counter(c["verdict"] for c in cells if (c["engine"], c["precision"]) == (engine, precision))
            for engine in ENGINES
        )
        lines.append(f"| {precision} | " + " | ".join(_in_words(count) for count in counts) + " |")
    sizes = ", ".join(map(str, sorted({cell["world_size"] for cell in cells})))
    return "\n".join([f"{len(cells)} cells at world sizes {sizes}; {results['hardware']}", "", *lines])


def scores_table(scores):
    """How every engine scores, as Markdown: verdicts, bytes per parameter, settings."""
    scores = sorted(scores, key=lambda score: (score["engine"] not in ENGINES, score["engine"]))
    parameters = sum(p.numel() for p in models.build(scores[0]["model"]).parameters())
    header = "| engine | bitwise | within a norm | fails | not claimed | held, bytes per parameter | sent |"
    lines = [header, "| --- |" + " ---: |" * 6]
    for score in scores:
        verdicts = Counter(score["verdicts"])
        near = verdicts["ulp"] + verdicts["tolerance"]
        counts = verdicts["bitwise"], near, verdicts["fail"], sum(score["not_claimed"].values())
        held = _at(score["bytes_held"])
        sent = _at(score["bytes_sent"])
        in_states = [sum(row[state] for state in ("parameters", "gradients", "optimizer")) for row in held]
        held = _per_parameter(zip(in_states, (row["formula"] for row in held), strict=True), parameters)
        sent = _per_parameter(((row["sent"], row["formula"]) for row in sent), parameters)
        lines.append("| " + " | ".join([score["name"], *map(str, counts), held, sent]) + " |")
    model = f"{scores[0]['model']} at {AT_RANKS} ranks, fp32 with AdamW"
    note = f"Bytes: {model}; in brackets the formula of the stage that the engine follows. {scores[0]['hardware']}."
    settings = [
        f"- `{score['engine']}` ({', '.join(f'{name} {version}' for name, version in score['versions'].items())}): "
        f"{score['settings']}"
        for score in scores
        if score["settings"]
    ]
    return "\n".join([*lines, "", note, "", *settings])


def _at(rows):
    return [row for row in rows if (row["world_size"], row["precision"]) == (AT_RANKS, "fp32")]


def _per_parameter(pairs, parameters):
    return "".join(f"{measured / parameters:.2f} ({formula / parameters:.2f})" for measured, formula in pairs) or "-"


def _in_words(counts):
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.items()) or "-"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
