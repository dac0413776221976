"""What an engine reads and writes: the whole model as a state dict, checkpoints, weights from elsewhere."""

import torch

from common.checkpoint import checkpoint, model_state, weights
from common.checkpoint.background import Saving
from common.errors import InputError
from common.tensors import end_to_end, past_subclasses

# Who evaluates in torch.inference_mode() may save there. What is made in that mode no other thread can write, such as
# the lane of collectives.
in_ordinary_mode = torch.inference_mode(False)


class Files:
    """The part of `EngineBase` that concerns files.

    Attributes:
        saving: the last save that nobody has waited for, a `Saving`; None if there is none.
    """

    saving = None

    def begin_load(self):
        """A phase: before the parameters change otherwise than by a step."""
        for bucket in self.buckets:
            bucket.bits = None

    @in_ordinary_mode
    def full_state_dict(self, to_rank=None):
        """The whole model, a collective: keys of model.state_dict(), full tensors on the CPU.

        Parameters that have fp32 master weights come as those, others in their own dtype; buffers and extra state are
        those of rank 0.

        Args:
            to_rank: the rank of the engine's group that gets it; the others send their shards, and get {}. With None
                every rank gets it.

        Raises:
            InputError: there is no such rank; or a hook puts something else into the state dict.
        """
        if to_rank is not None and to_rank not in range(self.world_size):
            ranks = f"0 to {self.world_size - 1}"
            raise InputError(f"to_rank={to_rank}: give a rank, {ranks}, the same on all of them; None gives it to all")
        self.guards.check_places()
        self.synchronize()
        self.buffers.broadcast()
        return whole_state(self, to_rank)

    @past_subclasses  # a hook that reads a freed weight is refused by the name of what it makes
    def state_as_it_stands(self):
        """model.state_dict() with the parameters and buffers themselves, whole or not: for its keys."""
        self.naming = True
        try:
            return self._module.state_dict(keep_vars=True)
        finally:
            self.naming = False

    @in_ordinary_mode
    def save(self, path, extra=None, wait=True):
        """Write a checkpoint that any stage at any world size can load, in place of the one there. A collective.

        Args:
            path: a folder that all ranks share, made if it is missing.
            extra: this rank's own state beside the model's, such as a scheduler's state_dict, the position in the data,
                torch.get_rng_state(): dict, list, tuple, str, int, float, bool, None and tensors, nested at will.
                Subclasses of these come back as these. A few dtypes, such as complex128, safetensors cannot hold.
            wait: return when it is on the disk. Else at once, with a `Saving` whose `wait()` does that and raises what
                failed, while training goes on; call it before the program ends. What is written is the state at this
                call, of which a copy is held on the host until then. The next save or load waits for it.

        Raises:
            InputError: on every rank, if one could not write, or rank 0 cannot see what one wrote, as in a folder that
                nodes do not share; it names that rank. The checkpoint that was there stands.

        Warns:
            RuntimeWarning: it is saved, and older files could not be removed.
        """
        self.guards.check_places()
        self.synchronize()
        self.finish_saving()
        self.buffers.broadcast()
        if wait:
            return checkpoint.write(self.comm, path, checkpoint.Snapshot(self, path, extra))
        self.saving = Saving(self, path, extra)
        return self.saving

    def finish_saving(self):
        """Wait for a save beside training, and raise what failed in it, unless some rank was told. A collective."""
        saving, self.saving = self.saving, None
        if saving is not None and not any(self.comm.gather_objects(saving.told, "the last save")):
            saving.wait()

    @in_ordinary_mode
    def load(self, path):
        """Read a checkpoint and return its `extra`; drop gradients. A collective; see `checkpoint.py`."""
        self.zero_grad()
        self.synchronize()
        self.finish_saving()
        extra = checkpoint.load(self, path)
        self._initial.unset.clear()
        self.writes.made(self.buckets + self.frozen)
        return extra

    @in_ordinary_mode
    def load_weights(self, file):
        """Read parameters and buffers by name from a safetensors file or a state dict; drop gradients. A collective.

        See `weights.py`.

        The optimizer's states stay as they are: begin with a fresh engine, unless they fit the new weights too.
        """
        self.zero_grad()
        self.synchronize()
        self._initial.take_from_file(weights.load(self, file))
        self.writes.made(self.buckets + self.frozen)


def whole_state(engine, to_rank=None):
    """See `EngineBase.full_state_dict`. A collective; one bucket at a time is whole."""
    extra = model_state.extra_state_of_rank_0(engine)
    values, here = {}, to_rank in (None, engine.rank)
    for bucket in engine.buckets + engine.frozen:
        with bucket.values_at_hand():
            whole = _whole(engine.comm, bucket, to_rank)
            for name, parameter in bucket.members.items() if here else ():
                values[parameter] = bucket.view(whole, name).detach().cpu().clone()
    state = engine.state_as_it_stands() if here else {}
    values |= {buffer: buffer.detach().cpu().clone() for buffer in engine.module.buffers()} if here else {}
    return {key: extra[key] if key in extra else values[tensor] for key, tensor in state.items()}


def _whole(comm, bucket, to_rank):
    """A bucket's values, flat; None on a rank that sends its shard to another."""
    if bucket.kind.trainable and bucket.sixteen_bit:
        kept = end_to_end([piece.master for piece in bucket.pieces], comm.device)
    else:
        kept = bucket.parameters.to(comm.device)  # from the tier where it lies
    if len(kept) == bucket.padded_numel:
        return kept
    whole = None
    if to_rank in (None, comm.rank):
        whole = torch.empty(bucket.padded_numel, dtype=kept.dtype, device=kept.device)
    if to_rank is None:
        comm.all_gather(kept, whole, bucket.name).wait()
    else:
        comm.gather(kept, whole, to_rank, bucket.name).wait()
    return whole
