"""Pictures of what was counted. Each function draws onto an Axes that it is given, or returns a Figure.

`style` has the colours, `stages` sets stages beside each other, `records` draws what the commands record.
"""

from lab.figures.records import activation_memory, bench, capacity, growth, largest_models, step_times
from lab.figures.scaling import scaling
from lab.figures.stages import comparison, memory_by_stage, memory_timeline, throughput, timelines, wire_by_phase
from lab.figures.style import COLORS, LABELS, PALETTE, save, smoothed

__all__ = [
    "COLORS",
    "LABELS",
    "PALETTE",
    "activation_memory",
    "bench",
    "capacity",
    "comparison",
    "growth",
    "largest_models",
    "memory_by_stage",
    "memory_timeline",
    "save",
    "scaling",
    "smoothed",
    "step_times",
    "throughput",
    "timelines",
    "wire_by_phase",
]
