"""The notebooks as they are stored, and as they run: a copy in memory runs, by default a shorter one."""

import re

import nbformat
from places import ROOT

from course.execute import execute

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

MORE = {  # run after a notebook's last cell: right answers, then wrong ones
    "00_start_here": {
        "solutions": """
states = lambda stage, n, parameters: parameters * (16, 8 + 8 / n, 4 + 12 / n, 16 / n)[stage]
sent = lambda stage, n, parameters: 4 * (n - 1) / n * (2 * parameters + GATHERED_TWICE * (stage == 3))
questions.by_stage(states, results, "model_state_bytes")
questions.by_stage(sent, results, "wire_bytes_per_step")
questions.stage_and_ranks((2, 7))""",
        "mistakes": """
questions.by_stage(lambda stage, n, parameters: 16 * parameters, results, "model_state_bytes")
questions.by_stage(lambda stage, n, parameters: 8 * (n - 1) / n * parameters, results, "wire_bytes_per_step")
for choice in ((1, 44), (2, 6), (2, 8), (3, 4)):
    questions.stage_and_ranks(choice)""",
    }
}

# Cells that ask a question, by id; the open answer in them; and values in the form of no answer.
ASKS = ("question-", "exercise-", "factor")
OPEN = re.compile(r"(return|=|:) None\b")
UNFIT = ("'text'", "{...}", "(8, 'text')", "[[]]", "float('nan')", "print")

# Run before anything is drawn: every axis must have a label, or names along it.
LABELLED = """
def _names(axis):
    return axis.get_label_text() or any(c.isalpha() for tick in axis.get_ticklabels() for c in tick.get_text())

def _show_labelled(alt, show=show):
    for figure in map(plt.figure, plt.get_fignums()):
        figure.canvas.draw()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
                ticks = [tick.get_text() for tick in axis.get_ticklabels() if tick.get_visible()]
                whole = figure.get_supxlabel() if axis is axes.xaxis else figure.get_supylabel()
                assert not any(ticks) or whole or _names(axis), (axes.get_title(), axis.axis_name)
    show(alt)

show = _show_labelled
"""

# Shortened by default, as the rest takes long and shows no more: {notebook: [(a cell's text, its replacement)]}.
SHORTER = {
    "00_start_here": [("RANKS = 4 ", "RANKS = 2 "), ("--steps 12 ", "--steps 5 ")],
    "05_throughput": [("ROUNDS = 8 ", "ROUNDS = 3 "), ("STEPS = 40", "STEPS = 8"), ("settings, 7)", "settings, 4)")],
    "06_memory": [("steps=9)", "steps=2)")],
    "08_offload": [("STEPS, RATES = 40, ", "STEPS, RATES = 10, ")],
    "11_precision": [("STEPS = 160", "STEPS = 24"), ("in (0, 6, 12, 18, 24):", "in (0, 18):")],
}


def read(path):
    return nbformat.read(path, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def executed(path, shorter):
    """The code cells of a notebook after its last one, with questions answered in wrong forms at the end."""
    notebook = read(path)
    for told, less in SHORTER.get(path.stem, []) if shorter else []:
        (cell,) = [cell for cell in code(notebook) if told in cell.source]
        cell.source = cell.source.replace(told, less)
    notebook.cells += [unfit(cell) for cell in code(notebook) if cell.id.startswith(ASKS)]
    notebook.cells += [nbformat.v4.new_code_cell(source, id=name) for name, source in MORE.get(path.stem, {}).items()]
    imports = next(number for number, cell in enumerate(notebook.cells) if cell.id == "imports")
    notebook.cells.insert(imports + 1, nbformat.v4.new_code_cell(LABELLED))
    return code(execute(notebook, path.parent))


def unfit(question):
    """A cell that gives a question's cell answers in wrong forms, one after the other."""
    asked = [OPEN.sub(rf"\1 {answer}", question.source) for answer in UNFIT]
    return nbformat.v4.new_code_cell("\n\n\n".join(asked), id=f"unfit-{question.id}")


def stored(page, cell):
    """What a cell printed when its notebook was stored."""
    return next(printed(each) for each in code(read(ROOT / "notebooks" / f"{page}.ipynb")) if each.id == cell)


def printed(cell):
    return "".join(out.text for out in cell.outputs if out.output_type == "stream" and out.name == "stdout")


# A figure in prose: with decimals, with thousands, or before a unit; in words of a question it may be any.
FIGURE = re.compile(
    r"(?<![\w.,^])(\d{1,3}(?:,\d{3})+|\d+\.\d+|\d+(?=\s(?:[kMGT]?B|times|ms|µs|percent|%|million|billion)\b))(?![\w,]?\d)"
)
NO_PROSE = re.compile(r"\]\([^)]*\)|arXiv\s+[\d.]+|sec\. [\d.]+|`[^`]*`")
NUMBER = re.compile(r"\d[\d,_]*(?:\.\d+)?|\.\d+")


def said(notebook):
    """The figures in a notebook's prose, and in what stands for its pictures."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    outputs = [out for cell in code(notebook) for out in cell.outputs if "image/png" in out.get("data", {})]
    texts += [out.metadata["image/png"]["alt"] for out in outputs]
    return {figure for text in texts for figure in FIGURE.findall(NO_PROSE.sub("]", text))}


def numbers_in(text):
    return {number.replace(",", "").replace("_", "").rstrip(".") for number in NUMBER.findall(text)}


def told(notebook):
    """The numbers that stand in its cells, pictures' texts aside, and in what these have printed."""
    texts = [re.sub(r"^show\([^`]*?^\)", "", cell.source, flags=re.MULTILINE) for cell in code(notebook)]
    for out in (out for cell in code(notebook) if cell.id != "quiz" for out in cell.outputs):
        texts += [out.get("text", ""), *(out.get("data", {}).get(f"text/{kind}", "") for kind in ("markdown", "html"))]
    return numbers_in("\n".join(texts))
