"""`python -m interop.export CHECKPOINT model.safetensors`: a checkpoint for other programs, its model in one file.

The file has the names of model.state_dict(), so that a plain load_state_dict(strict=True) takes it: parameters, as fp32
master weights if there are any, persistent buffers, and tied weights under all of their names. Extra state of modules
is in it if it is a tensor, and refused otherwise. The export needs no ranks, no model, and memory for one tensor: each
is put together from its pieces, cast and written. A number that is too large for --dtype is refused, with its
parameter's name.

With --format a folder is written instead, from which other programs resume training: weights and optimizer states.

    dcp          for FSDP2, or other programs that load by torch.distributed.checkpoint; engines here load it, too
    universal    for DeepSpeed
"""

import contextlib
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError

from common.checkpoint import runs, tensor_file
from common.checkpoint.checkpoint import Pieces, check_intact
from common.checkpoint.encoding import decode
from common.checkpoint.index import flush, read_index
from common.engine.mixed_precision import DTYPES
from common.errors import InputError
from common.measure.tables import show_bytes
from common.outputs import one_line_errors, parser_of
from interop.formats import to_dcp, to_universal

FOLDERS = {"dcp": to_dcp.write, "universal": to_universal.write}  # formats of several files


def main(arguments=None):
    """Parse the arguments, export, say what was written."""
    parser = parser_of("interop.export", __doc__)
    parser.add_argument("checkpoint", type=Path, help="the folder given to save(), or a run's (its newest step)")
    parser.add_argument("place", type=Path, help="what to write: a file, which is replaced, or a new folder")
    parser.add_argument(
        "--format", choices=["safetensors", *FOLDERS], default="safetensors", help="(default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="for parameters; buffers keep theirs (default: as saved)")
    parser.add_argument("--allow-overflow", action="store_true", help="values too large for --dtype become infinite")
    options = parser.parse_args(arguments)
    with one_line_errors():
        checkpoint = newest(options.checkpoint)
        if options.format == "safetensors":
            checksum = export(checkpoint, options.place, DTYPES.get(options.dtype), options.allow_overflow)
            said = f"{show_bytes(options.place.stat().st_size)}, sha256 {checksum}"
        elif options.dtype or options.allow_overflow:
            raise InputError(f"--format {options.format} keeps all dtypes; leave --dtype and --allow-overflow out")
        else:
            export_folder(checkpoint, options.place, options.format)
            said = show_bytes(sum(file.stat().st_size for file in options.place.rglob("*")))
    print(f"{options.place}: {said}, of {checkpoint}")


def newest(folder):
    """The newest complete checkpoint in the folder of a run; of another folder that itself."""
    steps = runs.complete(folder)
    return runs.place(folder, max(steps)) if steps else folder


def export(checkpoint, file, dtype=None, allow_overflow=False):
    """Write a checkpoint's model into one safetensors file, outside its folder. The file appears when it is complete.

    `dtype` is that of all floating parameters; None keeps the one that each was saved in. With `allow_overflow` finite
    values that are too large for it become infinite. Returns the file's sha256, in hex.

    Raises:
        InputError: the checkpoint is missing or damaged, a value is too large for `dtype`, or writing fails.
    """
    with _exported(checkpoint, file, Path.touch) as (index, saved, partial):
        return _write(index, saved, partial, dtype, allow_overflow)


def export_folder(checkpoint, folder, form):
    """Write a checkpoint's model and optimizer into a new folder, in a format of FOLDERS. It appears when complete.

    Raises:
        InputError: the checkpoint is missing or damaged, the format cannot hold it, or it cannot be written.
    """
    with _exported(checkpoint, folder, Path.mkdir) as (index, saved, partial):
        FOLDERS[form](index, saved, partial)


@contextlib.contextmanager
def _exported(checkpoint, place, make):
    """A context that reads a checkpoint and writes a temporary path next to `place`, renamed to it at the end.

    Yields the index, its tensors as `Pieces`, and that path, which `make` has made.
    """
    partial = place.parent / f"{place.name}.partial"
    try:
        index = read_index(checkpoint)
        if index.get("save") is not None:
            raise InputError("it is a part of a model; load it by read=parallel.checkpoint.read, and save the whole")
        _check_place(checkpoint, place, make)
        with contextlib.ExitStack() as opened:
            make(partial)  # where that fails nothing needs to be read
            opened.callback(_remove, partial)  # there is nothing unless something failed
            for entry in index["files"]:
                check_intact(checkpoint, entry)
            files = [opened.enter_context(tensor_file.Source(checkpoint / entry["name"])) for entry in index["files"]]
            yield index, Pieces(index, dict(enumerate(files))), partial
            os.replace(partial, place)
        flush(place.parent)
    except (InputError, OSError, SafetensorError) as error:
        raise InputError(f"cannot export {str(checkpoint)!r} to {str(place)!r}: {error}") from error


def _check_place(checkpoint, place, make):
    """Refuse to write over something else, or over one of the checkpoint's files."""
    if make == Path.mkdir and os.path.lexists(place):
        raise InputError("it exists already; give the name of a new folder")
    if place.exists() and not place.is_file():
        raise InputError("it exists and is not a file; give the name of one")
    folder = os.path.realpath(checkpoint)
    for path in (os.path.realpath(place), os.path.realpath(place.parent)):
        if os.path.commonpath([path, folder]) == folder:
            raise InputError("it would lie in the checkpoint's own folder; give another one")


def _remove(path):
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write(index, saved, partial, dtype, allow_overflow):
    """Write all tensors of a checkpoint, one at a time."""
    place_of = {name: f"parameters/{name}" for name in index["parameters"]}
    place_of |= {name: f"buffers/{name}" for name in index["buffers"]}
    place_of |= {name: place_of[own] for name, own in index["tied"].items()}
    extra_state = {key: decode(value, saved) for key, value in index["extra_state"].items()}
    for key, value in extra_state.items():
        if not torch.is_tensor(value):
            raise InputError(f"{key!r} is no tensor, and the file holds nothing else; choose --format dcp")
    tensors = {key: (value.dtype, value.shape) for key, value in extra_state.items()}
    for name, place in place_of.items():
        own, shape = saved.tensors[place]
        cast = dtype and own.is_floating_point and place.startswith("parameters/")
        tensors[name] = dtype if cast else own, shape

    def value(name):
        if name in extra_state:
            return extra_state[name]
        own, shape = tensors[name]
        whole = torch.empty(shape, dtype=own)
        if not allow_overflow and saved.overflows(place_of[name], 0, whole.numel(), own):
            raise InputError(
                f"{place_of[name].partition('/')[2]!r} has finite values that are infinite in {own}; choose another "
                "--dtype, or accept them by --allow-overflow"
            )
        saved.read(place_of[name], 0, whole.view(-1))
        return whole

    return tensor_file.write(partial, tensors, value, {"format": "pt"})  # which some libraries ask for


if __name__ == "__main__":
    main()
