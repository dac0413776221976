"""`python -m common.readme`: write the recorded results into the READMEs, between their markers.

So every figure there comes from a file under results/, which names its hardware. A test holds the pages to the files.
"""

import json
import re
from pathlib import Path

from common import activations
from common.compare import as_markdown
from common.train import ENGINES, show_bytes

ROOT = Path(__file__).parent.parent


def pages():
    """The READMEs as they should read: {path: text}."""
    demo = json.loads((ROOT / "results/demo.json").read_text())
    reduction = json.loads((ROOT / "results/memory_reduction.json").read_text())
    texts = {ROOT / "README.md": {"demo": as_markdown(demo), "reduction": reduction_table(reduction)}}
    peaks = json.loads((ROOT / "results/activations.json").read_text())
    texts[ROOT / "README.md"]["activations"] = activations.as_markdown(peaks)
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


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
