"""Checks that ranks make together before they go on: whether they have the same, and whether none has failed."""

import contextlib
import itertools

from safetensors import SafetensorError

from common.errors import InputError


def check_agreement(found, comm, label="the check of the model"):
    """Raise on every rank the error that any has found, so that none waits for one that has left.

    Args:
        found: an InputError; or a list of (what it is, a value that must be the same on all ranks, how to fix it).
    """
    everyone = [found] if comm.simulated else comm.gather_objects(found, label)
    for theirs in everyone:
        if isinstance(theirs, InputError):
            raise theirs
    for rank, theirs in enumerate(everyone):
        for mine, other in itertools.zip_longest(found, theirs):
            if mine != other:
                what, _, how = mine or other
                values = [line[1] for line in (mine, other) if line and isinstance(line[1], str)]
                shown = f" ({' and '.join(values)})" if values else ""
                raise InputError(f"{what} differs between rank {comm.rank} and rank {rank}{shown}; {how}")


@contextlib.contextmanager
def together(comm, failure):
    """Run a block on every rank; if one raises, every rank raises an InputError that names it.

    The block has no collectives: ranks that fail in it would miss them. Ranks meet after it.
    """
    caught = problem = None
    try:
        yield
    except Exception as error:
        caught, told = error, isinstance(error, (InputError, OSError, SafetensorError))
        said = str(error) if told else f"{type(error).__name__}: {error}"  # a KeyError says its key alone
        problem = " ".join(said.split())
    for rank, theirs in enumerate(comm.gather_objects(problem, "what a rank does alone")):
        if theirs is not None:
            raise InputError(f"{failure}: rank {rank}: {theirs}") from caught
