"""An engine's checkpoint as a universal checkpoint of DeepSpeed: what `ds_to_universal` makes of DeepSpeed's own.

DeepSpeed reads it with `"checkpoint": {"load_universal": true}` in the configuration, at stages 1 to 3:

    latest_universal                      the name of the folder next to it
    step_7_universal/
        mp_rank_00_model_states.pt        counters; for stage 3 with zero_pp_rank_0_ before it
        zero/optimizer_state.pt           the optimizer's groups
        zero/wte.weight/fp32.pt           a parameter, whole; also exp_avg.pt, exp_avg_sq.pt, step.pt

It holds no more than that, and DeepSpeed reads no more: anything else in a checkpoint, such as buffers and frozen
parameters, would silently stay as the script built it. So a checkpoint that has them is refused.

Source: deepspeed/checkpoint/ds_to_universal.py and universal_checkpoint.py of DeepSpeed 0.19.8.
"""

import os

import torch

from common.checkpoint.encoding import decode
from common.errors import InputError

RELEASE = "0.19.8"  # the one that it was tried with


def write(index, saved, folder):
    """Write a checkpoint's weights and states into a folder, as `to_dcp.write` does. It holds a parameter at a time.

    Raises:
        InputError: the checkpoint has something that DeepSpeed would ignore.
        OSError: the folder could not be written.
    """
    _check(index)
    groups, steps = decode(index["groups"], saved), index["updates"]
    inner = folder / f"step_{steps}_universal"
    for name, parameter in index["parameters"].items():
        place = inner / "zero" / name
        place.mkdir(parents=True)
        for what, file in {
            "parameters": "fp32",
            "optimizer/exp_avg": "exp_avg",
            "optimizer/exp_avg_sq": "exp_avg_sq",
        }.items():
            whole = torch.empty(parameter["shape"])
            saved.read(f"{what}/{name}", 0, whole.view(-1))
            _save({"param": whole, "cat_dim": 0}, place / f"{file}.pt")
        step = decode(parameter["scalars"], saved)["step"]
        _save(step, place / "step.pt")
    optimizer = {"param_groups": groups, "ds_version": RELEASE}
    if all(group == groups[0] for group in groups):  # stage 3 reads the first one's options for all, from here
        optimizer["optimizer_state_dict"] = {"state": {0: {"step": step}}, "param_groups": groups[:1]}
    _save(optimizer, inner / "zero" / "optimizer_state.pt")
    counters = {"global_steps": steps, "skipped_steps": 0, "dp_world_size": index["world_size"], "mp_world_size": 1}
    for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):  # stage 3 looks for the second
        _save(counters, inner / f"{name}_model_states.pt")
    (folder / "latest_universal").write_text(inner.name)


def _save(value, file):
    with open(file, "wb") as opened:  # given a path, torch reports a full disk by a RuntimeError
        torch.save(value, opened)
        opened.flush()
        os.fsync(opened.fileno())


def _check(index):
    """Refuse by name what DeepSpeed cannot load."""
    for kind, names in {"buffers": index["buffers"], "extra state": index["extra_state"]}.items():
        for name in names:
            raise InputError(f"DeepSpeed skips {kind} here, and {name!r} is one; choose another --format")
    for name, parameter in index["parameters"].items():
        if parameter["group"] is None:
            raise InputError(f"DeepSpeed skips frozen parameters here, and {name!r} is one; choose another --format")
        if set(parameter["states"]) != {"exp_avg", "exp_avg_sq"}:
            raise InputError(
                f"DeepSpeed reads the states of Adam, exp_avg and exp_avg_sq, and {name!r} has {parameter['states']}"
            )
