# ruff: noqa: F401
"""Pictures of what was counted. Each function draws onto an Axes that it is given, or returns a Figure.

`style` has the colours, `stages` sets stages beside each other, `records` draws what the commands record.
"""

from lab.figures.records import activation_memory, bench, capacity, scaling
from lab.figures.stages import comparison, memory_by_stage, memory_timeline, throughput, timelines, wire_by_phase
from lab.figures.style import PALETTE, described, save, smoothed
