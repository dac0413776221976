"""The door: every public call of an engine passes here. It is right where the engine stands, or refused in a line.

`calls.toml` has the table: what is looked at before each call, and where a call is refused. All else is right, which
means that it does what a plain loop would do there. A call that another call makes passes unseen.
"""

import contextlib
import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable)  # a method that is a call
TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class TrainingState:
    """Where an engine stands.

    Attributes:
        inside: "a forward" or "a backward", while the caller's own code runs in one.
        call: the public call that has passed the door and has not ended.
        kept: of each open context for writing, what keeps the writes made so far; the innermost last.
        records: whether the forward that runs records a graph.
        reduces, retains_graph: whether the backward that runs reduces its gradients, and keeps its graph.
        syncs: whether backwards reduce: not under `no_sync`.
        failed: whether a backward or a step has raised, so that the gradients since the last step are to be dropped.
        unfinished: of a backward that has raised, whether it reduces; None if there is nothing to finish.
        steps_optimizer, names_state: whether the engine itself calls `optimizer.step()`, or `module.state_dict()`.
    """

    def __init__(self):
        self.inside = self.call = self.unfinished = None
        self.kept, self.syncs = [], True
        self.records = self.reduces = self.retains_graph = self.failed = False
        self.steps_optimizer = self.names_state = False

    def where(self, engine):
        """Those of the table's places at which the engine stands."""
        if self.inside:
            yield f"inside {self.inside}"
        held = [bucket.pending or bucket.has_gradient for bucket in engine.buckets]
        if held and (self.failed or not any(held)):
            yield "without a gradient"

    @contextlib.contextmanager
    def running(self, inside, records=False):
        """In this context the caller's own code runs inside a forward or a backward, and may make calls."""
        before = self.inside, self.call, self.records
        self.inside, self.call, self.records = inside, None, records
        try:
            yield
        finally:
            self.inside, self.call, self.records = before


@contextlib.contextmanager
def entering(engine, call, ordinary=True):
    """A context in which a public call runs, once it has passed the door.

    `ordinary` takes it out of torch.inference_mode(): tensors made in that mode cannot be written by another thread,
    such as the collectives' lane, nor by a later step.

    Raises:
        RuntimeError: the table refuses it where the engine stands.
    """
    state, outermost = engine.state, engine.state.call is None
    for where in state.where(engine) if outermost else ():
        refused = TABLE["refused"][where]
        if call in refused["calls"]:
            raise RuntimeError(refused["line"].format(call=call))
    try:
        if outermost:
            state.call = call
            with _in_ordinary_mode():
                for look in TABLE["before"][call]:
                    getattr(engine.guards, look)()
        with _in_ordinary_mode() if ordinary else contextlib.nullcontext():
            yield
    finally:
        if outermost:
            state.call = None


def _in_ordinary_mode():
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def entered(call: str, **how: bool) -> Callable[[F], F]:
    """A decorator: a method that is a public call; `how` as in `entering`."""

    def wrap(method: F) -> F:
        @functools.wraps(method)
        def run(engine, *args, **kwargs):
            with entering(engine, call, **how):
                return method(engine, *args, **kwargs)

        return cast(F, run)

    return wrap


@contextlib.contextmanager
def kept(engine, keep, undo=lambda: None):
    """A context for writing: `keep()` has every rank keep what was written so far, at its end and before other calls.

    After an exception, or what `keep` refuses, `undo()` drops what was not kept.
    """
    keep, undo = (torch.inference_mode(False)(torch.no_grad()(function)) for function in (keep, undo))
    engine.state.kept.append(keep)
    try:
        yield
        keep()
    except BaseException:
        undo()
        raise
    finally:
        engine.state.kept.remove(keep)
