"""Pictures of what was counted. Each function draws onto an Axes that it is given, or returns a Figure.

`style` has the colours, `stages` sets stages beside each other, `records` draws what the commands record.
"""

from common.measure.figures.records import activation_memory, bench, capacity, growth, largest_models, step_times
from common.measure.figures.stages import comparison, memory_by_stage, memory_timeline, throughput, wire_by_phase
from common.measure.figures.style import COLORS, LABELS, PALETTE, save

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
    "step_times",
    "throughput",
    "wire_by_phase",
]
