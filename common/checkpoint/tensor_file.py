"""safetensors files, one tensor at a time: the library writes all tensors at once, and maps a whole file to read one.

    8 bytes     the header's length, little-endian
    header      JSON: {name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}, spaces to a multiple of 8
    values      one tensor after the other, without gaps: row by row, little-endian

Offsets count from the end of the header. A tensor is one contiguous run of bytes, so any part of it can be read alone.

Source: https://github.com/huggingface/safetensors, "Format".
"""

import contextlib
import hashlib
import itertools
import json
import math
import os
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES  # the library has no public name for these

from common.errors import InputError

DTYPES = {**_TYPES, "F8_E8M0": torch.float8_e8m0fnu}  # the library reads and writes this one too
CODES = {dtype: code for code, dtype in DTYPES.items()}
HEADER = 100_000_000  # bytes of the longest header that safetensors reads
BLOCK = 2**23  # bytes that are read at a time


def write(file, tensors, value_of, metadata):
    """Write a file; return once it is on the disk.

    Args:
        tensors: {name: (dtype, shape)} of all its tensors.
        value_of: `value_of(name)` returns a tensor, on the CPU; it is called once per name, in the order of the file.
        metadata: {str: str}, kept in the header.

    Returns:
        The sha256, in hex, of the bytes meant for the file, so that a fault of the disk shows.

    Raises:
        InputError: safetensors cannot hold the tensors; see `check`.
        OSError: the file cannot be written, or does not hold what was written. What is there of it stays.
    """
    check(tensors, metadata)
    # The widest dtype first: each tensor then begins at a multiple of its element size, as memory mapping needs.
    order = sorted(tensors, key=lambda name: -tensors[name][0].itemsize)
    values = (_bytes_of(value_of(name)) for name in order)
    parts = itertools.chain([_header(order, tensors, metadata)], values)
    checksum = hashlib.sha256()
    with open(file, "wb") as opened:
        for part in parts:
            checksum.update(part)
            opened.write(part)
            del part  # freed before the next is made: memory may not hold both
        opened.flush()
        os.fsync(opened.fileno())
        if hasattr(os, "posix_fadvise"):  # reading it back then reads the disk, not the page cache
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with Source(file) as written:
        if written.tensors != {name: (dtype, tuple(shape)) for name, (dtype, shape) in tensors.items()}:
            raise OSError(f"{file} does not hold what was written to it")
    return checksum.hexdigest()


def check(tensors, metadata):
    """Check that a file can hold the tensors, before the first byte is written.

    Raises:
        InputError: safetensors has no name for a dtype, or its readers would refuse a header of this length.
    """
    for dtype in {dtype for dtype, _ in tensors.values()} - CODES.keys():
        names = ", ".join(name for name, (theirs, _) in tensors.items() if theirs == dtype)
        raise InputError(f"safetensors cannot hold {dtype}, the dtype of {names}; cast it, or leave it out")
    length = len(_header(tensors, tensors, metadata)) - 8
    if length > HEADER:
        raise InputError(
            f"names and values that are not tensors take {length / 1e6:.0f} MB, and a safetensors file holds "
            f"{HEADER / 1e6:.0f} MB of them; put long lists into tensors, or leave them out"
        )


def kind(dtype, shape):
    """What must be equal for a file's tensor to become one here: floating dtypes are cast to each other."""
    return f"{'floating' if dtype and dtype.is_floating_point else dtype}, of shape {list(shape)}"


def _header(order, tensors, metadata):
    described, end = {"__metadata__": metadata}, 0
    for name in order:
        dtype, shape = tensors[name]
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        described[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor):
    """A tensor's bytes as a memoryview, without a copy if it is contiguous."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())


class Tensors(contextlib.AbstractContextManager):
    """Tensors in files; `read` reads parts of them.

    Attributes:
        tensors: {name: (dtype, shape)}; the dtype is None if torch does not have it.
        at_once: elements that `overflows` checks at a time, in float64: torch has no isfinite for float8.
    """

    at_once = BLOCK // 8

    def __exit__(self, *raised):
        pass

    def overflows(self, name, start, stop, dtype):
        """Whether elements [start, stop) of a tensor, row by row, hold a finite number too large for a dtype."""
        own, _ = self.tensors[name]
        if dtype == own or torch.finfo(dtype).max >= torch.finfo(own).max:
            return False
        for begin in range(start, stop, self.at_once):
            values = torch.empty(min(self.at_once, stop - begin), dtype=own, device="cpu")
            self.read(name, begin, values)
            if (values.double().isfinite() & ~values.to(dtype).double().isfinite()).any():
                return True
        return False

    def extra_state(self, names):
        """The extra state in the file, {name: value}; here tensors."""
        return {name: self.get_tensor(name) for name in names if name in self.tensors}

    def get_tensor(self, name):
        dtype, shape = self.tensors[name]
        values = torch.empty(shape, dtype=dtype, device="cpu")
        self.read(name, 0, values.view(-1))
        return values


class Source(Tensors):
    """Open safetensors files: one, or several by their index, JSON with {"weight_map": {name: file}}.

    Args:
        file: the path; an index's ends with ".json".

    Attributes:
        metadata: {str: str}; of several files, the last one's.

    Raises:
        InputError: the JSON is no index, or a file lacks a tensor that the index names.
        SafetensorError: a file is not in safetensors format, or is truncated.
        OSError: a file cannot be read.
    """

    def __init__(self, file):
        self.tensors, self._place_of = {}, {}  # name -> its open file, and where it begins there
        with contextlib.ExitStack() as opened:
            for one, names in (_weight_map(Path(file)) if str(file).endswith(".json") else {file: None}).items():
                self._add(opened, one, names)
            self._close = opened.pop_all().close

    def _add(self, opened, file, names):
        with safe_open(file, "np"):  # checks the header; "pt" would map the file into this process's memory
            pass
        data = opened.enter_context(open(file, "rb"))  # noqa: SIM115  closed by `__exit__`
        length = int.from_bytes(data.read(8), "little")
        header = json.loads(data.read(length))
        self.metadata = header.pop("__metadata__", {})
        for name in names or header:
            if name not in header:
                raise InputError(f"{name!r} is not in {file.name!r}, where the index has it")
            self.tensors[name] = DTYPES.get(header[name]["dtype"]), tuple(header[name]["shape"])
            self._place_of[name] = data, 8 + length + header[name]["data_offsets"][0]

    def __exit__(self, *raised):
        self._close()

    def read(self, name, start, target):
        """Read elements of a tensor, in row-major order from element `start`.

        Args:
            target: a flat tensor, whose length is the number read. They are cast to its dtype, a block at a time.
        """
        (dtype, _), (data, offset) = self.tensors[name], self._place_of[name]
        block = BLOCK // dtype.itemsize
        for begin in range(0, len(target), block):
            part = target[begin : begin + block]
            in_place = part.dtype == dtype and part.device.type == "cpu"
            values = part if in_place else torch.empty(len(part), dtype=dtype, device="cpu")
            data.seek(offset + (start + begin) * dtype.itemsize)
            if data.readinto(_bytes_of(values)) != values.nbytes:
                raise OSError(f"{data.name} ends too early")
            if values is not part:
                part.copy_(values)


def _weight_map(index):
    """{file: names of its tensors}, of an index."""
    names_of = {}
    try:
        for name, file in json.loads(index.read_bytes())["weight_map"].items():
            names_of.setdefault(index.parent / file, []).append(name)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError("it is not an index: that is JSON with a 'weight_map' from names to files") from error
    return names_of
