"""The texts of the engines, and what each stage has changed of the one before."""

import ast

from places import ROOT

SOURCES = {"offload": "offload/cpu.py", "offload.nvme": "offload/nvme.py"}  # others have an engine.py
# What a stage has changed of the methods it shares with the stage before. All others are the same text.
CHANGED_METHODS = {
    "stage1_os": {"owned", "sends", "reduce", "update"},
    "stage2_grad": {"owned", "partition", "begin_backward", "gradient_ready", "reduce"},
    "stage3_param": {"owned", "sends", "partition", "begin_backward", "gradient_ready", "reduce", "finish_backward"}
    | {"no_sync", "update", "gather"},
    "offload": {"sends", "partition", "reduce", "update", "gather", "synchronize"},
}


def source(stage):
    return (ROOT / SOURCES.get(stage, f"{stage}/engine.py")).read_text()


def methods(stage):
    text = source(stage)
    (engine,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    return {f.name: ast.get_source_segment(text, f) for f in engine.body if isinstance(f, ast.FunctionDef)}
