"""`python -m common.export CHECKPOINT model.safetensors`: a checkpoint's model in one file, for programs elsewhere.

The file has the names of model.state_dict(), so that a plain load_state_dict(strict=True) takes it: parameters, fp32
master weights where there are any, persistent buffers, and tied weights under all of their names. No ranks and no model
are needed, and no more memory than a tensor of it takes: each is put together from its pieces, cast and written.

Checkpoints of an older version do not tell which names are tied, and are exported without the further ones.
"""

import argparse
import contextlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError

from common.engine import streamed
from common.engine.checkpoint import check_intact
from common.engine.checkpoint_index import flush, read_index
from common.engine.mixed_precision import DTYPES
from common.errors import InputError
from common.train import one_line_errors, show_bytes


def main(arguments=None):
    """Parse the arguments, export, say what was written."""
    parser = argparse.ArgumentParser(
        prog="python -m common.export", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="the folder that save() was given")
    parser.add_argument("file", type=Path, help="what to write, in place of what is there")
    parser.add_argument("--dtype", choices=DTYPES, help="of the parameters; buffers keep theirs (default: as saved)")
    options = parser.parse_args(arguments)
    with one_line_errors():
        checksum = export(options.checkpoint, options.file, DTYPES.get(options.dtype))
    print(f"{options.file}: {show_bytes(options.file.stat().st_size)}, sha256 {checksum}")


def export(checkpoint, file, dtype=None):
    """Write a checkpoint's model into one safetensors file. The file is there when it is whole.

    Args:
        checkpoint: a Path, the folder that `save` was given.
        file: a Path.
        dtype: of all floating parameters; None keeps the one that each was saved in.

    Returns:
        The file's sha256, in hex.

    Raises:
        InputError: there is no checkpoint, it is damaged, or the file cannot be written.
    """
    partial = file.with_name(f"{file.name}.partial")
    try:
        index = read_index(checkpoint)
        for entry in index["files"]:
            check_intact(checkpoint, entry)
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(streamed.Source(checkpoint / entry["name"])) for entry in index["files"]]
            checksum = _write(index, files, partial, dtype)
        os.replace(partial, file)
        flush(file.parent)
    except (InputError, OSError, SafetensorError) as error:
        raise InputError(f"cannot export {str(checkpoint)!r} to {str(file)!r}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()  # there is none unless something failed
    return checksum


def _write(index, files, partial, dtype):
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
            files[rank].read(f"parameters/{name}@{start}", 0, whole.view(-1)[start:stop])
        return whole

    tensors = {name: kind(own) for name, own in saved_as.items()}
    return streamed.write(partial, tensors, value, {"format": "pt"})  # which some libraries ask for


if __name__ == "__main__":
    main()
