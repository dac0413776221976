"""Wrong engines, each by one planted fault, to see that the suite notices. Every mutant is a context manager."""

import contextlib

from common.collectives import Collectives, Handle
from common.engine_base import Bucket


@contextlib.contextmanager
def replaced(owner, name, make):
    """Replace a method by `make(original)` within the context."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def divide_forgotten(engine):
    def make(original):
        def reduce_without_division(self, tensor, received, shard):
            original(self, tensor, received, shard)
            shard.mul_(self.size)

        return reduce_without_division

    return replaced(Collectives, "_reduce_in_rank_order", make)


def padding_not_zeroed(engine):
    def make(original):
        def leave_padding(self):
            original(self)
            self.local[self.numel :].fill_(float("nan"))  # what torch.empty may hold

        return leave_padding

    return replaced(Bucket, "seal", make)


def bucket_not_flushed(engine):
    def make(original):
        def keep_incomplete(self):
            for bucket in self.buckets:
                if bucket.handle is None:  # pretend that it travelled
                    bucket.handle = Handle((), lambda: None)
            original(self)

        return keep_incomplete

    return replaced(engine, "finish_backward", make)


def gradient_not_freed(engine):
    def make(original):
        def keep_room(self, bucket):
            if bucket.local is None:
                self.take_room(bucket)
            room = bucket.local
            original(self, bucket)
            bucket.local = room

        return keep_room

    return replaced(engine, "reduce_bucket" if hasattr(engine, "reduce_bucket") else "reduce", make)


@contextlib.contextmanager
def parameter_averaged(engine):
    def leave_gradient(original):
        def reduce(self, bucket):
            bucket.seal()
            bucket.handle = Handle((), lambda: None)

        return reduce

    def average(original):
        def update(self):
            original(self)
            for bucket in self.buckets:
                self.comm.all_reduce(bucket.parameters).wait()

        return update

    with replaced(engine, "reduce", leave_gradient), replaced(engine, "update", average):
        yield


def sum_in_order_of_arrival(engine):
    def make(original):
        def own_piece_first(self, tensor, received):
            pieces = original(self, tensor, received)
            return [piece.clone() for piece in pieces[self.rank :] + pieces[: self.rank]]

        return own_piece_first

    return replaced(Collectives, "_collect", make)


# name -> (mutant, model that shows it, stages where it can be planted)
ALL = ("stage0_ddp", "stage1_os", "stage2_grad", "stage3_param")
MUTANTS = {
    "divide forgotten": (divide_forgotten, "gpt-tiny", ALL),
    "padding not zeroed": (padding_not_zeroed, "gpt-tiny", ALL),
    "bucket not flushed": (bucket_not_flushed, "moe-tiny", ALL),
    "gradient not freed": (gradient_not_freed, "gpt-tiny", ALL[2:]),
    "parameter averaged instead of gradient": (parameter_averaged, "gpt-tiny", ALL[:1]),
    "sum in order of arrival": (sum_in_order_of_arrival, "gpt-tiny", ALL),
}


def healthy(engine):
    """No fault at all."""
    return contextlib.nullcontext()
