"""Checkpoints of parts of a model, read into other parts or into the whole model, and back.

    engine.load(path, read=parallel.checkpoint.read)

Each part has a folder, such as "tensor-0-of-2-pipeline-1-of-2", whose index says how every parameter is cut. Pieces are
joined by name, one tensor at a time, and cut as this engine's `Axes` say. A whole model is one part.
"""

import contextlib
import json
import math
import re

from common.checkpoint import model_state, tensor_file
from common.checkpoint.checkpoint import Pieces, check_intact
from common.checkpoint.encoding import decode
from common.checkpoint.index import parts_in, read_index
from common.errors import InputError
from parallel.tensor import Cut


def read(engine, folder):
    """Open what an engine is to take over; see `common.checkpoint.checkpoint.load`.

    Returns:
        An index like that of this engine's own checkpoint; its `Joined` tensors; and `extra`.

    Raises:
        InputError: there is no checkpoint; parts are missing, damaged or of different saves; or it is not known how a
            parameter was cut.
    """
    names = sorted(parts_in(folder), key=lambda name: [int(number) for number in re.findall(r"\d+", name)]) or [""]
    if len(names) != math.prod(map(int, re.findall(r"of-(\d+)", names[0]))):
        raise InputError(f"it holds {', '.join(names)}, and other parts are missing")
    parts = {name: read_index(folder / name) for name in names}
    if len({index.get("save") for index in parts.values()}) > 1:
        raise InputError("its parts are of different saves, as one was interrupted; take an older checkpoint")
    files = [(folder / name, entry) for name, index in parts.items() for entry in index["files"]]
    for place, entry in files[engine.rank :: engine.world_size]:
        check_intact(place, entry)
    source = Joined(folder, parts, engine.axes)
    own = engine.axes.part if engine.axes.part in parts else names[0]
    index, extra = parts[own], source.extra(own, engine.rank)
    merged = {"parameters": {}, "buffers": {}, "extra_state": {}}
    for kind, found in merged.items():
        for part in reversed(parts.values()):
            found.update(part[kind])
    tied = {name: own for index in parts.values() for name, own in index["tied"].items()}
    _check_ties(tied, dict(engine.module.named_parameters()), "there and not here")
    _check_ties(model_state.tied(engine), merged["parameters"], "here and not there")
    if engine.axes.pipeline is not None:  # what other stages have
        here = {"parameters": dict(engine.module.named_parameters()), "buffers": dict(model_state.buffers(engine))}
        here["extra_state"] = model_state.extra_state(engine)
        merged = {kind: {name: found[name] for name in found if name in here[kind]} for kind, found in merged.items()}
    for name, told in merged["parameters"].items():
        told["shape"] = list(source.tensors[f"parameters/{name}"][1])
    return {**index, **merged, "files": []}, source, extra


def _check_ties(tied, apart, where):
    """Refuse parameters that are tied, {further name: name}, on one side, and `apart` on the other."""
    for name in tied.keys() & apart:
        raise InputError(
            f"{name!r} is tied to {tied[name]!r} {where}, as pipeline.untie(model) parts them: write it on both sides; "
            "load_weights() takes the full_state_dict() of the tied model into an untied one"
        )


class Joined(tensor_file.Tensors):
    """The tensors of all parts, joined to wholes, and cut as this engine's are.

    Args:
        folder, parts: where the parts are, {name: index}; what their JSON encodes is decoded.
        axes: the engine's.
    """

    def __init__(self, folder, parts, axes):
        self._axes, self._held, self._files = axes, (None, None), {}
        self.tensors, self._places = {}, {}  # name -> the parts that have it, and how they cut it
        with contextlib.ExitStack() as opened:
            for part, index in parts.items():
                named = [folder / part / entry["name"] for entry in index["files"]]
                files = [opened.enter_context(tensor_file.Source(name)) for name in named]
                pieces = Pieces(index, dict(enumerate(files)))
                self._files[part] = files
                index["groups"] = decode(index["groups"], pieces)
                index["extra_state"] = {key: decode(value, pieces) for key, value in index["extra_state"].items()}
                for parameter, told in index["parameters"].items():
                    told["scalars"] = decode(told["scalars"], pieces)
                    for kind in ("parameters", *(f"optimizer/{state}" for state in told["states"])):
                        self._add(f"{kind}/{parameter}", parameter, pieces, told["cut"])
                for buffer in index["buffers"]:
                    self._add(f"buffers/{buffer}", None, pieces, None)
            self._close = opened.pop_all().close

    def __exit__(self, *raised):
        self._close()

    def _add(self, name, parameter, pieces, cut):
        if name in self._places:
            self._places[name][-1].append(pieces)
            return
        if cut == []:
            raise InputError(f"it is not known how {parameter!r} was cut; load it into the same parts")
        dtype, shape = pieces.tensors[name]
        there, here = Cut(*cut) if cut else None, self._axes.tensor and self._axes.cuts.get(parameter)
        shape = list(shape)
        if there is not None:
            shape[there.dimension] = there.size
        if here is not None:
            shape[here.dimension] = -(-here.size // self._axes.tensor.size)
        self.tensors[name], self._places[name] = (dtype, tuple(shape)), (there, here, [pieces])

    def extra(self, part, rank):
        """What rank, or rank 0, of a part saved as `extra`."""
        files = self._files[part]
        own = files[rank] if rank < len(files) else files[0]
        return decode(json.loads(own.metadata["extra"]), own)

    def read(self, name, start, target):
        """See `tensor_file.Source.read`."""
        if self._held[0] != name:
            there, here, having = self._places[name]
            whole = having[0].get_tensor(name)
            if there is not None:
                whole = there.join([pieces.get_tensor(name) for pieces in having])
            if here is not None:
                whole = here.piece(whole, self._axes.tensor.rank, self._axes.tensor.size)
            self._held = name, whole.reshape(-1)
        target.copy_(self._held[1][start : start + len(target)])
