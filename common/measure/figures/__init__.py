"""Pictures of what was counted. Each function draws onto an Axes that it is given, or returns a Figure.

`style` has the colours, `stages` sets stages beside each other, `records` draws what the commands record; `building`,
`wire`, `memory`, `tiers`, `rounding`, `planned` and `faults` what the course looks at.
"""

from common.measure.figures.building import states_through_a_step, units_through_a_step
from common.measure.figures.faults import distances, grid, live_through_steps
from common.measure.figures.memory import address_map, below_the_wall, memory_by_batch
from common.measure.figures.planned import crossovers, over_gpus, rank_through_a_step, roofline
from common.measure.figures.records import activation_memory, bench, capacity, growth, largest_models, step_times
from common.measure.figures.scaling import scaling
from common.measure.figures.stages import comparison, memory_by_stage, memory_timeline, throughput, wire_by_phase
from common.measure.figures.style import COLORS, LABELS, PALETTE, save, smoothed
from common.measure.figures.tiers import (
    delayed_losses,
    distance_by_rate,
    efficiency_by_bandwidth,
    moves_by_phase,
    states_by_tier,
    units_by_event,
)
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
    "address_map",
    "batch_and_bucket",
    "below_the_wall",
    "bench",
    "beside",
    "capacity",
    "comparison",
    "crossovers",
    "delayed_losses",
    "distance_by_rate",
    "distances",
    "efficiency_by_bandwidth",
    "grid",
    "growth",
    "largest_models",
    "live_through_steps",
    "memory_by_batch",
    "memory_by_stage",
    "memory_timeline",
    "messages",
    "moved",
    "moves_by_phase",
    "over_gpus",
    "rank_through_a_step",
    "ring_and_direct",
    "roofline",
    "rounds",
    "save",
    "scaling",
    "smoothed",
    "states_by_tier",
    "states_through_a_step",
    "step_times",
    "throughput",
    "units_by_event",
    "units_through_a_step",
    "where_time_goes",
    "wire_by_phase",
]
