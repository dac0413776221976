"""Pictures of what was counted. Each function draws onto an Axes that it is given, or returns a Figure.

`style` has the colours, `stages` sets stages beside each other, `records` draws what the commands record, `wire` what
moved between ranks and when.
"""

from common.measure.figures.records import activation_memory, bench, capacity, growth, largest_models, step_times
from common.measure.figures.stages import comparison, memory_by_stage, memory_timeline, throughput, wire_by_phase
from common.measure.figures.style import COLORS, LABELS, PALETTE, save
from common.measure.figures.wire import (
    batch_and_bucket,
    beside,
    messages,
    moved,
    ring_and_direct,
    rounds,
    where_time_goes,
)

__all__ = [
    "COLORS",
    "LABELS",
    "PALETTE",
    "activation_memory",
    "batch_and_bucket",
    "bench",
    "beside",
    "capacity",
    "comparison",
    "growth",
    "largest_models",
    "memory_by_stage",
    "memory_timeline",
    "messages",
    "moved",
    "ring_and_direct",
    "rounds",
    "save",
    "step_times",
    "throughput",
    "where_time_goes",
    "wire_by_phase",
]
