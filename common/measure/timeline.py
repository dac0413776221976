"""What overlaps with what: steps recorded as a trace for ui.perfetto.dev and chrome://tracing, on CPU and CUDA.

torch's profiler records each operation of each thread and, on CUDA, each kernel of each stream. `Collectives` labels
the work of its lane, `common.train` the phases, and a `Recording` the parts of the model. One file holds all ranks,
since the question is often which rank the others waited for. A rank has these rows:

    modules        which part of the model runs, forward and backward
    compute        the phases, each operation, and the rank's waits for collectives
    collectives    the lane's work: on CPU a thread, on CUDA a stream of "rank 0, GPU"
    bus            copies down to the host and up again, if the engine has a bus
    host           the optimizer steps on the host
    disk           reads and writes, a row for each of the disk's threads
"""

import contextlib
import json
import os
import tempfile
import zlib
from collections import defaultdict
from pathlib import Path

from torch import nn
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile, record_function

from common.tensors import tensors_in

PHASES = ("forward", "backward", "step")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "exchange", "broadcast", "gather")
UNLABELLED = contextlib.nullcontext()
MODULES = 0  # the row of the model's parts; threads have numbers above 0
LANES = {  # by the labels of their work
    "collectives": COLLECTIVES,
    "bus": ("to_host of", "to_device of"),
    "host": ("optimizer's step of",),
    "disk": ("read of", "write of"),
}
ROWS = ("modules", "compute", *LANES)  # in the order they are shown; other rows follow


def label(name):
    """A range that a profiler shows, like torch's `record_function`, which costs 10 to 40 µs even without a profiler.

    torch has no public way to ask whether a profiler is active.
    """
    return record_function(name) if profiler._is_profiler_enabled else UNLABELLED


class Recording:
    """Record what this rank runs between `start` and `stop`.

    Args:
        engine: one of the stages' engines. Its phases show if the caller runs them within
            torch.profiler.record_function, under the names in PHASES, as `common.loop.train_step` does.
    """

    def __init__(self, engine):
        self._comm, self._module = engine.comm, engine.module
        activities = [ProfilerActivity.CPU]
        if self._comm.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces its start and stop on stderr
        # Without acc_events torch 2.11 warns that events of earlier cycles are gone, though there is one cycle.
        every_thread = _ExperimentalConfig(profile_all_threads=True)  # the lane's too, by a private name of torch
        self._profiler = profile(activities=activities, acc_events=True, experimental_config=every_thread)

    def start(self):
        self._hooks = [hook for name, part in parts(self._module) for hook in _labelled(name, part)]
        self._profiler.start()

    def stop(self):
        self._profiler.stop()
        for hook in self._hooks:
            hook.remove()

    def collect(self):
        """The trace of all ranks, for a JSON file; None on ranks other than 0. A collective."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(file))
            everyone = self._comm.gather_objects(zlib.compress(file.read_bytes()), "the trace")
        if self._comm.rank:
            return None
        return merge([json.loads(zlib.decompress(one)) for one in everyone])

    def write(self, path):
        """Write the trace to a file on rank 0, and return it there. A collective."""
        trace = self.collect()
        if trace is not None:
            Path(path).write_text(json.dumps(trace))
        return trace


def parts(model):
    """The model's children by name; a list among them yields its elements instead."""
    for name, child in model.named_children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from ((f"{name}.{inner}", element) for inner, element in child.named_children())
        else:
            yield name, child


def _labelled(name, part):
    """The handles of hooks that give a part's forward and backward their ranges in a trace."""
    ranges = []

    def begins(name):
        ranges.append(record_function(f"forward of {name}"))
        ranges[-1].__enter__()

    def marks(name):
        # Only a mark, as nothing tells when a part's backward ends: `_rows` extends it to the next mark.
        with record_function(f"backward of {name}"):
            pass

    return watch(name, part, begins, lambda name: ranges.pop().__exit__(None, None, None), marks)


def watch(name, part, begins, ends, marks):
    """Hook a part: call `begins(name)` and `ends(name)` around its forward, `marks(name)` when its backward begins.

    Returns the handles of the hooks.
    """

    def after(module, args, output):
        ends(name)
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: marks(name))

    # always_call: checkpoints end their recomputation by an exception.
    return [
        part.register_forward_pre_hook(lambda module, args: begins(name)),
        part.register_forward_hook(after, always_call=True),
    ]


def merge(traces):
    """Merge the profiler's exports into one trace in Chrome's format: each rank is a process, its GPU another.

    Time starts at 0. The ranks' clocks are not aligned: on one machine they are the same, on several as good as their
    NTP.
    """
    bases = [trace.get("baseTimeNanoseconds", 0) for trace in traces]
    events = []
    for rank, (trace, base) in enumerate(zip(traces, bases, strict=True)):
        for event in _rows(rank, trace["traceEvents"]):
            if "id" in event:  # an arrow's; it must be unique over ranks
                event["id"] = event["id"] * len(traces) + rank
            if "ts" in event:  # whole nanoseconds, as microseconds since 1970 would lose digits
                event["ts"] = round(event["ts"] * 1000) + base - min(bases)
            events.append(event)
    began = min(event["ts"] for event in events if "ts" in event)
    for event in events:
        if "ts" in event:
            event["ts"] = (event["ts"] - began) / 1000
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _rows(rank, events):
    """A rank's events in processes and rows with names, and the rows' names."""
    host = next(event["pid"] for event in events if event.get("cat") == "user_annotation")
    # Drop the profiler's events about itself, whose processes have names and numbers below 0, and gloo's messages,
    # which overlap: the ranges of a row must be nested or disjoint.
    events = [e for e in events if isinstance(e["pid"], int) and e["pid"] >= 0]
    events = [e for e in events if e["ph"] != "M" and not e["name"].startswith("gloo:")]
    phases = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in PHASES]
    compute = {e["tid"] for e in phases}
    lanes = {(e["pid"], e["tid"]): name for e in events for name in LANES if _is_of_lane(e, name)}
    marks = sorted((e for e in events if _is_of_module(e, "backward")), key=lambda e: e["ts"])
    ends = [e["ts"] for e in marks] + [_span(e)[1] for e in phases if e["name"] == "backward"]
    for mark in marks:  # the next part's backward begins, or all of backward ends
        mark["dur"] = round(min((end for end in ends if end > mark["ts"]), default=mark["ts"]) - mark["ts"], 3)
    names = {}
    for event in events:
        on_gpu = event["pid"] != host
        row = event["pid"], event["tid"]
        if _is_of_module(event, "forward") or _is_of_module(event, "backward"):
            event["tid"], name = MODULES, "modules"
        elif on_gpu:
            name = f"{lanes[row] + ', ' if row in lanes else ''}stream {event['tid']}"
        elif event["tid"] in compute:
            name = "compute"
        else:
            name = lanes.get(row, f"thread {event['tid']}")
        event["pid"] = 2 * rank + on_gpu
        names[event["pid"], event["tid"]] = name
    for pid in sorted({pid for pid, _ in names}):
        yield _metadata("process_name", pid, 0, name=f"rank {rank}" + (", GPU" if pid % 2 else ""))
        yield _metadata("process_sort_index", pid, 0, sort_index=pid)
    for (pid, tid), name in names.items():
        yield _metadata("thread_name", pid, tid, name=name)
        yield _metadata("thread_sort_index", pid, tid, sort_index=ROWS.index(name) if name in ROWS else len(ROWS))
    yield from events


def _metadata(kind, pid, tid, **args):
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _is_of_lane(event, lane):
    """Whether an event is a range of a lane's work, on the host or on the GPU."""
    return event.get("cat") in ("user_annotation", "gpu_user_annotation") and event["name"].startswith(LANES[lane])


def _is_of_module(event, phase):
    return event.get("cat") == "user_annotation" and event["name"].startswith(f"{phase} of ")


def rows(trace):
    """The ranges of a trace that `merge` made: {(process, "compute" or another row): events, in order of start}.

    Process 2r is rank r, and 2r + 1 its GPU. An event comes before those nested in it.
    """
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    found = {(pid, name): [] for (pid, _), name in names.items()}
    ranges = (event for event in trace["traceEvents"] if event["ph"] == "X")
    for event in sorted(ranges, key=lambda event: (event["ts"], -event["dur"])):
        found[event["pid"], names[event["pid"], event["tid"]]].append(event)
    return found


def overlap(trace):
    """The share of the collectives' time that overlaps with computation, by rank: {0: 0.7, 1: 0.68}.

    On a GPU, computation is its kernels on streams other than the collectives'; else torch's operations on other
    threads. A collective's time includes its wait for other ranks.
    """
    collectives, computation = defaultdict(list), defaultdict(list)
    lanes = {
        (e["pid"], e["tid"]) for e in trace["traceEvents"] if _is_of_lane(e, "collectives") or _is_of_lane(e, "bus")
    }
    for event in trace["traceEvents"]:
        if _is_of_lane(event, "collectives"):
            collectives[event["pid"]].append(_span(event))
        elif (event["pid"], event["tid"]) not in lanes and _computes(event):
            computation[event["pid"]].append(_span(event))
    beside = {}
    for pid in sorted(collectives):
        alone, both = _length(collectives[pid]), _length(collectives[pid]) + _length(computation[pid])
        # A rank's GPU process comes second, and replaces the host's entry.
        beside[pid // 2] = (both - _length(collectives[pid] + computation[pid])) / alone
    return beside


def _computes(event):
    # By name, since autograd's own ranges include hooks, in which the rank may wait.
    return event.get("cat") == "kernel" or (event.get("cat") == "cpu_op" and event["name"].startswith("aten::"))


def _span(event):
    return event["ts"], event["ts"] + event["dur"]


def _length(spans):
    """The length of the union of spans."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
