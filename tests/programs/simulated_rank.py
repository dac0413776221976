"""Rank 0 of a simulated world on fake tensors: `python simulated_rank.py STAGE MODEL WORLD_SIZE PRECISION`.

It prints what it counted of a step; in 16-bit, of one that accumulates.

No value is computed and nothing travels; shapes, storages and collectives are those of a real rank.
"""

import json
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from training import make_engine

from common import models
from common.measure.memory import Timeline


def simulate(stage, model, world_size, precision):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    with FakeTensorMode():
        engine = make_engine(stage, models.build(model), bucket_mb=8.0, precision=precision)
        windows = torch.zeros(2, engine.module.window, dtype=torch.uint8)
        inputs, targets = engine.module.inputs_and_targets(windows)
        for step in range(2):  # with the second everything is there
            engine.comm.traffic.reset()
            with Timeline(engine) if step else nullcontext() as timeline:
                for _ in range(1 if precision == "fp32" else 2):
                    engine.backward(models.loss(engine(inputs), targets))
                engine.step()
    return {
        "model_state_bytes": engine.model_state_bytes(),
        "predicted_model_state_bytes": engine.predicted_model_state_bytes(),
        "wire_bytes": engine.comm.traffic.by_collective(),
        "predicted_wire_bytes": engine.predicted_wire_bytes_per_step(),
        "peaks": {name: timeline.peak_of(name) for name in timeline.samples[0][1]},
    }


if __name__ == "__main__":
    stage, model, world_size, precision = sys.argv[1:]
    print(json.dumps(simulate(stage, model, int(world_size), precision)))
