"""Checkpoints: every rank writes its shards; any stage at any world size reads the parts that it needs.

A checkpoint is a folder:

    index.json                      what was saved, and which files hold it, with their checksums
    000001-rank-00000.safetensors    rank 0's shards, of the first save into this folder
    000001-rank-00001.safetensors    rank 1's

Parts of a model, see `Axes`, have such folders in it: tensor-0-of-2 and so on.

A file holds flat pieces, each named after its parameter and its first element in it:

    parameters/wte.weight@4096           values: fp32 master weights if trained; frozen ones in their own dtype
    optimizer/exp_avg/wte.weight@4096    an optimizer state with a number for each element
    buffers/bn.running_mean              whole, in rank 0's file: the persistent buffers, those in model.state_dict()
    extra/17                             whole: a tensor of this rank's `extra`; in rank 0's file also of scalars,
                                         options and the modules' extra state

Buckets, units and padding do not appear, so the reader may have others. A stage that replicates still writes each
element once: stages that share a layout write the same files. Gradients are not saved: a save in the middle of an
accumulation does not disturb it, and a load restarts it.

A save never touches the files of the last save. The new files get a higher number; once all of them are on the disk,
and rank 0 has seen each of them there, the index is replaced in one step; only then are the old files removed. A writer
killed at any moment leaves the last save whole, and the next save clears its remains away.
"""

import contextlib
import hashlib
import json
import os
import socket
import warnings
from pathlib import Path

import torch

from common.checkpoint import model_state, optimizer_state, tensor_file, weights
from common.checkpoint.encoding import decode, detached, encode
from common.checkpoint.index import FILE_NAME, claim, flush, own_folder, read_index, replace_index
from common.errors import InputError
from common.ranks.agreement import together
from common.ranks.axes import shape_in_files
from common.ranks.trace import comes_true
from common.tensors import length, map_tensors, within

PATIENCE = 10.0  # seconds that a shared file system may take to show rank 0 another node's files


class Content:
    """What this rank writes in `save(path, extra)`, as of now. Making it is a collective.

    Args:
        apart: copy everything now, so that the next step does not change it. Else shards are read as they are written,
            one after the other, since memory may not hold all of them.

    Attributes:
        tensors: {name in the file: tensor on the CPU}, those in memory.
        told: {name in the file: (dtype, shape)} of all tensors.
        structure: the JSON of `extra`.
        part: the name of the sub-folder that it is written to, if the engine has a part of a model; else "".
        index: what the files hold, on rank 0.

    Raises:
        InputError: on every rank: one has something that a checkpoint cannot hold, or cannot read its states.
    """

    def __init__(self, engine, path, extra, apart=False):
        self.part, number = engine.axes.part, engine.axes.number_of_save(engine.comm)
        states = {bucket: optimizer_state.states_of_all(engine, bucket) for bucket in engine.buckets + engine.frozen}
        told = _of_all_experts(engine, _parameters(engine, states))
        with together(engine.comm, f"cannot save to {str(path)!r}"):
            self.tensors, self._engine, self._place_of, self._kept_of = {}, engine, _places(engine, states), None
            shards = {name: (dtype, (length(part),)) for name, (_, _, dtype, part) in self._place_of.items()}
            if apart:
                self.tensors = {name: self._read(name).clone() for name in shards}
                self._engine = self._place_of = self._kept_of = self._kept = None
            if engine.rank == 0:
                self.tensors |= {f"buffers/{name}": detached(buffer) for name, buffer in model_state.buffers(engine)}
            self.index = {**_index(engine, self.tensors, told), "save": number} if engine.rank == 0 else None
            self.structure = json.dumps(encode(extra, self.tensors, "extra"))
            self.told = {name: (tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()}
            self.told |= {} if apart else shards
            tensor_file.check(self.told, {"extra": self.structure})

    def write(self, file):
        """Write it; return the file's checksum once it is on the disk."""
        return tensor_file.write(file, self.told, self._read, {"extra": self.structure})

    def _read(self, name):
        """A tensor in memory; or a piece of one state of a bucket, of which one at a time is held."""
        if name in self.tensors:
            return self.tensors[name]
        bucket, state, _, part = self._place_of[name]
        if self._kept_of != (bucket, state):
            self._kept = None  # freed before the next is allocated
            kept, owned = bucket.read(state, self._engine.optimizer), self._engine.owned(bucket)
            of = owned.optimizer if bucket.kind.trainable else owned.parameters
            self._kept = kept[within(bucket.shard(self._engine.rank), of)].to("cpu")
            self._kept_of = bucket, state
        return self._kept[part]


def write(comm, path, content):
    """Write the ranks' snapshots, and make them the checkpoint in a folder, as `save` does. A collective."""
    rank, failure = comm.rank, f"cannot save to {str(Path(path) / content.part)!r}"
    with together(comm, failure):
        folder = Path(path) / content.part
        if rank == 0:
            claim(comm, Path(path), content.part)
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + max(_files_in(folder).values(), default=0)
    number = max(comm.gather_objects(number, "the checkpoint"))
    file = folder / f"{number:06}-rank-{rank:05}.safetensors"
    try:
        with together(comm, failure):
            entry = {"name": file.name, "sha256": content.write(file)}
            nbytes = file.stat().st_size
        everyones = comm.gather_objects((entry, socket.gethostname(), nbytes), "the checkpoint")
        files = [entry for entry, *_ in everyones]
        with together(comm, failure):
            if rank == 0:
                here = f"{str(folder)!r} on node {socket.gethostname()!r}"
                for number, (entry, node, nbytes) in enumerate(everyones):
                    name, who = entry["name"], f"which rank {number} wrote on node {node!r}"
                    missing = f"{name}, {who}, is not in {here}"
                    see(lambda name=name: name in os.listdir(folder), missing)  # listdir asks a file server anew
                    if (folder / name).stat().st_size != nbytes:
                        raise InputError(f"{name}, {who}, is another file in {here}")
                replace_index(folder, {**content.index, "files": files})
    except InputError:
        with contextlib.suppress(OSError):
            file.unlink()
        raise
    with together(comm, f"saved to {str(path)!r}, but nobody knows whether it is on the disk yet"):
        if rank == 0:
            flush(folder)
    if rank == 0:
        try:
            for older in _files_in(folder).keys() - {entry["name"] for entry in files}:
                (folder / older).unlink(missing_ok=True)
        except OSError as error:
            said = f"saved to {str(path)!r}, but an older file there cannot be removed: {error}"
            warnings.warn(said, RuntimeWarning, stacklevel=2)


def see(there, missing):
    """Wait up to PATIENCE until `there()`, for files from other nodes. Raises InputError with `missing` after that."""
    if not comes_true(there, PATIENCE):
        raise InputError(f"{missing}; give a folder that all nodes share")


def load(engine, path, read=None):
    """Read a checkpoint into an engine, from any stage and world size. A collective.

    Args:
        read: how to read another kind: `interop.formats.from_dcp.read` FSDP2's, `parallel.checkpoint.read` other parts
            of a model than this engine has.

    Parameters, buffers, the optimizer's states and its options (learning rate and the like) become those of the save,
    and, if both are fp16, the loss scale. The precision may differ from the save's.

    Returns:
        The `extra` that this rank saved, or rank 0's if there was no such rank.

    Raises:
        InputError: on every rank: there is no checkpoint, or it is damaged, or of another model, optimizer or format.
            The engine's states are unchanged, but gradients are dropped. Also on every rank: one failed to take over
            what it read. Then the message says "in part", and no states can be relied on.
    """
    rank, share_errors = engine.rank, engine.axes.share_errors
    with contextlib.ExitStack() as opened:
        with share_errors(), together(engine.comm, f"cannot load {str(path)!r}"):
            folder = Path(path)
            if read is not None:
                index, source, extra = read(engine, folder)
                opened.enter_context(source)
            else:
                folder = own_folder(folder, engine.axes.part)
                index, source = read_index(folder), None
            _check_fits(engine, index)
            for entry in index["files"][rank :: engine.world_size]:
                check_intact(folder, entry)
        with share_errors(), together(engine.comm, f"cannot load {str(path)!r}"):
            if source is None:
                own = rank if rank < len(index["files"]) else 0
                needed = sorted(_files_needed(engine, index) | {0, own})
                names = {k: folder / index["files"][k]["name"] for k in needed}
                files = {k: opened.enter_context(tensor_file.Source(name)) for k, name in names.items()}
                source, extra = Pieces(index, files), decode(json.loads(files[own].metadata["extra"]), files[own])
                index["groups"] = decode(index["groups"], source)
                index["extra_state"] = {key: decode(value, source) for key, value in index["extra_state"].items()}
                for told in index["parameters"].values():
                    told["scalars"] = decode(told["scalars"], source)
            for name, buffer in model_state.buffers(engine):
                weights.check_kind(f"buffer {name!r}", source.tensors[f"buffers/{name}"], buffer)
            name_of = {parameter: f"parameters/{name}" for name, parameter in engine.module.named_parameters()}
            name_of |= {buffer: f"buffers/{name}" for name, buffer in model_state.buffers(engine)}
            weights.check_range(engine, source, name_of)
        if engine.axes.part:
            one_save = [("the save", str(index.get("save")), "take another one: this was interrupted")]
            engine.axes.agree(one_save, engine.comm)
        engine.begin_load()
        with share_errors(), together(engine.comm, f"loaded {str(path)!r} in part, build the engine anew"):
            weights.fill(engine, source, name_of)
            engine.updates = index["updates"]
            if engine.loss_scaler and index["loss_scaler"]:
                engine.loss_scaler.load_state_dict(index["loss_scaler"])
            model_state.set_extra_state(engine, index["extra_state"])
            _fill_optimizer(engine, index, source)
    return extra


# ---- writing ----------------------------------------------------------------------------------------------------


def _places(engine, states):
    """The pieces that this rank writes: {name in the file: (bucket, state, dtype, part of the shard)}."""
    return {
        f"{'parameters' if state is None else f'optimizer/{state}'}/{name}@{there.start}": (bucket, state, dtype, here)
        for bucket, of_bucket in states.items()
        for state, dtype in {None: _dtype(bucket), **of_bucket.dtypes}.items()
        for name, there, here in bucket.in_files(bucket.shard(engine.rank))
        if state is None or state in of_bucket.of[name][0]
    }


def _dtype(bucket):
    """The dtype that a bucket's parameters are saved in."""
    return bucket.optimizer_shards[0].master.dtype if bucket.kind.trainable else bucket.kind.dtype


def _parameters(engine, states):
    """What the files hold of this rank's parameters, {name: description}, and which ranks write it."""
    parameters = {}
    for bucket, of_bucket in states.items():
        for slot in bucket.slots.values():
            elementwise, scalars = of_bucket.of[slot.name]
            parameters[slot.name] = {
                "shape": list(shape_in_files(bucket.members[slot.name])),
                "dtype": str(_dtype(bucket)).removeprefix("torch."),
                "group": bucket.kind.group if bucket.kind.trainable else None,
                "whole": bucket.kind.whole,
                "cut": engine.axes.cut_of(slot.name),
                "states": elementwise,
                "scalars": scalars,
                "pieces": [],  # [writing rank, first element, end]
            }
        for rank in range(engine.rank % bucket.kind.replica_stride, engine.world_size, bucket.kind.replica_stride):
            for name, there, _ in bucket.in_files(bucket.shard(rank)):
                parameters[name]["pieces"].append([rank, there.start, there.stop])
    return parameters


def _of_all_experts(engine, parameters):
    """Descriptions of all parameters, those of other ranks' experts too: a collective, if there are any."""
    own = {name: map_tensors(detached, parameters.pop(name)) for name in parameters.keys() & engine.axes.experts}
    for theirs in engine.axes.expert.gather_objects(own, "the experts") if engine.axes.expert else ():
        for name, told in theirs.items():  # of a stack each rank has pieces
            parameters.setdefault(name, {**told, "pieces": []})["pieces"] += told["pieces"]
    return parameters


def _index(engine, tensors, parameters):
    """What the files hold, for rank 0 to write. Tensors among scalars and options are added to its `tensors`."""
    for told in parameters.values():
        told["scalars"] = encode(told["scalars"], tensors, "the optimizer's state")
    return {
        "world_size": engine.world_size,
        "optimizer": optimizer_state.name_of(engine.optimizer),
        "groups": encode(optimizer_state.options(engine), tensors, "the optimizer's groups"),
        "updates": engine.updates,
        "loss_scaler": engine.loss_scaler and engine.loss_scaler.state_dict(),
        "buffers": {name: list(buffer.shape) for name, buffer in model_state.buffers(engine)},
        "tied": model_state.tied(engine),
        "extra_state": {
            key: encode(value, tensors, f"{key!r} of model.state_dict()")
            for key, value in model_state.extra_state(engine).items()
        },
        "parameters": parameters,
    }


# ---- reading ----------------------------------------------------------------------------------------------------


def _check_fits(engine, index):
    """Raise InputError for the first difference between the checkpoint and the engine."""
    states = {bucket: optimizer_state.states(engine, bucket) for bucket in engine.buckets + engine.frozen}
    here = _index(engine, {}, _parameters(engine, states))
    here["parameters"] = {name: here["parameters"][name] for name, _ in engine.module.named_parameters()}  # in order
    saved, here = _described(index, engine.axes.elsewhere), _described(here)
    for what in [*here, *saved]:
        one, other = saved.get(what, "missing"), here.get(what, "missing")
        if one != other:
            raise InputError(f"{what} is {one} in the checkpoint and {other} here; build the engine as it was saved")


def _described(index, elsewhere=()):
    """What must be equal: {what: its description}, without parameters that are `elsewhere`."""
    found = {"the optimizer": f"{index['optimizer']} over {len(index['groups'])} groups"}
    for name, told in index["parameters"].items():
        if name in elsewhere:
            continue
        kind, group = tensor_file.kind(getattr(torch, told["dtype"]), told["shape"]), told["group"]
        of_whole = " of whole parameters" * told.get("whole", False)
        found[f"parameter {name!r}"] = f"{kind}, {'frozen' if group is None else f'in group {group}{of_whole}'}"
    found |= {f"buffer {name!r}": f"of shape {shape}" for name, shape in index["buffers"].items()}
    return found | {f"extra state {key!r}": "there" for key in index["extra_state"]}


class Pieces(tensor_file.Tensors):
    """The ranks' pieces as whole tensors: "parameters/wte.weight", "optimizer/exp_avg/wte.weight".

    Args:
        index: as `read_index` returns it.
        files: {rank: the `Source` of its file}: rank 0's, and those that are read.
    """

    def __init__(self, index, files):
        self._files, self._pieces, self.tensors = files, {}, files[0].tensors.copy()
        self.metadata = files[0].metadata
        for name, told in index["parameters"].items():
            for kind in ("parameters", *(f"optimizer/{state}" for state in told["states"])):
                place = f"{kind}/{name}"
                dtypes = [files[k].tensors[f"{place}@{at}"][0] for k, at, _ in told["pieces"] if k in files]
                self.tensors[place] = (*dtypes, getattr(torch, told["dtype"]))[0], tuple(told["shape"])
                self._pieces[place] = told["pieces"]

    def read(self, name, start, target):
        for rank, begin, end in self._pieces.get(name, ()):
            common = slice(max(begin, start), min(end, start + len(target)))
            if common.start < common.stop:
                into = target[common.start - start : common.stop - start]
                self._files[rank].read(f"{name}@{begin}", common.start - begin, into)
        if name not in self._pieces:
            self._files[0].read(name, start, target)


def _files_needed(engine, index):
    """The ranks whose files hold a part of what this rank owns."""
    return {
        rank
        for bucket in engine.buckets + engine.frozen
        for name, there, _ in bucket.in_files(engine.owned(bucket).parameters)
        for rank, begin, end in index["parameters"][name]["pieces"]
        if begin < there.stop and there.start < end
    }


def check_intact(folder, entry):
    """Raise InputError unless a file of the checkpoint has the bytes written. One rank checks each file, for all."""
    with open(folder / entry["name"], "rb", buffering=0) as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    if found != entry["sha256"]:
        raise InputError(f"{entry['name']} is damaged; restore it, or take an older checkpoint")


def _fill_optimizer(engine, index, source):
    def states_of(bucket):
        told = {name: index["parameters"][name] for name in bucket.slots}
        of = {name: (saved["states"], saved["scalars"]) for name, saved in told.items()}
        place_of = {state: {} for states, _ in of.values() for state in states}
        for state, places in place_of.items():
            places |= {name: f"optimizer/{state}/{name}" for name in of if state in of[name][0]}
        dtypes = {state: source.tensors[next(iter(places.values()))][0] for state, places in place_of.items()}

        def write(state, target, part):
            weights.fill_part(source, bucket, place_of[state], target, part)

        return optimizer_state.States(dtypes, of, optimizer_state.that_differ(of), write)

    optimizer_state.fill(engine, index["groups"], states_of)


# ---- files ------------------------------------------------------------------------------------------------------


def _files_in(folder):
    """The files of all saves in a folder, finished or not: {name: number of the save}."""
    matches = map(FILE_NAME.fullmatch, os.listdir(folder))
    return {match[0]: int(match[1]) for match in matches if match}
