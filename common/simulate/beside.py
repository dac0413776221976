"""What a simulation finds of a run, to stand beside what was measured of it."""

from contextlib import suppress

from common.errors import InputError
from common.measure.hardware import cpus
from common.simulate.hardware import this_machine
from common.simulate.world import Setting, simulate


def estimated(world, engine, options, step):
    """Peak and speed of a run, as they are simulated over the paths of this world's collectives. A collective.

    Args:
        world: the rank's World.
        engine: the class that was trained.
        options: of the training commands.
        step: as `simulate` takes it.

    Returns:
        {"estimated_peak_bytes", "estimated_tokens_per_second"}, the second None on a GPU, of which there is no
        measurement; and "ranks_share_cores": it is then a matter of who waits for whom, which is not simulated.
        {} of an engine of a user's own that reads values, of which a simulation has none.
    """
    on_gpu = world.device.type == "cuda"
    setting = setting_of(world, engine, options, None if on_gpu else this_machine(world, engine))
    with suppress(InputError):
        row = simulate(setting, step)
        speed = row["time"] and row["time"]["tokens_per_second"]
        found = {"estimated_peak_bytes": row["peak_bytes"], "estimated_tokens_per_second": speed}
        return {**found, "ranks_share_cores": not on_gpu and world.size > cpus()}
    return {}


def setting_of(world, engine, options, machine):
    """The Setting of a run; `machine` is the Hardware whose time is counted, or None."""
    return Setting(
        engine,
        options.model,
        world.size,
        rank=world.rank,
        precision=options.precision,
        bucket_mb=options.bucket_mb,
        clip_norm=options.clip_norm,
        batch=options.batch // (world.size * options.accumulate),
        checkpoint_activations=options.checkpoint_activations,
        offload_activations=options.offload_activations,
        accumulate=options.accumulate,
        no_sync=options.no_sync,
        own={"deterministic": options.deterministic, **getattr(options, "own", {})},
        backend="nccl" if world.device.type == "cuda" else "gloo",
        hardware=machine,
    )
