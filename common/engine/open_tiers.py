"""Before training: the tiers that an engine places its states in are opened, if there is room in them."""

from common.engine.disk import Disk
from common.engine.door import check_agreement
from common.engine.swap import PAGE, padded
from common.engine.tiered_accounts import predicted_in
from common.engine.tiers import Device, Host, check_shared
from common.errors import InputError


def open_tiers(engine, read_ahead):
    """Open the tiers of an engine that is cut into units, and set its `sub_group`.

    Args:
        engine: its `tiers`, `path` and `sub_group_mb` say which.
        read_ahead: the units that are read before their turn.

    Returns:
        {"device": tier, "cpu": tier, "nvme": tier or None}

    Raises:
        InputError: on every rank alike: there is too little room, or the path cannot be used.
    """
    comm, buckets = engine.comm, [bucket for unit in engine.units for bucket in unit.buckets]
    names, largest = engine.tiers, max(bucket.shard_numel for bucket in buckets)
    on_disk = "nvme" in names.values()
    pages = max(1, int(engine.sub_group_mb * 2**20 / 4) // PAGE) if on_disk else largest
    engine.sub_group = min(pages, -(-largest // PAGE)) * PAGE  # elements: whole pages in every dtype
    disk = problem = None
    try:
        if on_disk:
            disk = Disk(comm, engine.path, engine.sub_group)
            disk.file.reserve(sum(predicted_in("nvme", engine, buckets, engine.optimizer_bytes).values()))
            widest = max(4, *engine.state_bytes, *(bucket.kind.dtype.itemsize for bucket in buckets))
            disk.stepping.nbytes = padded(widest * engine.sub_group)
            disk.stepping.number = 3 * (3 + len(engine.state_bytes))  # with masters, gradient, new parameters
            disk.shards.nbytes = padded(max(b.shard_numel * b.kind.dtype.itemsize for b in buckets))
            disk.shards.number = (1 + read_ahead) * max(len(unit.buckets) for unit in engine.units)
    except (InputError, OSError) as error:
        problem = InputError(f"rank {comm.rank}: {error}")
    try:
        check_agreement(problem or [], comm, "the check of the disks")
        check_shared(sum(predicted_in("cpu", engine, buckets, engine.optimizer_bytes).values()), comm)
    except InputError:
        if disk is not None:
            disk.file.close()  # at once, so that another engine may take the path
        raise
    if disk is not None and comm.rank == 0 and not disk.file.direct:
        disk.file.notice()
    return {"device": Device(comm), "cpu": Host(comm), "nvme": disk}
