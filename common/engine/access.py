"""Between a step and the next: weights and gradients, whole on every rank, to be read or written; and the way back."""

from common.engine import snapshots
from common.engine.gradients import gradients
from common.engine.writes import gathered


class Access:
    """The part of `EngineBase` by which a training loop reaches what is sharded."""

    def gathered(self, *modules, write=False):
        """A context in which the weights of `modules` (all, if none is named) are whole on every rank, for reading.

        With `write`, a collective, for writing: each rank keeps its shard of what is there when the context is left, in
        master weights and second shards too. What the optimizer keeps stays.

        Raises:
            InputError: weights were written in a context for reading, or not alike on all ranks.
        """
        return gathered(self, modules, write)

    def gradients(self, *modules, write=False):
        """A context in which the mean gradient of `modules` (all, if none is named) is whole on every rank.

        A collective, between `backward` and `step`: of all backwards since the last step, unscaled, before clipping.

        Args:
            write: each rank keeps its part of what its entries are when the context is left, in fp32.

        Yields:
            {name of a parameter: fp32 tensor of its shape}, to read or, with `write`, to write and replace.

        Raises:
            RuntimeError: there was no backward since the last step.
            InputError: what was written differs between ranks, or has not the parameter's shape. Nothing is kept.
        """
        return gradients(self, modules, write)

    def snapshot(self, optimizer=True):
        """What this rank keeps of the model, copied on the host; with `optimizer` its states and options too.

        Buffers, extra state, the count of updates and the loss scale are in it, gradients are not.
        """
        return snapshots.snapshot(self, optimizer)

    def restore(self, snapshot, optimizer=True):
        """Go back to a snapshot of this engine, a collective; drop gradients.

        Args:
            snapshot: what `snapshot` returned on this rank.
            optimizer: go back to its states and options too; else they stay as they are.

        Raises:
            InputError: it is of another engine or rank; or it has no states of the optimizer.
        """
        snapshots.restore(self, snapshot, optimizer)
