"""index.json of a checkpoint: which file holds what. An atomic replace keeps the checkpoint whole at any moment."""

import contextlib
import hashlib
import json
import os
import re
from functools import partial

import torch.distributed as dist

from common.errors import InputError

FORMAT = 1
FILE_NAME = re.compile(r"(\d{6,})-rank-\d{5,}\.safetensors")


def read_index(folder, name="index.json"):
    """The index of the checkpoint in a folder.

    Raises:
        InputError: the index is missing or damaged, or has another format.
    """
    damaged = "index.json is damaged; restore it, or take an older checkpoint"
    try:
        contents = json.loads((folder / name).read_text())
        written = contents["format"]
        intact = written != FORMAT or contents["sha256"] == digest(contents["index"])
    except (FileNotFoundError, NotADirectoryError) as error:
        check_not_dcp(folder, "load(folder, read=interop.formats.from_dcp.read)")
        there = f"parts of a model, {', '.join(parts_in(folder))}" if parts_in(folder) else "no checkpoint"
        raise InputError(f"there is {there}; give the folder that save() was given") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise InputError(damaged) from error
    if written != FORMAT:
        raise InputError(f"its format is {written}, and this version reads {FORMAT}; load it where it was saved")
    # Anyone can recompute the digest, so also require names within the folder.
    if not intact or not all(FILE_NAME.fullmatch(entry["name"]) for entry in contents["index"]["files"]):
        raise InputError(damaged)
    return contents["index"]


def parts_in(folder):
    """The parts of a model that are saved in a folder, a Path: names such as "tensor-0-of-2"."""
    return sorted(index.parent.name for index in folder.glob("*-of-*/index.json"))


def own_folder(folder, part):
    """Where a part of a model, "" for the whole, is saved in a folder; InputError if only others are there."""
    whole = (folder / "index.json").exists()
    if not (folder / part / "index.json").exists() and (whole or parts_in(folder)):
        there, mine = "the whole model" if whole else ", ".join(parts_in(folder)), part or "the whole model"
        raise InputError(f"it holds {there}, and this engine {mine}; give engine.load read=parallel.checkpoint.read")
    return folder / part


def claim(comm, folder, part):
    """Refuse a folder that other ranks save into, or that has other parts of a model, or a whole one beside parts."""
    ranks, holder = dist.get_process_group_ranks(comm.group), []
    with contextlib.suppress(RuntimeError):  # the store ended with the process that held it, or cannot compare
        store, key = dist.group.WORLD.get_group_store(), f"saves into {(folder / part).resolve()}"
        holder = json.loads(store.compare_set(key, "", json.dumps(ranks)))
    if holder and set(holder).isdisjoint(ranks):
        cure = "engines of parts of one model need model_parallel=, those of several models a folder each"
        raise InputError(f"ranks {holder} save into it too; {cure}")
    layout = partial(re.sub, r"-\d+-of-", " ")
    for other in [*parts_in(folder), *([""] if (folder / "index.json").exists() else [])]:
        if layout(other) != layout(part):
            there, mine = other or "the whole model", part or "the whole model"
            raise InputError(f"it holds {there}, and this engine {mine}; take another folder")


def check_not_dcp(folder, cure):
    """Raise InputError if torch.distributed.checkpoint wrote a folder, a Path."""
    if (folder / ".metadata").is_file():
        raise InputError(f"torch.distributed.checkpoint wrote it; write {cure}")


def replace_index(folder, index):
    partial = folder / "index.json.partial"
    try:
        contents = {"format": FORMAT, "sha256": digest(index), "index": index}
        partial.write_text(json.dumps(contents, indent=1))
        flush(partial)
        read_index(folder, partial.name)  # an unreadable index replaces nothing
        flush(folder)  # the names of the new files, before the index that names them
        os.replace(partial, folder / "index.json")
    except Exception:
        partial.unlink(missing_ok=True)
        raise


def flush(path):
    """Return once a file's contents, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(index):
    return hashlib.sha256(json.dumps(index).encode()).hexdigest()
