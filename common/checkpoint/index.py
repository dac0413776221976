"""index.json of a checkpoint: which file holds what. Replaced in one move, so that a folder holds a whole checkpoint.

It is read with suspicion: whatever is not as `replace_index` writes it is damaged.
"""

import hashlib
import json
import math
import os
import re

from common.errors import InputError

FORMAT = 1
FILE_NAME = re.compile(r"(\d{6,})-rank-\d{5,}\.safetensors")
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
# Keys of the index that older checkpoints do not have.
LATER = {"updates": int, "tied": {str: str}, "extra_state": {str: object}}


def read_index(folder, name="index.json"):
    """The index of the checkpoint in a folder.

    Raises:
        InputError: there is none, or it is damaged.
    """
    try:
        contents = json.loads((folder / name).read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError("there is no checkpoint; give the folder that save() was given") from error
    except (ValueError, RecursionError) as error:
        raise InputError("index.json is damaged; restore it, or take an older checkpoint") from error
    if isinstance(contents, dict) and contents.get("format", FORMAT) != FORMAT:
        raise InputError(f"it has format {contents['format']}, this reads format {FORMAT}; load it where it was saved")
    if not _intact(contents):
        raise InputError("index.json is damaged; restore it, or take an older checkpoint")
    return contents["index"]


def is_dcp(folder):
    """Whether a folder, a Path, is a checkpoint that torch.distributed.checkpoint wrote."""
    return (folder / ".metadata").is_file() and not (folder / "index.json").exists()


def _intact(contents):
    """Whether `save` can have written this index. A digest is soon made anew, so names must stay in the folder too."""
    if not _has_form(contents, INDEX) or contents["sha256"] != digest(contents["index"]):
        return False
    if not all(_has_form(contents["index"][key], form) for key, form in LATER.items() if key in contents["index"]):
        return False
    index = contents["index"]
    names = [entry["name"] for entry in index["files"]]
    if len(names) != index["world_size"] or not all(map(FILE_NAME.fullmatch, names)):
        return False
    return all(_is_covered(parameter, len(names)) for parameter in index["parameters"].values())


def _is_covered(parameter, ranks):
    """Whether the pieces of a parameter lie end to end, from its first element to its last, in files that there are."""
    reached = 0
    for rank, start, stop in sorted(parameter["pieces"], key=lambda piece: piece[1]):
        if start != reached or stop <= start or not 0 <= rank < ranks:
            return False
        reached = stop
    return reached == math.prod(parameter["shape"])


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


def replace_index(folder, index):
    partial = folder / "index.json.partial"
    try:
        contents = {"format": FORMAT, "sha256": digest(index), "index": index}
        partial.write_text(json.dumps(contents, indent=1))
        flush(partial)
        read_index(folder, partial.name)  # what cannot be read takes nobody's place
        flush(folder)  # the names of the new files, before the index that names them
        os.replace(partial, folder / "index.json")
    except Exception:
        partial.unlink(missing_ok=True)
        raise


def flush(path):
    """Return when a file's contents, or a folder's names, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest(index):
    return hashlib.sha256(json.dumps(index).encode()).hexdigest()
