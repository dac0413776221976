# ruff: noqa: F401
"""The notebooks' figures: those of the course, and those of `lab.figures`."""

from course.figures.axes import buffers, by_rank_and_axis, kept_through_a_step, schedules
from course.figures.building import states_through_a_step, units_through_a_step
from course.figures.faults import distances, grid, live_through_steps
from course.figures.memory import address_map, below_the_wall, memory_by_batch
from course.figures.planned import crossovers, over_gpus, roofline, token_weights, worst_moment
from course.figures.tiers import (
    delayed_losses,
    distance_by_rate,
    efficiency_by_bandwidth,
    moves_by_phase,
    states_by_tier,
    units_by_event,
)
from course.figures.wire import batch_and_bucket, beside, messages, moved, ring_and_direct, rounds, where_time_goes
from lab.figures import capacity, comparison, memory_timeline, throughput
