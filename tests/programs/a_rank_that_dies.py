"""Training in which the last rank is killed in the middle of a collective: `python a_rank_that_dies.py STAGE`.

Run by torchrun on three ranks. The others outlive torchrun's request to end, to report what they know.
"""

import itertools
import os
import signal
import sys

from training import make_engine, train_step

from common.ranks.world import launch

AT = 20  # the message at which it dies: mid-step, after this collective sent to one of two peers


def train(world, stage):
    engine = make_engine(stage)
    train_step(engine, world)
    if world.rank == world.size - 1:
        send, number = engine.comm._send, itertools.count(1)
        engine.comm._send = lambda *sent: os.kill(os.getpid(), signal.SIGKILL) if next(number) == AT else send(*sent)
    for step in range(1, 10):
        train_step(engine, world, step)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    launch(train, sys.argv[1], nproc=3, oversubscribe=True, timeout=30)
