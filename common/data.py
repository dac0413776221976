"""Real text as byte tokens, and global batches that do not depend on the world size."""

import hashlib
import random
import stat
import sysconfig
from pathlib import Path

import numpy as np
import torch

from common.errors import InputError
from common.measure.hardware import available

STANDARD_LIBRARY_BYTES = 4_000_000
LARGE = 2**26  # bytes: a larger text is mapped, not read, and digested by samples
AS_TOKENS = 1 + 2 * 8  # bytes of memory per byte of a sample: itself, and its int64 input and target
SAMPLES, SAMPLE = 256, 2**16  # the samples of a large text: their number, and bytes in each


def load_text(path=None):
    """Read the bytes of a file, or, without a path, the source of Python's own standard library.

    The library's source is on every machine that can run this, and licensed with Python itself, so nothing
    is downloaded. Another version of Python has another source: give a path if machines must agree.

    Returns:
        uint8 array [bytes], memory-mapped if the file is large.

    Raises:
        InputError: the path is missing, not a file (a pipe may be endless), unreadable or empty.
    """
    if path is None:
        sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(source.read_bytes() for source in sources)[:STANDARD_LIBRARY_BYTES]
        return np.frombuffer(text, dtype=np.uint8)
    refused, hint = f"cannot read the text {str(path)!r}", "give a readable file, or none to use Python's own source"
    try:
        found = Path(path).stat()
        if not stat.S_ISREG(found.st_mode) and not stat.S_ISDIR(found.st_mode):
            raise InputError(f"{refused}: it is a device or a pipe, which may have no end; {hint}")
        if found.st_size > LARGE:
            return np.memmap(path, dtype=np.uint8, mode="r")
        # Some files in /proc are endless, and report a size of 0.
        text = Path(path).read_bytes() if found.st_size else b""
    except OSError as error:
        raise InputError(f"{refused}: {error.strerror}; {hint}") from error
    if not text:
        raise InputError(f"the text {str(path)!r} is empty; give a file with some bytes in it")
    return np.frombuffer(text, dtype=np.uint8)


def digest(text):
    """The sha256 of a text's length and bytes; of a large text's evenly spread samples."""
    found = hashlib.sha256(str(len(text)).encode())
    if len(text) <= LARGE:
        found.update(text)
    else:
        for begin in np.linspace(0, len(text) - SAMPLE, SAMPLES, dtype=np.int64):
            found.update(text[begin : begin + SAMPLE])
    return found.hexdigest()


class Batches:
    """Random windows of `window` bytes from a text, uint8 [bytes]; `global_batch` of them per step, over all ranks.

    Sample i of a step depends on (seed, step, i) and on nothing else.

    Raises:
        InputError: the text is shorter than one window.
    """

    def __init__(self, text, window, global_batch, seed=0):
        if len(text) < window:
            raise InputError(
                f"the text has {len(text)} bytes and one sample needs {window}; "
                "give a longer text or a model with a shorter window"
            )
        self.text, self.window, self.global_batch, self.seed = text, window, global_batch, seed

    def of(self, step, rank, world_size):
        """This rank's contiguous part of the global batch of `step`: uint8 tensor [global_batch // world_size, window].

        Raises:
            InputError: the global batch cannot be divided into equal parts.
        """
        share = self._share(world_size)
        samples = []
        for index in range(rank * share, (rank + 1) * share):
            # A generator per sample, seeded by a string: no state to carry from rank to rank or to save.
            draw = random.Random(f"{self.seed} {step} {index}")
            start = draw.randrange(len(self.text) - self.window + 1)
            samples.append(self.text[start : start + self.window])
        return torch.from_numpy(np.stack(samples))

    def check(self, world_size):
        """Raise InputError if of() would, or if a rank's part of a batch exceeds the free memory."""
        needed, free = self._share(world_size) * self.window * AS_TOKENS, available()
        if needed > free:
            raise InputError(
                f"a global batch of {self.global_batch} takes {needed / 1e9:.3g} GB as tokens on each of {world_size} "
                f"ranks, and {free / 1e9:.3g} GB are free; choose fewer samples"
            )

    def _share(self, world_size):
        if self.global_batch < 1 or self.global_batch % world_size:
            raise InputError(
                f"a global batch of {self.global_batch} cannot be divided over {world_size} ranks; "
                f"choose a positive multiple of {world_size}"
            )
        return self.global_batch // world_size
