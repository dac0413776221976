# ruff: noqa: F401
"""Figures of the measurements. Each function draws onto a given Axes, or returns a Figure.

`style` has the colours, `stages` compares stages, `records` draws what the commands record.
"""

from lab.figures.records import activation_memory, bench, capacity, scaling
from lab.figures.stages import comparison, memory_timeline, throughput, timelines
from lab.figures.style import PALETTE, described, save, smoothed
