"""Programs of two ranks that end in different ways, without closing the engine. Prints {program: [exit codes]}.

    python tests/programs/programs_that_end.py FOLDER STAGE:END ...     ranks find each other in the folder

Each rank is a fork of this process, which imports torch once for all, and ends like any Python program.
"""

import datetime
import functools
import importlib
import json
import os
import sys

import torch
import torch._dynamo  # otherwise an optimizer's first step imports it in every fork
import torch.distributed as dist
from torch import nn

STAGES = {name: importlib.import_module(name) for name in ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")}


def after_a_step(engine):
    """The program ends after a step."""


def after_a_forward(engine):
    engine(torch.ones(2, 256))


def after_destroying_the_group(engine):
    dist.destroy_process_group()


def in_a_cycle(engine):
    engine.itself = engine
    engine(torch.ones(2, 256))
    dist.destroy_process_group()


ENDS = {end.__name__: end for end in (after_a_step, after_a_forward, after_destroying_the_group, in_a_cycle)}


def train(stage, end, rank, file):
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)))
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3)
    engine = STAGES[stage].Engine(model, adamw, bucket_mb=0.5)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 256)).square().mean())
        engine.step()
    end(engine)


def main(folder, *programs):
    """Run programs, each in forks of this process; the forks return from here."""
    codes = {}
    for program in programs:
        stage, end = program.split(":")
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                return train(stage, ENDS[end], rank, f"{folder}/{program}")
            children.append(child)
        codes[program] = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    print(json.dumps(codes))


if __name__ == "__main__":
    main(*sys.argv[1:])
