"""A fake GPU that computes on the CPU and tracks the order of streams: it finds CUDA races without CUDA.

Anything that runs in order is a *timeline*: a stream, or a host thread. Each has a vector clock (Lamport 1978,
Mattern 1989): how far into every other timeline it knows the work to be complete. A launch passes the host's clock to
the stream; a wait passes the clock of the awaited to the waiter. Two accesses to the same bytes, one of them a write,
race unless the later one's timeline knew of the earlier. Speed plays no part, so every race shows on every run.

    tensors      lie on the CPU; each storage counts as the GPU's or the host's by its `device=`
    devices      two GPUs; the rank owns the second. A new thread starts on the first, as in CUDA: work there before it
                 chooses its rank's device is reported too, as it would create a context on another rank's GPU. An
                 operation on tensors of two devices is refused, as in torch
    operations   a dispatch mode sees what each reads and writes: on the current stream if a tensor is on the GPU,
                 otherwise on the host thread. A copy from or to pinned memory with non_blocking=True overlaps with the
                 host; an operation that fetches a value (`item`, a blocking copy) waits for the stream
    collectives  torch's fake group moves nothing, so they copy here, as if every rank had sent what this one did
    memory       the caching allocator hands a freed block to the next request on the stream that it was allocated on.
                 So another stream's use must be complete for that stream, or be told by `record_stream`. Storages that
                 shrink or grow release their block, too

It is not a GPU: kernels, NCCL and the real allocator have rules that are not modelled here.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
import weakref
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from unittest import mock

import torch
from places import ROOT
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common.ranks import collectives, lanes
from offload import swap

CUDA = torch.device("cuda", 1)  # the rank's
HOST = torch.device("cpu")
# Collectives write their first argument, and read that or the second: the dispatcher does not describe it.
IN_PLACE, BESIDE = ("allreduce_", "broadcast_"), ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_")
ACROSS = ("aten::copy_", "aten::_to_copy", "aten::set_", "aten::_foreach_copy_")  # accept tensors of two devices
INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")  # by indices on the CPU, too
FETCHES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")


class Timeline:
    """What runs in order: a stream, or a host thread. `clock` is {timeline: how far it is known to be complete}."""

    def __init__(self, name):
        self.name, self.clock = name, {self: 0}

    def learn(self, clock):
        for timeline, tick in clock.items():
            self.clock[timeline] = max(tick, self.clock.get(timeline, 0))

    def tick(self):
        self.clock[self] += 1
        return self.clock[self]

    def knows(self, access):
        return self.clock.get(access.timeline, 0) >= access.tick


class Stream(Timeline):
    def __init__(self, name, gpu, device):
        super().__init__(name)
        self._gpu, self.device = gpu, device

    def wait(self, other):
        self._gpu.collect()
        self._gpu.touch(self.device)
        self.learn(other.clock)

    wait_event = wait_stream = wait

    def synchronize(self):
        self._gpu.collect()
        self._gpu.host.learn(self.clock)


class Event:
    def __init__(self, gpu):
        self._gpu, self.clock = gpu, {}

    def record(self, stream=None):
        stream = stream or self._gpu.current()
        stream.learn(self._gpu.host.clock)
        self.clock = dict(stream.clock)

    def synchronize(self):
        self._gpu.collect()
        self._gpu.host.learn(self.clock)


@dataclass
class Access:
    timeline: Timeline
    tick: int
    low: int
    high: int
    writes: bool
    what: str


@dataclass
class Block:
    """The memory of a storage: its device, the stream that it was allocated on, and its pending uses."""

    storage: StorageWeakRef
    device: torch.device
    pinned: bool
    stream: Timeline
    before: list  # uses of the block's earlier owners
    begin: int = 0
    nbytes: int = 0
    accesses: list = field(default_factory=list)
    recorded: set = field(default_factory=set)

    @property
    def on_gpu(self):
        return on_cuda(self.device)


class Gpu:
    """The fake: `with Gpu() as gpu:` collects `gpu.races`, a sentence for each."""

    def __init__(self):
        self.files = defaultdict(lambda: Block(None, HOST, False, self.default, ()))
        self.races, self.blocks, self.freed = [], {}, defaultdict(list)
        defaults = [Stream(f"the default stream of GPU {number}", self, number) for number in range(2)]
        self.defaults, self.default = defaults, defaults[CUDA.index]
        self._threads, self._local = {}, threading.local()
        self.streams, self.sides, self._lock, self._pending = [self.default], {}, threading.RLock(), {}

    # ---- streams, events and threads -------------------------------------------------------------------------------

    @property
    def host(self):
        thread = threading.current_thread()
        own = self._threads.setdefault(thread, Timeline(f"host thread {thread.name}"))
        return getattr(self._local, "task", None) or own

    @property
    def device(self):
        """The index of the thread's current GPU."""
        return getattr(self._local, "device", 0)

    def choose(self, device):
        """`torch.cuda.set_device`."""
        self._local.device = torch.device(device).index

    def touch(self, number):
        """Note work on a GPU: on another rank's, it creates a context there, of some 500 MB."""
        if number != CUDA.index:
            self.report(f"{self.host.name} uses GPU {number}, and its rank has GPU {CUDA.index} {place()}")

    def current(self, *_):
        """The current stream of the thread's current GPU."""
        self.touch(self.device)
        return self.current_of(self.device)

    def current_of(self, number):
        return getattr(self._local, f"stream of {number}", self.defaults[number])

    def enter(self, stream):
        setattr(self._local, f"stream of {stream.device}", stream)

    def go_to(self, stream):
        """`torch.cuda.set_stream()`."""
        self._local.device = stream.device
        self.enter(stream)

    @contextlib.contextmanager
    def on(self, stream):
        before, device = self.current_of(stream.device), self.device
        self.go_to(stream)
        try:
            yield
        finally:
            self.enter(before)
            self._local.device = device

    def stream(self, *_, **__):
        """`torch.cuda.Stream()`."""
        self.touch(self.device)
        self.streams.append(Stream(f"stream {len(self.streams)}", self, self.device))
        return self.streams[-1]

    def event(self, *_, **__):
        """`torch.cuda.Event()`."""
        return Event(self)

    def handed(self, work, task=None):
        """Wrap `work` for another thread; also return what passes that thread's final clock to its waiter.

        A `task` may run on any thread of a pool: it knows nothing of what the same thread did before.
        """
        before, gpu, after = dict(self.host.clock), self, {}

        def run(*args):
            gpu._local.task = task
            gpu.host.learn(before)
            try:
                with gpu.modes():
                    return work(*args)
            finally:
                after.update(gpu.host.clock)
                gpu._local.task = None

        return run, lambda: self.host.learn(after)

    # ---- accesses --------------------------------------------------------------------------------------------------

    def block(self, tensor, device=HOST, pinned=False):
        """The block of a tensor's storage; a new one is the host's unless `device` says otherwise."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.blocks:
            stream, before = self.default, ()
            if on_cuda(device):
                self.touch(device.index)
                stream = self.current_of(device.index)
                before = self.freed[stream]
            what, where = StorageWeakRef(storage), (storage.data_ptr(), storage.nbytes())
            self.blocks[storage._cdata] = Block(what, device, pinned, stream, before, *where)
        return self.blocks[storage._cdata]

    def on_gpu(self, tensor):
        return torch.is_tensor(tensor) and not tensor.is_meta and self.block(tensor).on_gpu

    def device_of(self, tensor):
        return self.block(tensor).device

    def access(self, tensor, timeline, tick, writes, what):
        if tensor.numel():
            last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            low, size = tensor.storage_offset() * tensor.itemsize, tensor.itemsize
            self.use(self.block(tensor), Access(timeline, tick, low, low + (last + 1) * size, writes, what))

    def use(self, block, new):
        self.take_over(block, new)
        kept = []
        for old in block.accesses:
            known = new.timeline.knows(old)
            if old.low < new.high and new.low < old.high and (new.writes or old.writes) and not known:
                self.report(
                    f"{verb(new)} by {new.what} on {new.timeline.name} may come before "
                    f"{verb(old)} by {old.what} on {old.timeline.name}"
                )
            covered = new.low <= old.low and old.high <= new.high and known
            if not (covered and (new.writes or (not old.writes and old.timeline is new.timeline))):
                kept.append(old)
        block.accesses = [*kept, new]

    def moved(self, move, reads_file):
        """Wrap os.preadv or os.pwritev, to note the memory and the part of the file that it uses."""

        def run(fd, buffers, offset):
            moved = move(fd, buffers, offset)
            with self._lock:
                self.collect()
                (data,), line = buffers, self.host
                tick, what = line.tick(), f"{move.__name__} {place()}"
                begin = ctypes.addressof(ctypes.c_char.from_buffer(data))
                for block in self.blocks.values():
                    if block.begin <= begin < block.begin + block.nbytes:
                        low = begin - block.begin
                        self.use(block, Access(line, tick, low, low + len(data), reads_file, what))
                file = self.files[fd]
                self.use(file, Access(line, tick, offset, offset + len(data), not reads_file, what))
                if reads_file:  # a read whose data are needed was waited for; an unused one may be overtaken
                    file.accesses.pop()
            return moved

        return run

    def report(self, sentence):
        if sentence not in self.races:
            self.races.append(sentence)

    def collect(self):
        """Give back the blocks of storages that were freed since the last call."""
        with self._lock:
            for key in [key for key, block in self.blocks.items() if block.storage.expired()]:
                self.give_back(self.blocks.pop(key))

    def give_back(self, block):
        """Free a block: its next owner must know of its uses, except those that the allocator itself waits for.

        Pinned memory needs none of this: torch holds it until a copy is complete.
        """
        if block.on_gpu:
            uses = [use for use in block.accesses if not any(stream.knows(use) for stream in block.recorded)]
            self.freed[block.stream] = latest([*self.freed[block.stream], *uses])

    def take_over(self, block, access):
        """Check the first access to a block, which may reuse any block freed on its stream before."""
        for old in block.before:
            if not access.timeline.knows(old):
                self.report(
                    f"memory that {verb(old)} by {old.what} on {old.timeline.name} still uses was freed, and given to "
                    f"{verb(access)} by {access.what} on {access.timeline.name}"
                )
        block.before = ()

    def resize(self, resize, storage, nbytes):
        """A storage's `resize_`: on a GPU, the contents move to another block."""
        with self._lock:
            self.collect()
            block, before = self.blocks.get(storage._cdata), storage.nbytes()
            if block is not None and block.on_gpu and nbytes != before:
                if min(nbytes, before):
                    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                    line = self.launch(block.device)
                    self.access(whole, line, line.tick(), False, f"resize_ {place()}")
                self.give_back(block)
                block.accesses, block.recorded, block.stream = [], set(), self.current_of(block.device.index)
                block.before = self.freed[block.stream]
            return resize(storage, nbytes)

    @contextlib.contextmanager
    def asked_for(self, device, pinned):
        """In this context, the thread's next new tensor is on `device`, pinned or not."""
        if on_cuda(device) and device.index is None:
            device = torch.device("cuda", self.device)
        self._pending.setdefault(threading.get_ident(), (device, pinned))  # of nested modes the outermost decides
        try:
            yield
        finally:
            self._pending.pop(threading.get_ident(), None)

    def launch(self, device):
        """Launch a kernel on the current stream of its tensors' device, whatever the thread's current device is."""
        self.touch(device.index)
        line = self.current_of(device.index)
        line.learn(self.host.clock)
        return line

    def check_devices(self, name, inputs):
        """Refuse tensors of several devices, as torch does, except scalars and indices on the CPU."""
        devices = {self.device_of(t) for t in inputs if self.on_gpu(t) or (t.dim() and not t.is_meta)}
        if name.startswith("c10d::") and HOST in devices:
            raise RuntimeError(f"{name}: No backend type associated with device type cpu")
        indexed = name in INDEXED and self.on_gpu(inputs[0])
        if len(devices) > 1 and name not in ACROSS and not (indexed and devices == {HOST, self.device_of(inputs[0])}):
            raise RuntimeError(f"{name}: Expected all tensors to be on the same device, but found {devices}")

    def run(self, func, args, kwargs):
        """Run an operation of torch and note what it reads and writes."""
        with self._lock:
            self.collect()
            inputs = [tensor for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)]
            name, wanted = func._schema.name, self._pending.pop(threading.get_ident(), None)
            if wanted is None:  # otherwise it makes a tensor from Python data
                self.check_devices(name, inputs)
            out = func(*args, **kwargs)
            reads, writes = collective_of(func, args) if name.startswith("c10d::") else uses_of(func, args, kwargs, out)
            device, pinned = wanted or (next(filter(on_cuda, map(self.device_of, inputs)), HOST), False)
            for tensor in tree_leaves(out):
                if torch.is_tensor(tensor):
                    self.block(tensor, device, pinned)
            if not reads and not writes:
                return out
            there, what = [t for t in (*reads, *writes) if self.on_gpu(t)], f"{name.split('::')[1]} {place()}"
            line = self.launch(self.device_of(there[0])) if there else self.host
            tick, host_tick = line.tick(), self.host.tick()
            copies = name in ("aten::copy_", "aten::_to_copy")
            waits = name in FETCHES
            for tensor in reads + writes:
                by_host = not self.on_gpu(tensor) and (not copies or not there)  # a scalar argument of a kernel
                is_write = any(tensor is written for written in writes)
                self.access(tensor, *((self.host, host_tick) if by_host else (line, tick)), is_write, what)
                if there and copies and not self.on_gpu(tensor):
                    waits |= not (self.block(tensor).pinned and asynchronous(func, args, kwargs))
            if there and waits:
                self.host.learn(line.clock)
            return out

    # ---- the world around it ---------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def modes(self):
        with Devices(self), Operations(self):
            yield

    def __enter__(self):
        gpu, resize = self, torch.UntypedStorage.resize_

        class Threads(ThreadPoolExecutor):
            def submit(self, work, *args):
                run, known = gpu.handed(work, Timeline("a thread of the disk"))
                block = super().submit(run, *args)
                result = block.result
                block.result = lambda *args: (result(*args), known())[0]
                return block

        class ThreadLane(lanes.ThreadLane):
            def submit(self, work, *buffers):
                run, known = gpu.handed(work)
                handle = super().submit(run, *buffers)
                wait = handle._wait
                handle._wait = lambda buffers: (wait(buffers), known())
                return handle

        self._stack = contextlib.ExitStack()
        fakes = {
            (torch.cuda, "Stream"): self.stream,
            (torch.cuda, "Event"): self.event,
            (torch.cuda, "current_stream"): self.current,
            (lanes, "stream_number"): lambda device: id(self.current()),
            (torch.cuda, "set_stream"): self.go_to,
            (torch.cuda, "current_device"): lambda: self.device,
            (torch.cuda, "set_device"): self.choose,
            (torch, "compile"): lambda function, **options: function,  # each kernel alone, in the same order
            (torch.Tensor, "record_stream"): lambda tensor, stream: self.block(tensor).recorded.add(stream),
            (torch.UntypedStorage, "resize_"): lambda storage, nbytes: self.resize(resize, storage, nbytes),
            (collectives, "backend_of"): lambda group: "nccl",
            (lanes, "ThreadLane"): ThreadLane,
            (lanes, "_lanes"): weakref.WeakKeyDictionary(),  # lanes of another fake know other clocks
            (swap, "ThreadPoolExecutor"): Threads,
            (os, "preadv"): self.moved(os.preadv, True),
            (os, "pwritev"): self.moved(os.pwritev, False),
        }
        for (module, name), fake in fakes.items():
            self._stack.enter_context(mock.patch.object(module, name, fake))
        # A checkpoint would compare devices, whose names not every hook knows.
        checks = torch.utils.checkpoint._allowed_determinism_checks_to_fns
        self._stack.enter_context(mock.patch.dict(checks, default=lambda tensor: ()))
        self._stack.enter_context(self.modes())
        self.choose(CUDA)
        return self

    def __exit__(self, *error):
        self.collect()
        self._stack.__exit__(*error)


class Operations(TorchDispatchMode):
    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.gpu.run(func, args, kwargs or {})


class Devices(TorchFunctionMode):
    """Creates and moves tensors: always in CPU memory, the GPU's by name alone."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu
        self._instead = {
            torch.Tensor.backward: self.backward,
            torch.autograd.backward: self.backward,
            torch.Tensor.is_pinned: lambda tensor: gpu.block(tensor).pinned,
            torch.Tensor.cpu: lambda tensor: self.moved(tensor, HOST),
            torch.Tensor.cuda: lambda tensor: self.moved(tensor, "cuda"),
            torch.Tensor.to: self.moved,
            torch.Tensor.numpy: self.as_numpy,
            torch.Tensor.tolist: functools.partial(self.fetched, torch.Tensor.tolist),
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, asked = dict(kwargs or {}), getattr(func, "__self__", None)
        if func in self._instead:
            return self._instead[func](*args, **kwargs)
        if getattr(func, "__name__", "") == "__get__" and asked in ANSWERS:
            return ANSWERS[asked](self.gpu.device_of(args[0]) if self.gpu.on_gpu(args[0]) else HOST)
        pinned, device = kwargs.pop("pin_memory", False), kwargs.get("device")
        if pinned and func is torch.empty:
            return self.pinned(*args, **kwargs)
        with contextlib.ExitStack() as asked_for:
            if (device is not None or pinned) and torch.device(device or HOST).type != "meta":
                kwargs["device"] = HOST
                asked_for.enter_context(self.gpu.asked_for(torch.device(device or HOST), pinned))
            return func(*args, **kwargs)

    def pinned(self, numel, dtype, device=HOST):
        """Pinned memory starts on a page boundary."""
        tensor = torch.frombuffer(mmap.mmap(-1, max(1, numel) * dtype.itemsize), dtype=dtype, count=numel)
        self.gpu.block(tensor, HOST, True)
        return tensor

    def as_numpy(self, tensor, **kwargs):
        if self.gpu.on_gpu(tensor):
            raise TypeError("can't convert cuda device type tensor to numpy. Use Tensor.cpu() to copy it first.")
        return self.fetched(torch.Tensor.numpy, tensor, **kwargs)

    def fetched(self, method, tensor, *args, **kwargs):
        """Values for Python: the host reads them, and waits for the stream if they are on the GPU."""
        gpu = self.gpu
        gpu.host.learn(gpu.current_of(gpu.device_of(tensor).index).clock if gpu.on_gpu(tensor) else {})
        gpu.access(tensor, gpu.host, gpu.host.tick(), False, f"{method.__name__} {place()}")
        return method(tensor, *args, **kwargs)

    def backward(self, tensors, gradient=None, retain_graph=None, create_graph=False, inputs=None, **_):
        """The backward of autograd, with this mode on: hooks make tensors, too, and torch would turn it off."""
        gradients = gradient
        tensors = [tensors] if torch.is_tensor(tensors) else list(tensors)
        gradients = [None] * len(tensors) if gradients is None else list(tree_leaves([gradients]))
        ones = [torch.ones_like(t) if g is None else g for t, g in zip(tensors, gradients, strict=True)]
        keep = create_graph if retain_graph is None else retain_graph
        with self:
            torch.autograd.Variable._execution_engine.run_backward(
                tuple(tensors), tuple(ones), keep, create_graph, (), allow_unreachable=True, accumulate_grad=True
            )
        for stream in {*self.gpu.sides.values()}:  # autograd makes the caller's stream wait for the leaves'
            self.gpu.current().wait_stream(stream)
        self.gpu.sides.clear()

    def moved(self, tensor, *args, copy=False, **kwargs):
        """`Tensor.to`: the tensor itself, or a copy, which the host waits for unless it is non_blocking."""
        device, dtype, beside, _ = torch._C._nn._parse_to(*args, **kwargs)  # as Module.to reads its arguments
        gpu, source = self.gpu, torch.Tensor.to(tensor, dtype or tensor.dtype, copy=copy)
        if device is None or device.type == ("cuda" if gpu.on_gpu(tensor) else "cpu"):
            return source
        with torch.no_grad():
            with gpu.asked_for(device, False):
                target = torch.empty_like(source)
            return target.copy_(source, non_blocking=beside)


def on_cuda(device):
    return device.type == "cuda"


ANSWERS = {
    torch.Tensor.device: lambda device: device,
    torch.Tensor.is_cuda: on_cuda,
    torch.Tensor.is_cpu: lambda device: not on_cuda(device),
}


def uses_of(func, args, kwargs, out):
    """(tensors read, tensors written) by an operation; a tensor that is only viewed is neither."""
    schema, reads, writes = func._schema, [], []
    if func.is_view or schema.name in ("aten::lift_fresh", "aten::detach", "aten::_unsafe_view", "aten::set_"):
        return [], []
    values = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    for argument in schema.arguments:
        tensors = [tensor for tensor in tree_leaves(values.get(argument.name)) if torch.is_tensor(tensor)]
        written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if written else reads).extend(tensors)
    if any(word in schema.name for word in ("::empty", "::new_empty")):  # these read and write no values
        return [], []
    inputs = {id(tensor) for tensor in (*reads, *writes)}
    writes += [tensor for tensor in tree_leaves(out) if torch.is_tensor(tensor) and id(tensor) not in inputs]
    return reads, writes


def collective_of(func, args):
    """(read, written) by a collective, which copies here as if every rank had sent what this one does."""
    name = func._schema.name.split("::")[1]
    if name not in IN_PLACE + BESIDE:
        return [], []
    (target,), (source,) = tree_leaves(args[0]), tree_leaves(args[name in BESIDE])
    with torch.no_grad():
        if name == "_allgather_base_":
            torch.ops.aten.copy_(target.view(-1, source.numel()), source.view(1, -1).clone())
        elif name == "_reduce_scatter_base_":
            torch.ops.aten.copy_(target, source.view(-1, target.numel())[0].clone())
        elif name == "alltoall_base_":
            torch.ops.aten.copy_(target, source)
    return [source], [target]


def latest(accesses):
    """The last access of each timeline, which implies its earlier ones."""
    last = {}
    for access in accesses:
        if access.timeline not in last or last[access.timeline].tick < access.tick:
            last[access.timeline] = access
    return list(last.values())


def asynchronous(func, args, kwargs):
    return kwargs.get("non_blocking", args[2] if len(args) > 2 and func._schema.name == "aten::copy_" else False)


def verb(access):
    return "a write" if access.writes else "a read"


def place():
    """The calling line of this repository: file and number."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(str(ROOT)) and ".venv" not in file and "fake_gpu" not in file:
            return f"({file[len(str(ROOT)) + 1 :]}:{frame.f_lineno})"
        frame = frame.f_back
    return ""


class OnAStreamOfItsOwn(torch.nn.Module):
    """A module on a side stream, with the `record_stream` calls that its user owes. `Gpu.sides` gets its nodes."""

    def __init__(self, gpu, make):
        super().__init__()
        self.inner, self._gpu, self.stream = make(), gpu, gpu.stream()

    def forward(self, x):
        main, side = self._gpu.current(), self.stream
        side.wait_stream(main)
        x.record_stream(side)
        with self._gpu.on(side):
            y = self.inner(x)
        main.wait_stream(side)
        y.record_stream(main)
        if y.requires_grad:
            self._gpu.sides |= dict.fromkeys(nodes_of(y, end=x.grad_fn), side)
            y.register_hook(functools.partial(self._enter, y.grad_fn))  # hooks on y run first, as others' hooks will
        return y

    def _enter(self, node, gradient):
        self._gpu.begin(node, (gradient,))


def nodes_of(y, end=None):
    """The nodes of autograd's graph behind y, up to the one that made `end`."""
    found, waiting = {}, [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node is not end and node not in found:
            found[node] = None
            waiting += [following for following, _ in node.next_functions]
    return found


def with_streams(gpu, loss):
    """Make the backward of `loss` run as on CUDA: each node on the stream of its forward.

    A node waits for the work that its predecessors had launched when they ended, not for later work on their
    streams. A gradient that crosses to another stream is recorded there.
    """
    ended, before, nodes = {}, defaultdict(list), nodes_of(loss)
    for node in nodes:
        for following, _ in node.next_functions:
            before[following].append(node)

    def begin(node, gradients):
        stream = gpu.sides.get(node, gpu.default)
        for other in before[node]:
            if gpu.sides.get(other, gpu.default) is not stream:
                stream.wait_event(ended[other])
                for gradient in gradients:
                    if gradient is not None:
                        gradient.record_stream(stream)
        gpu.enter(stream)

    def end(node, *_):
        ended[node] = gpu.event()
        ended[node].record()
        gpu.enter(gpu.default)

    gpu.begin = begin
    for node in nodes:
        node.register_prehook(functools.partial(begin, node))
        node.register_hook(functools.partial(end, node))
    return loss
