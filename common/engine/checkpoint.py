"""Checkpoints: every rank writes its shard of everything; any stage at any world size reads what it needs of them.

A checkpoint is a folder:

    index.json                      what was saved, and which files hold it, with their checksums
    000001-rank-00000.safetensors    rank 0's shards, of the first save into this folder
    000001-rank-00001.safetensors    rank 1's

A file holds flat pieces, each named after its parameter and the element of it that the piece begins with:

    parameters/wte.weight@4096           values: fp32 master weights of what is trained, frozen ones in their own dtype
    optimizer/exp_avg/wte.weight@4096    a state of the optimizer that has a number for each element
    buffers/bn.running_mean              whole, in rank 0's file: the persistent buffers, those in model.state_dict()
    extra/17                             whole: a tensor of this rank's `extra`; of rank 0's scalars and options too

Buckets, units and padding do not appear, so the reader may have others. A stage that replicates writes each element
once all the same: stages that share a layout write the same files. Gradients are not saved: a save in the middle of an
accumulation does not disturb it, a load begins it anew.

Saving never touches the files of the last save. The new ones get a higher number; when all of them are on the disk,
the index is replaced in one step; only then the old ones are removed. A writer killed at any moment leaves the last
save whole, and its remains are cleared away by the next.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from common.engine.layout import distinct
from common.errors import InputError

FORMAT = 1
FILE_NAME = re.compile(r"(\d{6,})-rank-\d{5,}\.safetensors")


def save(engine, path, extra=None):
    """Write a checkpoint into the folder `path`, in place of the one there. A collective.

    Args:
        engine: any engine.
        path: a folder that all ranks share, made if it is missing.
        extra: this rank's own state beside the model's, such as a scheduler's state_dict, the position in the data,
            torch.get_rng_state(): dict, list, tuple, str, int, float, bool, None and tensors, nested at will.
            Subclasses of these come back as these. A few dtypes, such as complex128, safetensors cannot hold.

    Raises:
        InputError: on every rank, if one could not write; it names that rank. The checkpoint that was there stands.
    """
    rank, comm = engine.rank, engine.comm
    failure = f"cannot save to {str(path)!r}"
    with _together(comm, failure):
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max(_files_in(folder).values(), default=0)
    number = max(comm.gather_objects(number, "the checkpoint"))
    file = folder / f"{number:06}-rank-{rank:05}.safetensors"
    try:
        with _together(comm, failure):
            tensors = _shards(engine)
            index = _index(engine, tensors) if rank == 0 else None
            _write(file, tensors, json.dumps(_encode(extra, tensors, "extra")))
            entry = {"name": file.name, "sha256": _checksum(file)}
        files = comm.gather_objects(entry, "the checkpoint")
        with _together(comm, failure):
            if rank == 0:
                _replace_index(folder, {**index, "files": files})
    except InputError:
        with contextlib.suppress(OSError):
            file.unlink()
        raise
    with _together(comm, f"saved to {str(path)!r}, but cannot clear older files away"):
        if rank == 0:
            _flush(folder)
            for older in _files_in(folder).keys() - {entry["name"] for entry in files}:
                (folder / older).unlink()


def load(engine, path):
    """Read a checkpoint into an engine, whatever stage and world size wrote it. A collective.

    Parameters, buffers, the optimizer's states and its options (learning rate and the like) become those of the save,
    and where both are fp16 the loss scale. The precision may be another one than that of the save.

    Returns:
        The `extra` that this rank saved, or rank 0's where there was no such rank.

    Raises:
        InputError: on every rank: there is no checkpoint, it is damaged, or of another model, optimizer or format.
            The engine's states are as they were; gradients are dropped all the same. Also on every rank, if one
            could not take over what it read. Then it says that the load was in part: no states can be relied on.
    """
    rank = engine.rank
    with contextlib.ExitStack() as opened:
        with _together(engine.comm, f"cannot load {str(path)!r}"):
            folder = Path(path)
            index = _read_index(folder)
            _check_fits(engine, index)
            own = rank if rank < len(index["files"]) else 0
            needed = sorted(_files_needed(engine, index) | {0, own})
            files = {k: opened.enter_context(_open(folder, index["files"][k])) for k in needed}
            extra = _decode(json.loads(files[own].metadata()["extra"]), files[own])
        with _together(engine.comm, f"loaded {str(path)!r} in part, build the engine anew"):
            _fill_model(engine, index, files)
            _fill_optimizer(engine, index, files)
    return extra


@contextlib.contextmanager
def _together(comm, failure):
    """Run a block on every rank; if anything is raised on one, every rank raises an InputError that names it.

    There are no collectives in the block: the ranks that fail in it would miss some. They meet behind it.
    """
    caught = problem = None
    try:
        yield
    except Exception as error:
        caught, told = error, isinstance(error, (InputError, OSError, SafetensorError))
        said = str(error) if told else f"{type(error).__name__}: {error}"  # a KeyError says its key alone
        problem = " ".join(said.split())
    for rank, theirs in enumerate(comm.gather_objects(problem, "the checkpoint")):
        if theirs is not None:
            raise InputError(f"{failure}: rank {rank}: {theirs}") from caught


# ---- writing ----------------------------------------------------------------------------------------------------


def _shards(engine):
    """The pieces that this rank writes: {name in the file: tensor on the CPU}."""
    tensors, rank = {}, engine.rank
    for bucket in engine.buckets + engine.frozen:
        owned, shard = engine.owned(bucket), bucket.shard(rank)
        if bucket.kind.trainable:
            kept = owned.optimizer
            flats = {"parameters": bucket.master.detach()}
            flats |= {f"optimizer/{name}": values for name, values in _states(engine, bucket)[0].items()}
        else:
            kept = owned.parameters
            flats = {"parameters": bucket.parameters}
        for kind, flat in flats.items():
            values = flat[_within(shard, kept)].cpu()
            for part in bucket.segments(rank):
                tensors[f"{kind}/{part.name}@{part.start}"] = values[part.at : part.at + part.stop - part.start]
    if rank == 0:
        tensors |= {f"buffers/{name}": _detached(buffer) for name, buffer in _buffers(engine)}
    return tensors


def _index(engine, tensors):
    """What the files hold. Rank 0 writes it, and adds the tensors among scalars and options to its own `tensors`."""
    parameters = {}
    for bucket in engine.buckets + engine.frozen:
        elementwise, scalars = _states(engine, bucket)
        values = bucket.master if bucket.kind.trainable else bucket.parameters
        for slot in bucket.slots.values():
            parameters[slot.name] = {
                "shape": list(slot.shape),
                "dtype": str(values.dtype).removeprefix("torch."),
                "group": bucket.kind.group if bucket.kind.trainable else None,
                "states": list(elementwise),
                # once per parameter: the reader's buckets are others
                "scalars": _encode(scalars, tensors, "the optimizer's state"),
                "pieces": [],  # [rank that wrote it, first element, one behind the last]
            }
        for rank in range(engine.world_size):
            for part in bucket.segments(rank):
                parameters[part.name]["pieces"].append([rank, part.start, part.stop])
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    return {
        "world_size": engine.world_size,
        "optimizer": type(engine.optimizer).__name__,
        "groups": _encode(groups, tensors, "the optimizer's groups"),
        "loss_scaler": engine.loss_scaler and engine.loss_scaler.state_dict(),
        "buffers": {name: list(buffer.shape) for name, buffer in _buffers(engine)},
        "parameters": parameters,
    }


def _states(engine, bucket):
    """The optimizer's states of a bucket: those with a number for each element, and the others, such as `step`."""
    states = engine.optimizer.state.get(bucket.master, {})
    elementwise = {k: v for k, v in states.items() if torch.is_tensor(v) and v.shape == bucket.master.shape}
    return elementwise, {k: v for k, v in states.items() if k not in elementwise}


def _buffers(engine):
    persistent = engine.state_as_it_stands()
    return [(name, buffer) for name, buffer in engine.module.named_buffers() if name in persistent]


def _write(file, tensors, structure):
    """Write a rank's file; return when it is on the disk."""
    try:
        save_file(tensors, file, {"extra": structure})
    except KeyError as error:  # a dtype that safetensors has no name for: complex128, complex32, torch's int4 and so on
        names = ", ".join(name for name, tensor in tensors.items() if tensor.dtype in error.args)
        raise InputError(f"safetensors cannot hold {error}, the dtype of {names}; cast it, or leave it out") from error
    _flush(file)


def _replace_index(folder, index):
    partial = folder / "index.json.partial"
    try:
        contents = {"format": FORMAT, "sha256": _digest(index), "index": index}
        partial.write_text(json.dumps(contents, indent=1))
        _flush(partial)
        _flush(folder)  # the names of the new files, before the index that names them
        os.replace(partial, folder / "index.json")
    except Exception:
        partial.unlink(missing_ok=True)
        raise


def _flush(path):
    """Return when a file's contents, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- reading ----------------------------------------------------------------------------------------------------

INDEX = {  # the form of index.json; a key `str` stands for any names, a tuple for a list of that length
    "format": int,
    "sha256": str,
    "index": {
        "world_size": int,
        "optimizer": str,
        "groups": [{"dict": list}],
        "loss_scaler": dict | None,
        "buffers": {str: [int]},
        "parameters": {
            str: {
                "shape": [int],
                "dtype": str,
                "group": int | None,
                "states": [str],
                "scalars": {"dict": list},
                "pieces": [(int, int, int)],
            }
        },
        "files": [{"name": str, "sha256": str}],
    },
}


def _read_index(folder):
    try:
        contents = json.loads((folder / "index.json").read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError("there is no checkpoint; give the folder that save() was given") from error
    except (ValueError, RecursionError) as error:
        raise InputError("index.json is damaged; restore it, or take an older checkpoint") from error
    if isinstance(contents, dict) and contents.get("format", FORMAT) != FORMAT:
        raise InputError(f"it has format {contents['format']}, this reads format {FORMAT}; load it where it was saved")
    if not _intact(contents):
        raise InputError("index.json is damaged; restore it, or take an older checkpoint")
    return contents["index"]


def _intact(contents):
    """Whether `save` can have written this index. A digest is soon made anew, so names must stay in the folder too."""
    if not _has_form(contents, INDEX) or contents["sha256"] != _digest(contents["index"]):
        return False
    names = [entry["name"] for entry in contents["index"]["files"]]
    return len(names) == contents["index"]["world_size"] and all(map(FILE_NAME.fullmatch, names))


def _has_form(value, form):
    """Whether `value`, read from JSON, has the types of `form`, which is written as `INDEX` is."""
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(_has_form, value, form))
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(item, form[0]) for item in value)
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return False
        forms = dict.fromkeys(value, form[str]) if str in form else form
        return all(key in value and _has_form(value[key], forms[key]) for key in forms)
    return isinstance(value, form)


def _check_fits(engine, index):
    """Raise InputError for the first thing that is not the same in the checkpoint and in the engine."""
    groups = {
        name: b.kind.group if b.kind.trainable else None for b in engine.buckets + engine.frozen for name in b.slots
    }
    here = {
        "the optimizer": f"{type(engine.optimizer).__name__} over {len(engine.optimizer.param_groups)} groups",
        **{f"parameter {n!r}": _place(p.shape, groups[n]) for n, p in engine.module.named_parameters()},
        **{f"buffer {n!r}": f"of shape {list(buffer.shape)}" for n, buffer in _buffers(engine)},
    }
    saved = {
        "the optimizer": f"{index['optimizer']} over {len(index['groups'])} groups",
        **{f"parameter {n!r}": _place(p["shape"], p["group"]) for n, p in index["parameters"].items()},
        **{f"buffer {n!r}": f"of shape {shape}" for n, shape in index["buffers"].items()},
    }
    for what in [*here, *saved]:
        one, other = saved.get(what, "missing"), here.get(what, "missing")
        if one != other:
            raise InputError(
                f"{what} is {one} in the checkpoint and {other} here; build the engine as it was built then"
            )


def _place(shape, group):
    return f"of shape {list(shape)}, {'frozen' if group is None else f'in group {group}'}"


def _files_needed(engine, index):
    """The ranks whose files hold something of what this rank owns."""
    buckets = engine.buckets + engine.frozen
    return {rank for b in buckets for rank, *_ in _overlaps(b, engine.owned(b).parameters, index)}


def _open(folder, entry):
    """Open a file of the checkpoint, once it proved to be what was written."""
    if _checksum(folder / entry["name"]) != entry["sha256"]:
        raise InputError(f"{entry['name']} is damaged; restore it, or take an older checkpoint")
    return safe_open(folder / entry["name"], framework="pt")


def _overlaps(bucket, part, index):
    """The saved pieces that hold elements of `part`, a slice of the run.

    Yields:
        Rank that wrote the piece, its name, and the common elements as slices of the piece and of `part`.
    """
    for slot in bucket.slots.values():
        for rank, start, stop in index["parameters"][slot.name]["pieces"]:
            at = slot.offset + start  # where the piece begins in the run
            common = slice(max(at, part.start), min(slot.offset + stop, part.stop))
            if common.start < common.stop:
                yield rank, f"{slot.name}@{start}", slice(common.start - at, common.stop - at), _within(common, part)


def _read(kind, bucket, part, index, files):
    """Elements `part` of a bucket's parameters or states, on the CPU; padding is zero."""
    values = torch.zeros(part.stop - part.start, dtype=torch.float32 if bucket.kind.trainable else bucket.kind.dtype)
    for rank, name, there, here in _overlaps(bucket, part, index):
        values[here] = files[rank].get_slice(f"{kind}/{name}")[there]
    return values


@torch.no_grad()
def _fill_model(engine, index, files):
    for bucket in engine.buckets + engine.frozen:
        owned = engine.owned(bucket)
        values = _read("parameters", bucket, owned.parameters, index, files)
        bucket.parameters.copy_(values)
        if bucket.kind.trainable:  # a view of the parameters, or an fp32 master of its own
            bucket.master.copy_(values[_within(owned.optimizer, owned.parameters)])
    if engine.loss_scaler and index["loss_scaler"]:
        engine.loss_scaler.load_state_dict(index["loss_scaler"])
    for name, buffer in _buffers(engine):
        once = distinct(buffer)
        once.copy_(files[0].get_tensor(f"buffers/{name}")[tuple(map(slice, once.shape))])


def _fill_optimizer(engine, index, files):
    optimizer = engine.optimizer
    optimizer.state.clear()  # so that old and new states are not held at once
    fresh = optimizer.state_dict()
    groups = _decode(index["groups"], files[0])
    fresh["param_groups"] = [{**now, **then} for now, then in zip(fresh["param_groups"], groups, strict=True)]
    bucket_of = {bucket.master: bucket for bucket in engine.buckets}
    masters = [master for group in optimizer.param_groups for master in group["params"]]
    for number, bucket in enumerate(bucket_of[master] for master in masters):
        saved = index["parameters"][next(iter(bucket.slots))]  # all parameters have been stepped equally often
        states = _decode(saved["scalars"], files[0])
        for name in saved["states"]:
            states[name] = _read(f"optimizer/{name}", bucket, engine.owned(bucket).optimizer, index, files)
        fresh["state"][number] = states
    optimizer.load_state_dict(fresh)  # moves them to the device


# ---- files and slices -------------------------------------------------------------------------------------------


def _files_in(folder):
    """The files of all saves in a folder, finished or not: {name: number of the save}."""
    matches = map(FILE_NAME.fullmatch, os.listdir(folder))
    return {match[0]: int(match[1]) for match in matches if match}


def _checksum(file):
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest(index):
    return hashlib.sha256(json.dumps(index).encode()).hexdigest()


def _within(part, kept):
    """The slice `part` of a run, counted from where `kept` begins."""
    return slice(part.start - kept.start, part.stop - kept.start)


# ---- extra, options, scalars: nested values as JSON, their tensors beside it -------------------------------------


def _encode(value, tensors, what, around=()):
    """JSON for `value`; its tensors go into `tensors`, under the names that the JSON has for them.

    Args:
        what: the name of the whole, for messages.
        around: the dicts, lists and tuples of the whole that `value` lies in.

    Raises:
        InputError: there is something else in it than `save` takes, or a part contains itself.
    """
    if torch.is_tensor(value):
        name = f"extra/{len(tensors)}"
        tensors[name] = _detached(value)
        return {"tensor": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if any(value is outer for outer in around):
        raise InputError(f"{what} contains itself; leave the inner {type(value).__name__} out")
    encode = functools.partial(_encode, tensors=tensors, what=what, around=(*around, value))
    if isinstance(value, dict):  # as pairs: the keys of JSON's own objects are strings
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    raise InputError(
        f"a checkpoint cannot hold a {type(value).__name__}; give dict, list, tuple, str, numbers and tensors"
    )


def _decode(encoded, file):
    """What `_encode` was given, its tensors read from `file`."""
    if isinstance(encoded, list):
        return [_decode(item, file) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content),) = encoded.items()
    if kind == "tensor":
        return file.get_tensor(content).clone()  # on its own: what was read may lie in a map of the whole file
    if kind == "tuple":
        return tuple(_decode(item, file) for item in content)
    return {_decode(key, file): _decode(item, file) for key, item in content}


def _detached(tensor):
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
