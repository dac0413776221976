"""Checkpoints: every rank writes its shard; any stage at any world size reads what it needs of them.

A checkpoint is a directory:

    index.json                        names the files of the last whole save, with their checksums
    000001-rank-00000.safetensors     rank 0's shard of save 1, and so on

Each file holds parts of parameters and of their optimizer states, one-dimensional, under names that say where a part
begins: `parameters/blocks.0.mlp.up.weight@4096`, `optimizer/exp_avg/...@4096`. Nothing in it depends on buckets, units
or the stage. A stage that replicates writes each element once all the same.

The index is replaced in one step after all files are on the disk, and only then are the old files removed. So a writer
killed at any moment leaves the last whole save readable. Tensors are read without pickle.
"""

import hashlib
import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.errors import InputError

FORMAT = 1


def save(engine, path, extra=None):
    """Write a checkpoint into the directory `path`, in place of the one there. A collective.

    Args:
        engine: any engine.
        path: a directory, made if it is missing, on a file system that all ranks share.
        extra: this rank's own state beside the model's: nested dicts, lists and tuples of numbers, strings, None and
            tensors, such as a scheduler's state_dict, the position in the data, torch.get_rng_state().

    Raises:
        InputError: on every rank, when one could not write. The checkpoint that was there is untouched.
    """
    directory, rank, comm = Path(path), engine.rank, engine.comm
    number = comm.gather_objects(_last_save(directory) + 1 if rank == 0 else None)[0]
    file = directory / f"{number:06d}-rank-{rank:05d}.safetensors"
    entry, problem = None, None
    try:
        tensors = _shard_tensors(engine)
        structure = _encode(extra, tensors)
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, file)
        _flush(file)
        entry = {"file": file.name, "sha256": _checksum(file), "extra": structure}
    except (OSError, SafetensorError, TypeError) as error:
        problem = str(error)
    entries = comm.gather_objects((entry, problem))
    problem = next((f"rank {r} cannot write: {p}" for r, (_, p) in enumerate(entries) if p), None)
    if problem is None and rank == 0:
        try:
            _replace_index(directory, _describe(engine, number, [entry for entry, _ in entries]))
        except OSError as error:
            problem = f"rank 0 cannot write the index: {error}"
    problem = comm.gather_objects(problem)[0] or problem  # no rank goes on before the index stands
    if problem:
        file.unlink(missing_ok=True)
        raise InputError(f"no checkpoint was written to {str(path)!r}: {' '.join(problem.split())}")


def load(engine, path):
    """Read a checkpoint into an engine, whatever stage and world size wrote it. A collective.

    Returns:
        The `extra` that this rank saved, or rank 0's where there was no such rank.

    Raises:
        InputError: on every rank: there is no checkpoint, a file is damaged, or it is of another model. The engine is
            unchanged.
    """
    files, problem = None, None
    try:
        index = _read_index(Path(path))
        _check_model(engine, index)
        files = _Files(Path(path), index)
    except InputError as error:
        problem = str(error)
    problem = next(filter(None, engine.comm.gather_objects(problem)), None)
    if problem:
        raise InputError(problem)
    with torch.no_grad():
        for bucket in engine.buckets + engine.frozen:
            files.fill("parameters", bucket, engine.owned(bucket).parameters, bucket.parameters)
        for name, buffer in engine.module.named_buffers():
            buffer.copy_(files.whole(f"buffers/{name}"))
    engine.optimizer.load_state_dict(_optimizer_state(engine, index, files))
    entry = index["files"][engine.rank if engine.rank < len(index["files"]) else 0]
    return _decode(entry["extra"], lambda key: files.tensor(entry["file"], key))


# ---- writing --------------------------------------------------------------------------------------------------


def _shard_tensors(engine):
    """What this rank writes: {name in the file: tensor}, cut to the shard it owns in every stage."""
    tensors = {}
    for bucket in engine.buckets + engine.frozen:
        shard, owned = bucket.shard(engine.rank), engine.owned(bucket)
        flats = {"parameters": bucket.parameters[_within(shard, owned.parameters)]}
        scalars = {}
        for key, value in engine.optimizer.state.get(bucket.master, {}).items():
            if torch.is_tensor(value) and value.shape == bucket.master.shape:
                flats[f"optimizer/{key}"] = value[_within(shard, owned.optimizer)]
            elif torch.is_tensor(value):
                scalars[f"scalar/{key}"] = value
        for part in bucket.segments(engine.rank):
            for kind, flat in flats.items():
                values = flat[part.at : part.at + part.stop - part.start]
                tensors[f"{kind}/{part.name}@{part.start}"] = values.detach().cpu().clone()
            for kind, value in scalars.items():
                tensors[f"{kind}/{part.name}@{part.start}"] = value.detach().cpu().clone()
    if engine.rank == 0:
        for name, buffer in engine.module.named_buffers():
            tensors[f"buffers/{name}"] = buffer.detach().cpu().clone()
    return tensors


def _within(part, kept):
    return slice(part.start - kept.start, part.stop - kept.start)


def _describe(engine, number, entries):
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    shapes = {name: list(parameter.shape) for name, parameter in engine.module.named_parameters()}
    return {
        "format": FORMAT,
        "save": number,
        "world_size": engine.world_size,
        "parameters": shapes,
        "optimizer": _encode(groups, {}),
        "files": entries,
    }


def _replace_index(directory, index):
    fresh = directory / "index.json.new"
    fresh.write_text(json.dumps(index, indent=1))
    _flush(fresh)
    os.replace(fresh, directory / "index.json")
    kept = {entry["file"] for entry in index["files"]}
    for file in directory.glob("*-rank-*.safetensors"):
        if file.name not in kept:
            file.unlink()


def _last_save(directory):
    try:
        return json.loads((directory / "index.json").read_text())["save"]
    except (OSError, ValueError, KeyError):
        return 0


def _flush(file):
    with open(file, "rb") as opened:
        os.fsync(opened.fileno())


def _checksum(file):
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


# ---- reading --------------------------------------------------------------------------------------------------


def _read_index(directory):
    try:
        index = json.loads((directory / "index.json").read_text())
    except OSError as error:
        raise InputError(f"there is no checkpoint in {str(directory)!r}: {error.strerror} (index.json)") from error
    except ValueError as error:
        raise InputError(f"{str(directory / 'index.json')!r} is damaged; restore it or an older checkpoint") from error
    if index.get("format") != FORMAT:
        raise InputError(f"the checkpoint in {str(directory)!r} has format {index.get('format')}, this reads {FORMAT}")
    return index


def _check_model(engine, index):
    ours = {name: list(parameter.shape) for name, parameter in engine.module.named_parameters()}
    for name in [*ours, *index["parameters"]]:
        one, other = ours.get(name), index["parameters"].get(name)
        if one != other:
            raise InputError(
                f"the checkpoint is of another model: {name!r} is {other or 'missing'} in it, {one or 'missing'} here"
            )
    if len(engine.optimizer.param_groups) != len(_decode(index["optimizer"], None)):
        raise InputError("the checkpoint was made with another number of param_groups; use those it was made with")


@dataclass(frozen=True)
class _Part:
    """Elements from `start` on of one parameter's tensor, and where to read them."""

    start: int
    stop: int
    file: str
    key: str


class _Files:
    """The files of a checkpoint, checked, with what is where."""

    def __init__(self, directory, index):
        self._opened, self._parts = {}, defaultdict(list)  # "optimizer/exp_avg/name" -> its parts
        for entry in index["files"]:
            file = directory / entry["file"]
            try:
                if _checksum(file) != entry["sha256"]:
                    raise InputError(f"{str(file)!r} is damaged: its checksum differs; use an older checkpoint")
                opened = self._opened[entry["file"]] = safe_open(file, framework="pt")
            except OSError as error:
                raise InputError(f"cannot read {str(file)!r}: {error.strerror}; use an older checkpoint") from error
            for key in opened.keys():  # noqa: SIM118, not a dict
                name, _, start = key.rpartition("@")
                if name:
                    shape = opened.get_slice(key).get_shape()
                    length = shape[0] if shape else 0
                    self._parts[name].append(_Part(int(start), int(start) + length, entry["file"], key))

    def tensor(self, file, key):
        return self._opened[file].get_tensor(key)

    def whole(self, key):
        return next(opened.get_tensor(key) for opened in self._opened.values() if key in opened.keys())  # noqa: SIM118

    def kinds(self, of, name):
        """The optimizer states of a parameter: of "optimizer" elementwise, of "scalar" those with one value."""
        return [key.split("/")[1] for key in self._parts if key.startswith(f"{of}/") and key.split("/", 2)[2] == name]

    def scalar(self, key):
        part = self._parts[key][0]
        return self.tensor(part.file, part.key)

    def fill(self, kind, bucket, owned, flat):
        """Read elements `owned` (a slice of the run) of a bucket's parameters or states into `flat`."""
        for slot in bucket.slots.values():
            for part in self._parts[f"{kind}/{slot.name}"]:
                start = max(slot.offset + part.start, owned.start)  # offsets in the run
                stop = min(slot.offset + part.stop, owned.stop)
                if start < stop:
                    stored = self._opened[part.file].get_slice(part.key)
                    first = slot.offset + part.start
                    flat[start - owned.start : stop - owned.start] = stored[start - first : stop - first].to(
                        flat.device
                    )


def _optimizer_state(engine, index, files):
    """The state_dict of this rank's optimizer over its own shards."""
    state = engine.optimizer.state_dict()
    groups = _decode(index["optimizer"], None)
    state["param_groups"] = [{**ours, **saved} for ours, saved in zip(state["param_groups"], groups, strict=True)]
    masters = [master for group in engine.optimizer.param_groups for master in group["params"]]
    state["state"] = {}
    for bucket in engine.buckets:
        name = next(iter(bucket.slots))
        values = {key: files.scalar(f"scalar/{key}/{name}") for key in files.kinds("scalar", name)}
        for key in files.kinds("optimizer", name):
            values[key] = torch.zeros_like(bucket.master)
            files.fill(f"optimizer/{key}", bucket, engine.owned(bucket).optimizer, values[key])
        if values:
            number = next(i for i, master in enumerate(masters) if master is bucket.master)
            state["state"][number] = values
    return state


# ---- extra: any nesting of plain values and tensors, as JSON beside tensors -------------------------------------


def _encode(value, tensors):
    """Plain JSON for `value`; its tensors go into `tensors`, under the name that the JSON gives them."""
    if torch.is_tensor(value):
        key = f"extra/{len(tensors)}"
        tensors[key] = value.detach().cpu().clone()
        return {"tensor": key}
    if isinstance(value, dict):
        return {"dict": [[_encode(k, tensors), _encode(v, tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(item, tensors) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise TypeError(f"extra holds a {type(value).__name__}; only plain values, dicts, lists, tuples and tensors fit")


def _decode(encoded, tensor):
    """What `_encode` was given; `tensor(key)` reads a tensor."""
    ((kind, content),) = encoded.items()
    if kind == "tensor":
        return tensor(content)
    if kind == "dict":
        return {_decode(k, tensor): _decode(v, tensor) for k, v in content}
    if kind in ("list", "tuple"):
        items = [_decode(item, tensor) for item in content]
        return tuple(items) if kind == "tuple" else items
    return content
