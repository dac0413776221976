"""Probes of the stages, in addition to the matrix: small trainings that need no baseline, or bring their own."""

from late_lanes import on_lane
from planting import broken
from training import inputs, same_bits, small_engine
from trap_models import CASES, loss

from common.engine.mixed_precision import overflow_flag

# ---- what is sent -----------------------------------------------------------------------------------------


def gradients_travel_once(case, world, engine, folder):
    """However often a forward uses a weight, one backward reduces its gradient once."""
    make, run = CASES[case]
    made = small_engine(world, engine, make=make, steps=1, run=run)
    made.comm.traffic.reset()
    run(made, inputs(world, 1))
    sent, predicted = made.comm.traffic.by_collective(), made.predicted_wire_bytes_per_step()
    reductions = ("all_reduce", "reduce_scatter")
    return broken(sent=all(sent.get(name) == predicted.get(name) for name in reductions))


# ---- norms and clipping -------------------------------------------------------------------------------------------


def norm_is_that_of_the_gradient(world, engine, folder):
    """In float64: fp32's squares of small numbers would underflow."""
    norms = []
    for factor in (1.0, 2.0**-80):
        made = small_engine(world, engine, clip_norm=1e3)
        made.backward(loss(made(inputs(world, 0))) * factor)
        norms.append(made.step().norm)
    return broken(small_numbers=norms[1] == norms[0] * 2.0**-80)


# ---- what is read when ----------------------------------------------------------------------------------------------


def no_bit_depends_on_when_the_lane_runs(world, engine, folder, prompt=()):
    """If collectives and copies run only when they are waited for, a training ends with the baseline's bits."""
    how = {"bucket_mb": 1e-6, "steps": 3}
    reference = small_engine(world, "baseline:AverageAfterBackward", **how).full_state_dict()
    with on_lane("late", world.rank, prompt):
        return broken(weights=same_bits(small_engine(world, engine, **how).full_state_dict(), reference))


def no_bit_depends_on_when_the_bus_runs(world, engine, folder):
    """If copies run late, and the host steps as early as allowed, a training ends with the baseline's bits."""
    return no_bit_depends_on_when_the_lane_runs(world, engine, folder, prompt=("host",))


# ---- loss scale and overflow --------------------------------------------------------------------------------------


def overflow_is_agreed(world, engine, folder):
    """An overflow in one rank's gradients makes every rank skip."""
    made = small_engine(world, engine, "fp16")
    made.backward(loss(made(inputs(world, 0))))
    if world.rank == world.size - 1:
        made.buckets[0].gradient_shard[0] = float("inf")
    return broken(flag=bool(overflow_flag(made.buckets, made.comm) > 0))
