"""The engines' sources, and what each stage changes of the one before."""

import ast
import io
import tokenize

from places import ROOT

SOURCES = {"offload": "offload/cpu.py", "offload.nvme": "offload/nvme.py"}  # others have an engine.py
SOURCES["notebooks.exercises.overlap"] = "notebooks/exercises/overlap.py"
# The shared methods that a stage changes from the stage before. All others are the same text.
CHANGED_METHODS = {
    "stage1_os": {"owned", "sends", "reduce", "update"},
    "stage2_grad": {"owned", "partition", "begin_backward", "gradient_ready", "reduce"},
    "stage3_param": {"owned", "sends", "partition", "begin_backward", "gradient_ready", "reduce", "finish_backward"}
    | {"update", "gather"},
    "offload": {"sends", "partition", "reduce", "update", "gather", "synchronize"},
}


def source(stage):
    return (ROOT / SOURCES.get(stage, f"{stage}/engine.py")).read_text()


def methods(stage):
    text = source(stage)
    (engine,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {f.name: ast.get_source_segment(text, f) for f in engine.body if isinstance(f, ast.FunctionDef)}


def code_lines(text):
    """The number of lines of code in a Python file, without blank lines, comments and docstrings."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)
