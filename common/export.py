"""`python -m common.export CHECKPOINT model.safetensors`: a checkpoint's model in one file, for programs elsewhere.

The file has the names of model.state_dict(), so that a plain load_state_dict(strict=True) takes it: parameters, fp32
master weights where there are any, persistent buffers, and tied weights under all of their names. No ranks and no model
are needed, and no more memory than a tensor of it takes: each is put together from its pieces, cast and written. A
number that is too large for --dtype is refused, with its parameter's name.

Checkpoints of an older version do not tell which names are tied, and are exported without the further ones.
"""

import contextlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError

from common.checkpoint import runs, tensor_file
from common.checkpoint.checkpoint import check_intact
from common.checkpoint.index import flush, read_index
from common.engine.mixed_precision import DTYPES
from common.errors import InputError
from common.outputs import one_line_errors, parser_of
from common.train import show_bytes


def main(arguments=None):
    """Parse the arguments, export, say what was written."""
    parser = parser_of("common.export", __doc__)
    parser.add_argument("checkpoint", type=Path, help="the folder that save() was given; of a run's, its newest step")
    parser.add_argument("file", type=Path, help="what to write, in place of what is there")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters; buffers keep theirs (default: as saved)")
    parser.add_argument("--allow-overflow", action="store_true", help="what is too large for --dtype becomes infinite")
    options = parser.parse_args(arguments)
    with one_line_errors():
        dtype, checkpoint = DTYPES.get(options.dtype), newest(options.checkpoint)
        checksum = export(checkpoint, options.file, dtype, options.allow_overflow)
    print(f"{options.file}: {show_bytes(options.file.stat().st_size)}, sha256 {checksum}, of {checkpoint}")


def newest(folder):
    """The newest complete checkpoint in the folder of a run; of another folder that itself."""
    steps = runs.complete(folder)
    return runs.place(folder, max(steps)) if steps else folder


def export(checkpoint, file, dtype=None, allow_overflow=False):
    """Write a checkpoint's model into one safetensors file. The file is there when it is whole.

    Args:
        checkpoint: a Path, the folder that `save` was given.
        file: a Path, outside of that folder.
        dtype: of all floating parameters; None keeps the one that each was saved in.
        allow_overflow: let finite values that are too large for `dtype` become infinite.

    Returns:
        The file's sha256, in hex.

    Raises:
        InputError: there is no checkpoint, it is damaged, a value is too large for `dtype`, or the file cannot be
            written.
    """
    partial = file.parent / f"{file.name}.partial"
    try:
        index = read_index(checkpoint)
        _check_place(checkpoint, file)
        with contextlib.ExitStack() as opened:
            partial.touch()  # where that fails nothing needs to be read
            opened.callback(partial.unlink, missing_ok=True)  # there is none unless something failed
            for entry in index["files"]:
                check_intact(checkpoint, entry)
            files = [opened.enter_context(tensor_file.Source(checkpoint / entry["name"])) for entry in index["files"]]
            checksum = _write(index, files, partial, dtype, allow_overflow)
            os.replace(partial, file)
        flush(file.parent)
    except (InputError, OSError, SafetensorError) as error:
        raise InputError(f"cannot export {str(checkpoint)!r} to {str(file)!r}: {error}") from error
    return checksum


def _check_place(checkpoint, file):
    """Refuse to write where there is no file, or where it would take the place of one of the checkpoint's."""
    if file.exists() and not file.is_file():
        raise InputError("there is something else than a file; give the name of one")
    folder = os.path.realpath(checkpoint)
    for place in (os.path.realpath(file), os.path.realpath(file.parent)):
        if os.path.commonpath([place, folder]) == folder:
            raise InputError("it would lie in the checkpoint's own folder; give another one")


def _write(index, files, partial, dtype, allow_overflow):
    """Write all tensors of a checkpoint, one at a time."""
    parameters = index["parameters"]
    saved_as = {name: name for name in [*parameters, *index["buffers"]]} | index.get("tied", {})

    def kind(name):
        if name not in parameters:
            return files[0].tensors[f"buffers/{name}"]
        saved = getattr(torch, parameters[name]["dtype"])
        return dtype if dtype and saved.is_floating_point else saved, parameters[name]["shape"]

    def value(name):
        name = saved_as[name]
        if name not in parameters:
            return files[0].get_tensor(f"buffers/{name}")
        own, shape = kind(name)
        whole = torch.empty(shape, dtype=own)
        for rank, start, stop in parameters[name]["pieces"]:
            piece = f"parameters/{name}@{start}"
            if not allow_overflow and files[rank].overflows(piece, 0, stop - start, own):
                raise InputError(
                    f"{name!r} has finite values that are infinite in {own}; choose another --dtype, or take them so "
                    "by --allow-overflow"
                )
            files[rank].read(piece, 0, whole.view(-1)[start:stop])
        return whole

    tensors = {name: kind(own) for name, own in saved_as.items()}
    return tensor_file.write(partial, tensors, value, {"format": "pt"})  # which some libraries ask for


if __name__ == "__main__":
    main()
