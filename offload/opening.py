"""Open the tiers in which an engine places its states, after checking that there is room in them."""

import socket
from collections import defaultdict

from common.errors import InputError
from common.measure.hardware import available, private_left
from common.measure.memory import storage_bytes
from common.ranks.agreement import check_agreement
from common.ranks.collectives import SEGMENT
from common.tiers.memory import Device, Host
from offload.accounting import predicted_in
from offload.disk import Disk
from offload.swap import PAGE, padded


def open_tiers(engine, read_ahead):
    """Open the tiers of an engine that is cut into units; set its `tier` and `sub_group`.

    `read_ahead` is how many units are prefetched.

    Raises:
        InputError: on every rank: there is too little room, or the path cannot be used.
    """
    comm, buckets = engine.comm, [bucket for unit in engine.units for bucket in unit.buckets]
    names, largest = engine.tiers, max(bucket.shard_numel for bucket in buckets)
    on_disk = "nvme" in names.values()
    pages = max(1, int(engine.sub_group_mb * 2**20 / 4) // PAGE) if on_disk else largest
    engine.sub_group = min(pages, -(-largest // PAGE)) * PAGE  # elements: whole pages in every dtype
    engine.tier = {"device": Device(comm), "cpu": Host(comm), "nvme": None}
    disk = problem = None
    try:
        if on_disk:
            disk = engine.tier["nvme"] = Disk(comm, engine.path, engine.sub_group)
            disk.file.reserve(sum(predicted_in("nvme", engine, buckets).values()))
            widest = max(4, *engine.state_bytes, *(bucket.kind.dtype.itemsize for bucket in buckets))
            disk.stepping.nbytes = padded(widest * engine.sub_group)
            disk.stepping.number = 3 * (3 + len(engine.state_bytes))  # with masters, gradient, new parameters
            disk.shards.nbytes = padded(max(b.shard_numel * b.kind.dtype.itemsize for b in buckets))
            disk.shards.number = (1 + read_ahead) * max(len(unit.buckets) for unit in engine.units)
    except (InputError, OSError) as error:
        problem = InputError(f"rank {comm.rank}: {error}")
    try:
        check_agreement(problem or [], comm, "the check of the disks")
        check_shared(sum(predicted_in("cpu", engine, buckets).values()), comm)
    except InputError:
        if disk is not None:
            disk.file.close()  # now, so that another engine has the space
        raise
    if disk is not None and comm.rank == 0 and not disk.file.direct:
        disk.file.notice()


def check_room(engine, buckets):
    """Check, before buckets get storage, that the host and the device can hold them.

    Raises:
        InputError: on every rank: a machine has too little shared memory for its ranks, or a rank's limit on private
            memory is too low.
    """
    comm = engine.comm
    trained = [bucket for bucket in buckets if bucket.kind.trainable]
    needed = sum(predicted_in("cpu", engine, buckets).values())
    in_fp32 = [bucket.shard_numel * 4 * bucket.sixteen_bit for bucket in trained]  # gradients on their way to a step
    needed += max(in_fp32, default=0)
    on_device = sum(predicted_in("device", engine, buckets).values())
    on_device -= storage_bytes(parameter for bucket in buckets for parameter in bucket.members.values())  # give way
    in_flight = [0, *sorted(bucket.padded_numel * bucket.kind.dtype.itemsize for bucket in trained)[-2:]]
    on_device = max(0, on_device) + sum(in_flight) + min(in_flight[-1] // comm.size, SEGMENT) * (comm.size > 1)
    left, problem = private_left() if comm.device.type == "cpu" else None, None
    if left is not None and on_device > left:
        problem = InputError(
            f"RLIMIT_DATA leaves {left / 1e6:.0f} MB for the device's part, and parameters and buffers take "
            f"{on_device / 1e6:.0f} MB; raise the limit, or choose a smaller model or bucket"
        )
    check_shared(needed, comm, problem)


def check_shared(needed, comm, problem=None):
    """Raise InputError on every rank if a machine lacks the bytes `needed` by its ranks, or a rank has a `problem`."""
    if comm.simulated:
        return
    machines = defaultdict(list)
    for machine, theirs, free in comm.gather_objects((socket.gethostname(), needed, available()), "the host's memory"):
        machines[machine].append((theirs, free))
    for ranks in machines.values():
        together, free = sum(theirs for theirs, _ in ranks), min(free for _, free in ranks)
        if together > free:
            problem = problem or InputError(
                f"the host tier needs {together / 1e9:.3g} GB of shared memory for {len(ranks)} ranks of a machine and "
                f"finds {free / 1e9:.3g} GB; take more machines, a larger ratio= or a smaller model"
            )
    check_agreement(problem or [], comm, "the check of the tiers")
