"""The largest GPT that this machine's disk holds, trained a few steps by its memory.

Everything lies on disk, 16 bytes of a parameter in fp32, so that the free space there sets the number of layers. Memory
must hold what is in use: units that are read and written, whose size does not depend on how many there are.

Source: ZeRO-Infinity, arXiv 2104.07857, sec. 8.2, where one node trains a trillion parameters.
"""

import os
import shutil
import tempfile
import time
from functools import partial

import torch

from common import models
from common.data import Batches, load_text
from common.errors import InputError
from common.loop import train_step
from common.measure.hardware import hardware
from common.measure.memory import high_water
from common.measure.tables import Table, show_bytes
from common.outputs import asked, check_counts, one_line_errors, parser_of, progress_bar, tell
from common.ranks.world import launch
from lab import capacity
from offload.nvme import InfinityEngine

BYTES = 16  # on disk, of a parameter: weight, gradient, two moments, in fp32
SEQUENCE = 64  # tokens of the one sample
SPARE = 0.05  # of the disk's free space, which stays free


@one_line_errors()
def main(arguments=None):
    """Parse the arguments, train, show and write the results."""
    parser = parser_of("lab.offload.largest", __doc__)
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a folder on the disk (default: %(default)s)")
    parser.add_argument("--width", type=int, default=4096, help="of the layers (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="(default: as many as the disk holds)")
    parser.add_argument("--steps", type=int, default=2, help="(default: %(default)s)")
    options = asked(parser, arguments)
    if not os.path.isdir(options.path):
        raise InputError(f"--path {options.path}: there is no such folder; make it first")
    check_counts(options, "width", "steps", "layers")
    tell(options, launch(train, options, nproc=1), table)


def build(options, layers):
    """A GPT of so many layers on the meta device, with activation checkpoints."""
    heads = max(1, options.width // 128)
    return capacity.build(layers, {"width": options.width, "heads": heads, "sequence": SEQUENCE})


def layers_on(free, options):
    """The most layers whose states fit into so many bytes of disk; an InputError if not even one does."""
    one, two = (BYTES * models.count(build(options, layers)) for layers in (1, 2))
    layers = 1 + int((free - one) // (two - one))
    if layers < 1:
        raise InputError(
            f"--path {options.path}: {show_bytes(free)} are free there, and one layer takes {show_bytes(one)}"
        )
    return layers


def train(world, options):
    """Build the model on disk and train it; time every step: the JSON of `lab.offload.largest`."""
    capacity.give_back_freed_memory()  # a local rank keeps it, to be faster
    free = int(shutil.disk_usage(options.path).free * (1 - SPARE))
    layers = options.layers or layers_on(free, options)
    with tempfile.TemporaryDirectory(prefix="zero-largest-", dir=options.path, ignore_cleanup_errors=True) as folder:
        model, optimizer = build(options, layers), partial(torch.optim.AdamW, lr=1e-4, fused=True)
        began = time.perf_counter()
        engine = InfinityEngine(model, optimizer, tiers="nvme", path=folder, init=models.initial_values(seed=0))
        building = time.perf_counter() - began
        batches, steps = Batches(load_text(), model.window, 1), []
        with progress_bar() as bar:
            for step in bar.track(range(options.steps), description=f"{layers} layers"):
                engine.comm.traffic.reset()
                began = time.perf_counter()
                loss, _ = train_step(engine, [model.inputs_and_targets(batches.of(step, 0, 1).to(world.device))])
                steps.append({"seconds": time.perf_counter() - began, "loss": loss.item()})
        measured = engine.accounting.measured()
        return {
            "hardware": hardware(world.device),
            "width": options.width,
            "layers": layers,
            "sequence": SEQUENCE,
            "parameters": models.count(model),
            "building_seconds": building,
            "steps": steps,
            **{name: measured[name] for name in ("disk_bytes_per_step", "disk_state_bytes", "model_state_bytes")},
            "predicted_disk_state_bytes": engine.accounting.predicted()["disk_state_bytes"],
            "resident_peak_bytes": high_water(world.device),
        }


def table(results):
    """What was held, moved and waited for."""
    title = (
        f"GPT of {results['layers']} layers of width {results['width']}, {results['parameters'] / 1e9:.2f} B "
        f"parameters, all states on disk, fp32, 1 rank\n{results['hardware']}"
    )
    moved = results["disk_bytes_per_step"]
    rows = [
        ("model states on disk", show_bytes(sum(results["disk_state_bytes"].values()))),
        ("model states on the device", show_bytes(sum(results["model_state_bytes"].values()))),
        ("resident at the peak", show_bytes(results["resident_peak_bytes"])),
        ("read, written per step", ", ".join(show_bytes(moved[way]) for way in ("read", "write"))),
        ("time to build", f"{results['building_seconds']:.0f} s"),
        ("time per step", ", ".join(f"{step['seconds']:.0f} s" for step in results["steps"])),
        ("loss", ", ".join(f"{step['loss']:.3f}" for step in results["steps"])),
    ]
    return Table(title, ("", ""), rows)


if __name__ == "__main__":
    main()
