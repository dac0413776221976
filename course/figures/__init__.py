"""Pictures that the notebooks draw: of what the course looks at, and those of `lab.figures`."""

from course.figures.building import states_through_a_step, units_through_a_step
from course.figures.faults import distances, grid, live_through_steps
from course.figures.memory import address_map, below_the_wall, memory_by_batch
from course.figures.planned import crossovers, over_gpus, rank_through_a_step, roofline
from course.figures.tiers import (
    delayed_losses,
    distance_by_rate,
    efficiency_by_bandwidth,
    moves_by_phase,
    states_by_tier,
    units_by_event,
)
from course.figures.wire import (
    batch_and_bucket,
    beside,
    messages,
    moved,
    ring_and_direct,
    rounds,
    where_time_goes,
)
from lab.figures.records import activation_memory, bench, capacity, growth, largest_models, step_times
from lab.figures.scaling import scaling
from lab.figures.stages import memory_by_stage, memory_timeline, throughput, wire_by_phase
from lab.figures.style import COLORS, LABELS, PALETTE, save, smoothed

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
