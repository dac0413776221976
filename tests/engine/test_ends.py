"""An engine leaves nothing behind: programs end cleanly after any call, and deleting it frees what it held."""

import gc
import json
import os
import weakref

import pytest
import torch
from commands import run
from places import ROOT
from training import ALL, inputs, small_engine
from trap_models import Net, step

from common.engine.hooks import Hook
from common.measure.memory import storage_bytes

ENDS = ("after_a_step", "after_a_forward", "after_destroying_the_group", "in_a_cycle")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA does not survive a fork")
def test_a_program_ends_cleanly_whatever_it_called_last(tmp_path, stage):
    programs = [f"{stage}:{end}" for end in ENDS]
    ended = run("tests/programs/programs_that_end.py", tmp_path, *programs, PYTHONPATH=str(ROOT))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {program: [0, 0] for program in programs}
    assert "terminate" not in ended.stderr


def live_bytes():
    plain = (torch.Tensor, torch.nn.Parameter)  # other subclasses are the compiler's and hold no bytes
    return storage_bytes(found for found in gc.get_objects() if type(found) in plain)


HELD = [(name, {}) for name in ALL]
HELD += [("offload", {"ratio": 0.5, "delayed_update": True}), ("offload.nvme", {"tiers": "cpu"})]
HELD += [("zeropp", {"ranks_per_node": 1, "error_feedback": True})]  # secondary shards, and scales of rounded values


@pytest.mark.parametrize(("name", "options"), HELD, ids=str)
def test_an_engine_that_is_deleted_frees_what_it_held_and_takes_its_hooks_along(world, name, options):
    """Without the garbage collector."""
    small_engine(world, name, **options)  # so that one-time allocations exist
    gc.collect()
    gc.disable()
    try:
        before = live_bytes()
        for _ in range(3):
            made = small_engine(world, name, make=Net, **options)
            step(made, inputs(world, 0))
            made.synchronize()  # a delayed host step holds its shard
            made.comm.lane.finish()  # and a lane its pending work
            life = weakref.ref(made)
            del made
            assert live_bytes() == before
            assert life() is None
        made = small_engine(world, name, make=Net, **options)
        module = made.module
        del made
        kinds = [hooks for m in module.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        kinds += [p._post_accumulate_grad_hooks or {} for p in module.parameters()]
        assert not any(isinstance(hook, Hook) for hooks in kinds for hook in hooks.values())
    finally:
        gc.enable()
