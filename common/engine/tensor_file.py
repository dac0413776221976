"""A safetensors file, read part by part into place, through a small buffer.

The library maps a file whole, and privately: under a limit on memory (RLIMIT_DATA) a load would pay for the file beside
what it fills, and without one its pages count as resident. Here a file costs its header and a buffer.

    8 bytes    length of the header, little-endian
    header     JSON: {name: {"dtype", "shape", "data_offsets": [first byte, one behind the last]}, "__metadata__": {..}}
    bytes      the tensors, contiguous
"""

import json
import os

import torch
from safetensors import SafetensorError
from safetensors.torch import _TYPES as DTYPES  # the format's names of dtypes; there is no public table

BUFFER = 2**18  # bytes that are read at a time: they stay in the cache until they are copied


class TensorFile:
    """A safetensors file, open for reading. A context manager.

    Attributes:
        metadata: {str: str}, as it was saved.

    Raises:
        OSError: it cannot be read.
    """

    def __init__(self, path):
        self._path, self._file = path, os.open(path, os.O_RDONLY)
        header = int.from_bytes(os.pread(self._file, 8, 0), "little")
        self._entries = json.loads(os.pread(self._file, header, 8))
        self.metadata = self._entries.pop("__metadata__", {})
        self._begin = 8 + header
        self._buffer = torch.empty(BUFFER, dtype=torch.uint8)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        os.close(self._file)

    def get_tensor(self, name):
        """A whole tensor, on the CPU."""
        entry = self._entries[name]
        tensor = torch.empty(entry["shape"], dtype=DTYPES[entry["dtype"]])
        self.fill(tensor.view(-1), name)
        return tensor

    def fill(self, target, name, start=0):
        """Write elements [start, start + len(target)) of a tensor into a flat one, of any dtype, on any device.

        Raises:
            SafetensorError: the file ends before.
        """
        entry = self._entries[name]
        dtype = DTYPES[entry["dtype"]]
        at = self._begin + entry["data_offsets"][0] + start * dtype.itemsize
        for part in target.split(BUFFER // dtype.itemsize):
            read = self._buffer[: len(part) * dtype.itemsize]
            if os.preadv(self._file, [read.numpy()], at) < len(read):
                raise SafetensorError(f"{self._path} ends within {name}")
            part.copy_(read.view(dtype))
            at += len(read)
