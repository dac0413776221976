"""How long a simulated step takes: each stream has a clock, which operations advance; waiting takes the later one.

Streams are those that the engine uses: "compute", and a lane for collectives, for the bus, for the host's steps and for
the disk. An operation takes as long as its arithmetic or its memory traffic, whichever is longer, and a little more; a
collective as long as its bytes take over the slowest link that they cross. Nothing is measured here.
"""

import contextlib
from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode

from common.measure.timeline import ROWS
from common.ranks.lanes import SimulatedLane
from common.tensors import tensors_in

COMPUTE = "compute"
HOST_LANES = ("host", "saving")
LINKS = ("bus", "disk")
ON_CPU = {  # {attention: (count, its tensors' shapes)}: torch's flop counter knows them by the names that GPUs have
    "_scaled_dot_product_flash_attention_for_cpu": (flop_counter.sdpa_flop_count, 3),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (flop_counter.sdpa_backward_flop_count, 4),
}
FREE = ("prim", "profiler")
# What torch's names of collectives have in them -> the traffic meter's.
COLLECTIVES = {"allgather": "all_gather", "reduce_scatter": "reduce_scatter", "allreduce": "all_reduce"}
COLLECTIVES |= {"alltoall": "all_to_all", "broadcast": "broadcast"}


def collective_of(function, args):
    """(kind, group, bytes) of an operation of torch.distributed: the traffic meter's kind, and what each rank sends.

    Of N parts that is N-1, twice in an all-reduce. A message is sent whole, and what receives it sends nothing.
    """
    name = function.__name__.partition(".")[0]
    kind = next((kind for word, kind in COLLECTIVES.items() if word in name), name.partition("_")[0])
    group = dist.ProcessGroup.unbox(next(arg for arg in args if isinstance(arg, torch.ScriptObject)))
    whole = max(sum(tensor.nbytes for tensor in tensors_in(arg)) for arg in args)
    parts = 2 if kind == "all_reduce" else 1
    sent = parts * whole * (group.size() - 1) / group.size()
    return kind, group, {"send": whole, "recv": 0}.get(kind, sent)


class Clock(TorchDispatchMode):
    """The clocks of a rank's streams over what runs in this context; `traffic` is the engine's, which knows the phase.

    Attributes:
        now: {stream: seconds}.
        busy: {stream: seconds in which it did something}.
        waited: {lane: seconds that compute waited for it}.
        flops: {phase: floating-point operations}.
        events: [(stream, what, beginning, seconds)].
    """

    def __init__(self, hardware, ranks_per_node, traffic):
        super().__init__()
        self.hardware, self.ranks_per_node, self._traffic = hardware, ranks_per_node, traffic
        self.now, self.busy, self.waited, self.flops = defaultdict(float), Counter(), Counter(), Counter()
        self.events, self._stream = [], COMPUTE

    def __enter__(self):
        SimulatedLane.clock = self
        return super().__enter__()

    def __exit__(self, *error):
        SimulatedLane.clock = None
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            self.spend(function.__name__, self._collective(function, args))
        elif function.namespace not in FREE:
            self.spend(function.__name__, self._operation(function, args, kwargs or {}, result))
        return result

    def spend(self, what, seconds):
        """Let the current stream do something."""
        if seconds > 0:
            self.events.append((self._stream, what, self.now[self._stream], seconds))
            self.now[self._stream] += seconds
            self.busy[self._stream] += seconds

    @contextlib.contextmanager
    def on(self, lane, buffers):
        """In this context the current stream is a lane's, which begins when it is free and the caller has reached this.

        Work that shows no operation takes as long as its buffers take to move.
        """
        caller, self._stream = self._stream, lane
        self.now[lane] = max(self.now[lane], self.now[caller])
        before = self.busy[lane]
        try:
            yield
            if self.busy[lane] == before:
                self.spend(lane, sum(buffer.nbytes for buffer in buffers) / self._rate())
        finally:
            self._stream = caller

    def catch_up(self, lane, end):
        """Let the current stream wait for a lane's work."""
        late = end - self.now[self._stream]
        if late > 0:
            if self._stream == COMPUTE:
                self.waited[lane] += late
            self.now[self._stream] = end

    def found(self, tokens, width):
        """The result of a step of so many tokens, of all ranks; `width` is the precision's bytes of an element.

        Returns:
            {"hardware", its "source" and "fraction", "step_seconds", "tokens_per_second"; "model_flops", three times
            those of forward, and their part of the peak, "mfu"; "flops", with what checkpoints compute again, and
            theirs, "hfu"; seconds "busy" and "exposed", in which compute waits, by stream; "bound", the stream that is
            busy longest}
        """
        seconds, peak = max(self.now.values()), self.hardware.flops[width]
        model, flops = 3 * self.flops["forward"], sum(self.flops.values())
        return {
            "hardware": self.hardware.name,
            "source": self.hardware.source,
            "fraction": self.hardware.fraction,
            "step_seconds": seconds,
            "tokens_per_second": tokens / seconds,
            "model_flops": model,
            "flops": flops,
            "mfu": model / seconds / peak,
            "hfu": flops / seconds / peak,
            "busy": dict(self.busy),
            "exposed": dict(self.waited),
            "bound": max(self.busy, key=self.busy.get),
        }

    def trace(self, name):
        """The step as a trace that ui.perfetto.dev and chrome://tracing open, a row for each stream."""
        rows = [stream for stream in ROWS if stream in self.busy]
        head = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": name}}]
        for row, stream in enumerate(rows):
            head.append({"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": stream}})
        made = [
            {"ph": "X", "name": what, "pid": 0, "tid": rows.index(stream), "ts": began * 1e6, "dur": seconds * 1e6}
            for stream, what, began, seconds in self.events
            if stream in rows
        ]
        return {"displayTimeUnit": "ms", "traceEvents": head + made}

    def _rate(self):
        """Bytes a second that the current stream moves."""
        by_lane = {"bus": self.hardware.bus, "disk": self.hardware.disk}
        by_lane |= dict.fromkeys(HOST_LANES, self.hardware.host_memory)
        return by_lane.get(self._stream, self.hardware.memory)

    def _operation(self, function, args, kwargs, result):
        """Seconds of an operation."""
        hardware, moved = self.hardware, _bytes_moved(function, args, kwargs, result)
        if not moved:  # a view
            return 0.0
        if self._stream in LINKS:
            return sum(tensor.nbytes for tensor in tensors_in(result)) / self._rate()  # a copy crosses once
        flops, width = flops_of(function, args, kwargs, result), _width(result, args)
        self.flops[self._traffic.phase] += flops
        rate, (_, *reached) = hardware.flops.get(width, max(hardware.flops.values())), hardware.attending()
        rate *= dict(zip(ON_CPU, reached, strict=True)).get(_name(function), hardware.fraction)
        return max(flops / rate, moved / self._rate()) + hardware.operation

    def _collective(self, function, args):
        """Seconds of a collective: what each rank sends, over the slowest link that it crosses."""
        kind, group, sent = collective_of(function, args)
        if group.size() == 1 or kind == "recv":  # which takes as long as its sender
            return 0.0
        ranks = dist.get_process_group_ranks(group)
        nodes = len({rank // self.ranks_per_node for rank in ranks})
        here = len(ranks) // nodes  # ranks of a node in this group
        leaving = sent if nodes > 1 else 0  # a ring leaves each node once
        if kind == "all_to_all":  # straight to the rank that it is for
            leaving = sent * here * (len(ranks) - here) / (len(ranks) - 1)
        seconds = self.hardware.over_links(sent, leaving, rings=self.ranks_per_node // here)
        return seconds + self.hardware.latency * (group.size() - 1).bit_length()


def flops_of(function, args, kwargs, result):
    """Floating-point operations of an operation of torch; causal attention meets half of its square."""
    count = flop_counter.flop_registry.get(function.overloadpacket)
    if count is not None:
        return count(*args, **kwargs, out_val=result)
    if _name(function) in ON_CPU:
        counter, tensors = ON_CPU[_name(function)]
        given = dict(zip((about.name for about in function._schema.arguments), args, strict=False)) | kwargs
        return counter(*(arg.shape for arg in args[:tensors])) // (2 if given.get("is_causal") else 1)
    return 0


def _name(function):
    return function.__name__.partition(".")[0]


def _bytes_moved(function, args, kwargs, result):
    """Bytes that an operation reads and writes; none if it makes a view, or allocates memory without filling it."""
    if function.is_view or function.__name__.startswith(("empty", "new_empty", "detach", "_reshape_alias")):
        return 0
    written = sum(tensor.nbytes for tensor in tensors_in(result))
    if not written:  # in place: what its schema says is written
        given = zip(function._schema.arguments, args, strict=False)
        changed = [arg for about, arg in given if about.alias_info is not None and about.alias_info.is_write]
        written = sum(tensor.nbytes for tensor in tensors_in(changed))
    return written + sum(tensor.nbytes for tensor in tensors_in([list(args), kwargs]))


def _width(result, args):
    """Bytes of an element."""
    floating = [t for t in [*tensors_in(result), *tensors_in(list(args))] if t.is_floating_point()]
    return floating[0].itemsize if floating else 4
