"""Events in words: one plain sentence for each, from what was recorded and nothing else."""

from common.train import show_bytes

OPERATIONS = {"all_reduce": "an all-reduce", "reduce_scatter": "a reduce-scatter", "all_gather": "an all-gather"}


def sentence(event, before, nbytes):
    """What happens in an event.

    Args:
        event: an `events.Event`.
        before: the one before it; None for the first.
        nbytes: {bucket: bytes of the whole bucket's parameters}.
    """
    return WORDS.get(event.kind, _begins)(event, before, nbytes)


def _start(event, before, nbytes):
    return "Between steps: this is what each rank keeps."


def _computes(event, before, nbytes):
    begins = "Forward" if event.kind == "forward" else "Backward"
    return f"{begins} of {listed(event.names)}."


def _pack(event, before, nbytes):
    one = len(event.names) == 1
    which = event.names[0] if one else f"from {event.names[0]} to {event.names[-1]}"
    moves = "A gradient moves" if one else f"{len(event.names)} gradients move"
    return f"{moves} into {event.about}: {which}. Each rank still has its own."


def _begins(event, before, nbytes):
    if event.kind == "all_gather":
        return _gathers(event)
    kept = "every rank will hold the mean" if event.kind == "all_reduce" else "each rank keeps its shard of the mean"
    if "finish_backward" in event.within:
        return f"Backward is over: the gradients of {event.about} leave too, in {OPERATIONS[event.kind]}; {kept}."
    when = f"Backward of {event.about} is over" if "end_backward" in event.within else f"{_first(event.about)} is full"
    return f"{when}: its gradients leave in {OPERATIONS[event.kind]}; {kept}."


def _gathers(event):
    if event.phase == "step":
        return f"The new parameters of {event.about} leave in an all-gather; the optimizer does not wait for it."
    if "prefetch" in event.within:
        return f"{_first(event.about)} is gathered ahead of its use: the all-gather runs while another part computes."
    return f"{_first(event.about)} is needed now: an all-gather of its parameters begins."


def _arrive(event, before, nbytes):
    (collective,) = event.names
    if collective == "all_gather":
        new = "new " if event.phase == "step" else ""
        return f"The {new}parameters of {event.about} have arrived: each rank holds them whole."
    which = "its shard of the mean gradient" if collective == "reduce_scatter" else "the mean gradient"
    freed = " Only now may another bucket take room." if "take_room" in event.within else ""
    return f"The gradients of {event.about} have arrived: each rank holds {which}.{freed}"


def _stepped(event, before, nbytes):
    alone = event.cells[event.about][2].count("n") < len(event.cells[event.about][2])
    what = f"its own shard of {event.about}" if alone else f"all of {event.about}"
    return f"The optimizer steps: each rank updates {what}."


def _change(event, before, nbytes):
    if event.method == "zero_grad":
        return "The step is over: the gradients are dropped."
    about = event.names[0]
    now, then, size = event.cells[about], before.cells[about], show_bytes(nbytes[about])
    if _held(now[0]) < _held(then[0]):
        return f"{_first(listed(event.names))} is freed: each rank keeps only its shard of the {size} of parameters."
    if _held(now[1]) > _held(then[1]):
        return f"{_first(about)} takes room for its gradients, {size}: the first of them is ready."
    return f"`{event.method}` is done with {listed(event.names)}."


WORDS = {
    "start": _start,
    "forward": _computes,
    "backward": _computes,
    "pack": _pack,
    "arrive": _arrive,
    "stepped": _stepped,
    "change": _change,
}


def _held(cells):
    return len(cells) - cells.count(".")


def _first(name):
    """A name at the beginning of a sentence: bucket 3 and the root with a capital, blocks.1 as the code has it."""
    return name if "." in name else name[0].upper() + name[1:]


def listed(names):
    """Names in a sentence: wte, wpe and blocks.0."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
