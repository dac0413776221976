"""For `notebooks/06_memory`: memory blocks that a step allocates and frees, and the checks of its exercises."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from common.measure.memory import storage_id
from common.tensors import tensors_in
from course.pages.answers import NUMBER, TRUTH, asks, given, numbers


class Moves(TorchDispatchMode):
    """Blocks of memory that this thread's operations allocate and free. A context manager around a training.

    Attributes:
        moves: [(number of a block, bytes)] in their order; 0 bytes for a block that is given back. A storage that
            changes its size in place, as those of gathered units do, gives its block back and takes another one.
    """

    def __init__(self):
        super().__init__()
        self.moves = []
        self._held = {}  # identity of a storage -> [weak reference, number of its block, bytes]
        self._blocks = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.now()
        for tensor in tensors_in(result):
            if tensor.device.type != "meta" and storage_id(tensor) not in self._held:
                self._held[storage_id(tensor)] = [StorageWeakRef(tensor.untyped_storage()), None, 0]
        self.now()
        return result

    def now(self):
        """The number of moves so far, with all that has come and gone since the last operation."""
        for key, held in list(self._held.items()):
            reference, block, nbytes = held
            # torch has no public way from a weak reference back to its storage.
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            size = 0 if storage is None else storage.nbytes()
            if size != nbytes:
                if nbytes:
                    self.moves.append((block, 0))
                if size:
                    self.moves.append((self._blocks, size))
                held[1:] = self._blocks, size
                self._blocks += size > 0
            if storage is None:
                del self._held[key]
        return len(self.moves)


@asks(numbers(2, "(3, 4)"), str)
def check_batches(answer, room, peaks):
    """Whether answers are the largest batches, in samples per rank, whose peaks fit into `room` bytes: a line for each.

    Peaks are measured, [{samples per rank: bytes}], and continued as a line beyond that.
    """
    return "\n".join(_batch(one, room, of_one) for one, of_one in zip(answer or (None, None), peaks, strict=True))


def _batch(answer, room, peaks):
    if answer is None:
        return "not solved yet"
    (few, low), (many, high) = min(peaks.items()), max(peaks.items())
    per_sample = (high - low) / (many - few)
    fixed = low - few * per_sample
    largest = int((room - fixed) // per_sample)
    if abs(answer - largest) <= 1:  # what is in flight at a peak is a matter of timing
        return "solved"
    if abs(answer - room // per_sample) <= 1:
        return "not yet: you left out what a rank holds whatever the batch: the model states"
    needed = fixed + answer * per_sample
    if needed > room:
        return f"not yet: {answer} samples need {needed / 1e6:.1f} MB"
    return f"not yet: {answer} samples need {needed / 1e6:.1f} MB, so there is room for more"


@asks(TRUTH, str)
def check_refused(formula, holes):
    """Whether `formula(holes, nbytes)` says which requests fragmentation alone refuses, of holes in bytes."""
    free, largest = sum(holes), max(holes)
    given(formula(holes, free))
    if formula(holes, free + 1):
        return "not yet: where less is free than is asked for, that alone is the reason"
    if not formula(holes, largest + 1):
        return "not yet: a block lies in one piece, so the largest hole decides, not the sum of all"
    if formula(holes, largest):
        return "not yet: what is just as large as the largest hole fits into it"
    return "solved"


@asks(NUMBER, str)
def check_depths(formula, rows, within=0.15):
    """Hold `formula(stage, n, room)`, layers, against a record {stage: (ranks, room in bytes, layers that trained)}.

    Buckets in flight, activations and the embedding are not in the formula: so much of the depth is left for them.
    """
    lines = []
    for stage, (ranks, room, layers) in rows.items():
        said = formula(stage, ranks, room)
        if said is None:
            verdict = "not solved yet"
        elif abs(said - layers) <= within * layers:
            verdict = f"solved: {said:.0f} layers, and {layers} trained"
        else:
            times = said / layers
            hint = "is everything sharded that this stage shards?" if times < 1 else "is something counted too low?"
            verdict = f"not yet: {said:.0f} layers, where {layers} trained, {times:.2f} times as many; {hint}"
        lines.append(f"stage {stage}: {verdict}")
    return "\n".join(lines)
