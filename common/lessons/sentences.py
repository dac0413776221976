"""Events in words: one plain sentence for each, from what was recorded and nothing else."""

from common.train import show_bytes

OPERATIONS = {"all_reduce": "an all-reduce", "reduce_scatter": "a reduce-scatter", "all_gather": "an all-gather"}
STATES = {"parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states"}
HOPS = {
    "all_to_all in the node": "{}: its gradients leave as int4, first inside each node, {}.",
    "all_to_all across nodes": "Second hop of {}: the node's sums, rounded to int4 again, cross to their ranks, {}.",
}


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
    if event.kind.startswith("all_gather"):
        return _gathers(event, before, nbytes)
    if event.kind in HOPS:
        whose = event.about if "across" in event.kind else _over(event)
        return HOPS[event.kind].format(whose, show_bytes(event.sent - before.sent))
    kept = "every rank will hold the mean" if event.kind == "all_reduce" else "each rank keeps its shard of the mean"
    if "finish_backward" in event.within:
        return f"Backward is over: the gradients of {event.about} leave too, in {OPERATIONS[event.kind]}; {kept}."
    return f"{_over(event)}: its gradients leave in {OPERATIONS[event.kind]}; {kept}."


def _over(event):
    """Why gradients leave now."""
    if {"end_backward", "finish_backward"} & set(event.within):
        return f"Backward of {event.about} is over"
    return f"{_first(event.about)} is full"


def _gathers(event, before, nbytes):
    about, ahead = _first(event.about), "prefetch" in event.within
    if event.phase == "step":
        waits = ", behind the copy; the host steps on" if event.beside else "; the optimizer does not wait for it"
        return f"The new parameters of {event.about} leave in an all-gather{waits}."
    if event.kind != "all_gather":
        when = "ahead of its use" if ahead else "now"
        return f"{about} is gathered {when}, inside each node, whose second shards hold all of it."
    if before.kind == "up":
        return f"Behind the copy {event.about} is gathered{', while another part computes' if ahead else ''}."
    ranks = len(event.cells[event.about][0])
    plain, sent = nbytes[event.about] * (ranks - 1) // ranks, event.sent - before.sent
    if sent < plain:
        when = "is gathered ahead of its use" if ahead else "is needed now, and gathered"
        return f"{about} {when}, as int8: {show_bytes(sent)} sent, where fp32 would take {show_bytes(plain)}."
    if ahead:
        return f"{about} is gathered ahead of its use: the all-gather runs while another part computes."
    return f"{about} is needed now: an all-gather of its parameters begins."


def _down(event, before, nbytes):
    size = show_bytes(nbytes[event.about] // (len(event.cells[event.about][1]) - len(event.beside)))
    if "disk" in event.beside:
        return f"Behind it, each rank's shard of the mean goes down the bus, {size}, and from the host on to its disk."
    return f"Behind it, each rank's shard of the mean goes down the bus to the host, {size}."


def _up(event, before, nbytes):
    size = show_bytes(event.moved["up"] - before.moved["up"])
    if event.phase == "step":
        return f"The new parameters of {event.about} go up the bus: {size}, each rank's own shard."
    when = "is needed next" if "prefetch" in event.within else "is needed now"
    return f"{_first(event.about)} {when}: each rank's own shard goes up the bus to the device, {size}."


def _reads(event, before, nbytes):
    what, size = _states_and_size(event, before)
    if "read_ahead" in event.within:
        return f"The disk begins to read the {what} of {event.about}, {size}, ahead of their turn."
    return f"The disk begins to read all that the step of {event.about} needs: {what}, {size}."


def _writes(event, before, nbytes):
    what, size = _states_and_size(event, before)
    return f"The disk begins to write what that step made: new {what} of {event.about}, {size}."


def _states_and_size(event, before):
    moved = event.moved[event.kind] - before.moved[event.kind]
    return listed([STATES[name] for name in event.names]), show_bytes(moved)


def _agree(event, before, nbytes):
    sent = show_bytes(event.sent - before.sent)
    return f"All ranks ask each other whether a disk has failed, {sent} sent; they go on together, or stop."


def _arrive(event, before, nbytes):
    kinds = event.names
    if kinds == ["write"]:
        return "Everything is written: the disk has the new parameters and optimizer states."
    if kinds[-1].startswith("all_gather"):
        return _has_gathered(event)
    freed = " Only now may another bucket take room." if "take_room" in event.within else ""
    return f"{_has_reduced(event, before)}{freed}"


def _has_gathered(event):
    new = "new " if event.phase == "step" else ""
    arrived = f"The {new}parameters of {event.about} have arrived"
    if len(event.cells[event.about]) == 3:
        return f"{arrived}: each rank holds them whole."
    if event.names == ["all_gather"]:
        return f"{arrived}, rounded; each rank keeps a second shard of them for its node."
    return f"{arrived} from the node's second shards, with the values of the forward."


def _has_reduced(event, before):
    if "down" not in event.names:
        which = "the mean gradient" if event.names == ["all_reduce"] else "its shard of the mean gradient"
        return f"The gradients of {event.about} have arrived: each rank holds {which}."
    if "disk" not in event.beside:
        return f"The mean gradient of {event.about} lies on the host: each rank's shard on its own."
    wrote = show_bytes(event.moved["write"] - before.moved["write"])
    return f"The mean gradient of {event.about} lies on disk, each rank's shard on its own: {wrote} written."


def _host_step(event, before, nbytes):
    return f"The host is given {event.about} to step, on a thread of its own, behind the buckets before it."


def _stepped(event, before, nbytes):
    if "host" in event.beside:
        on_disk = "disk" in event.beside
        read = f"What was read of {event.about} is there: the" if on_disk else "The"
        does = "steps" if on_disk else "has stepped"
        return f"{read} host {does} {'each rank' if on_disk else event.about + ', each rank'}'s own shard."
    alone = event.cells[event.about][2].count("n") < len(event.cells[event.about][2])
    what = f"its own shard of {event.about}" if alone else f"all of {event.about}"
    stale = " Its node's second shard is out of date." if "s" in "".join(event.cells[event.about][3:]) else ""
    return f"The optimizer steps: each rank updates {what}.{stale}"


def _change(event, before, nbytes):
    if event.method == "zero_grad":
        return "The step is over: the gradients are dropped."
    about = event.names[0]
    device = len(event.cells[about][0]) - len(event.beside)
    now, then = ([letters[:device] for letters in cells[about]] for cells in (event.cells, before.cells))
    size = show_bytes(nbytes[about])
    if _held(now[0]) < _held(then[0]):
        kept = "the device keeps nothing" if "disk" in event.beside else "each rank keeps only its shard"
        return f"{_first(listed(event.names))} is freed: {kept} of the {size} of parameters."
    if _held(now[1]) > _held(then[1]):
        return f"{_first(about)} takes room for its gradients, {size}: the first of them is ready."
    return f"`{event.method}` is done with {listed(event.names)}."


WORDS = {
    "start": _start,
    "forward": _computes,
    "backward": _computes,
    "pack": _pack,
    "down": _down,
    "up": _up,
    "read": _reads,
    "write": _writes,
    "agree": _agree,
    "arrive": _arrive,
    "host_step": _host_step,
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
