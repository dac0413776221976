"""What a rank holds after a step on gpt-nano and sends per step, and the formula that an engine is held to."""

import formulas
import torch.distributed as dist
from training import follows, make_engine, or_reason, train_step, zoo_engine

from common import models
from common.engines import find_engine
from lab.sockets import bytes_sent_by_own_sockets

MODEL = "gpt-nano"
PARAMETERS = models.count(models.build(MODEL))


def formula_of(engine, what, size, precision="fp32"):
    """A rank's "bytes_held" or "bytes_sent" by the formula of the stage that an engine follows, or by its own."""
    own = getattr(find_engine(engine), what, None)
    if own is not None:
        return own(models.build(MODEL), size)
    return getattr(formulas, what)(follows(engine), size, precision) * PARAMETERS


@or_reason
def holds(world, engine, **options):
    """Bytes of model states that a rank holds after a step."""
    made = zoo_engine(world, engine, MODEL, bucket_mb=0.5, **options)
    return made.model_state_bytes()


@or_reason
def sends(world, engine, **options):
    """Bytes that a rank sends in a step, by the kernel's counters."""
    made = make_engine(engine, MODEL, bucket_mb=0.5, **options)
    before = 0
    for step in range(3):  # the first steps set up connections and record orders
        dist.barrier()
        before = bytes_sent_by_own_sockets()
        train_step(made, world, step)
        made.synchronize()
    dist.barrier()
    return bytes_sent_by_own_sockets() - before
