"""A process group that runs every collective as late as allowed, for engines that call torch.distributed themselves.

Between the start of an asynchronous collective and its `wait()`, nobody knows whether it has run. gloo has mostly
finished by then, so a missing wait goes unnoticed. Here a collective runs on `wait()`: until then its input is not read
and its output is poison. The order of completion is random, too, as with gloo's threads: each collective is dealt to
one of several lanes, and waiting for it runs the earlier work of that lane, but not of the others. A callback
(`get_future()`, which DDP uses) runs on a thread, some time later.

    pytest tests --engine my_package.my_module:MyEngine --late
"""

import queue
import random
import threading
import time

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from common.measure.memory import storage_id
from common.ranks import lanes

NAME = "late"
LANES = 3
DELAYS = (0.0, 1e-3, 4e-3)  # seconds, one drawn at random, before a callback's collective runs


class LateWork(dist.Work):
    """A collective in flight: it runs on `wait()`.

    Args:
        group: the LateGroup.
        lane: the number of its lane.
        begin: starts the collective with gloo, and returns gloo's own work.
        outputs: the tensors that it writes.
        private: {a tensor that it reads and writes: a copy of its input}.
    """

    def __init__(self, group, lane, begin, outputs, private):
        super().__init__()
        self.group, self.lane, self.begin, self.outputs, self.private = group, lane, begin, outputs, private
        self.done = False
        for output in outputs:
            poison(output)

    def run(self):
        for tensor, copy in self.private.items():
            tensor.copy_(torch.where(is_poison(tensor), copy, tensor))  # reads what was written since
        self.begin().wait()
        self.done, self.begin = True, None

    def wait(self, timeout=None):
        self.group.run_up_to(self)
        return True

    def is_completed(self):
        return self.done

    is_success = is_completed
    synchronize = wait

    def result(self):
        return self.outputs

    def get_future(self):
        future = torch.futures.Future()
        self.group.run_later(self, future)
        return future


def poison(tensor):
    with torch.no_grad():
        tensor.detach().fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


def is_poison(tensor):
    """The elements that are poison: an output may be a part of an input."""
    return tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).max


class LateGroup(dist.ProcessGroup):
    """gloo, as late as it may be.

    Args:
        store, rank, size, timeout: as torch passes them to a backend.
    """

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        stores = [dist.PrefixStore(f"lane {number}", store) for number in range(LANES)]
        self._gloo = [dist.ProcessGroupGloo(prefixed, rank, size, timeout) for prefixed in stores]
        self._begun = [[] for _ in stores]
        self._locks = [threading.RLock() for _ in stores]  # one per lane: another rank may run them in another order
        self._deal, self._dice = random.Random(0), random.Random(rank)  # every rank deals alike
        self._asked = queue.SimpleQueue()
        threading.Thread(target=self._answer, daemon=True).start()

    def getBackendName(self):
        return NAME

    def _set_group_name(self, name):
        self._name = name

    @property
    def group_name(self):
        return self._name

    def run_up_to(self, work):
        """Run the earlier work of its lane in order, and then the work itself."""
        with self._locks[work.lane]:
            while not work.done:
                self._begun[work.lane].pop(0).run()

    def run_later(self, work, future):
        self._asked.put((work, future))

    def _answer(self):
        while True:
            work, future = self._asked.get()
            time.sleep(self._dice.choice(DELAYS))
            self.run_up_to(work)
            future.set_result(work.outputs)

    def _submit(self, method, outputs, inputs, *args, lane=None):
        """Submit a collective: `method` of gloo with `args`, which reads `inputs` and writes `outputs`."""
        lane = self._deal.randrange(LANES) if lane is None else lane
        private = {t: t.detach().clone() for t in inputs if any(shares(t, output) for output in outputs)}
        work = LateWork(self, lane, lambda: getattr(self._gloo[lane], method)(*args), outputs, private)
        with self._locks[lane]:
            self._begun[lane].append(work)
        return work

    def broadcast(self, tensors, opts):
        outputs = [] if opts.rootRank == self.rank() else tensors
        return self._submit("broadcast", outputs, [], tensors, opts)

    def reduce(self, tensors, opts):
        outputs = tensors if opts.rootRank == self.rank() else []
        return self._submit("reduce", outputs, tensors, tensors, opts)

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts):
        return [self._allgather_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts):
        return [self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)][-1]

    # Point-to-point: only two ranks know of these, so they are not dealt.

    def send(self, tensors, peer, tag):
        return self._submit("send", [], [], tensors, peer, tag, lane=0)

    def recv(self, tensors, peer, tag):
        return self._submit("recv", tensors, [], tensors, peer, tag, lane=0)

    def barrier(self, opts):
        return self._submit("barrier", [], [], opts)


def _collective(name, read):
    """Make a method that writes its first argument, tensors in lists or not, and reads the one at this index."""

    def begin(self, *args):
        return self._submit(name, tree_leaves(args[0]), tree_leaves(args[read]), *args)

    return begin


IN_PLACE = ("allreduce", "allreduce_coalesced")
BESIDE = ("allgather", "_allgather_base", "reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base")
for name in (*IN_PLACE, *BESIDE, "gather", "scatter"):
    setattr(LateGroup, name, _collective(name, read=0 if name in IN_PLACE else 1))
# torch's new names; older versions call the names above.
LateGroup.all_gather_single, LateGroup.all_to_all_single = LateGroup._allgather_base, LateGroup.alltoall_base
LateGroup.reduce_scatter_single = LateGroup._reduce_scatter_base
LateGroup.all_gather_single_coalesced = LateGroup.allgather_into_tensor_coalesced
LateGroup.reduce_scatter_single_coalesced = LateGroup.reduce_scatter_tensor_coalesced


def shares(one, other):
    """Whether two tensors share memory."""
    return one.numel() > 0 and storage_id(one) == storage_id(other)


def enter(world):
    """Replace this rank's default process group by a late one."""
    dist.Backend.register_backend(NAME, LateGroup, devices=["cpu"])
    lanes.LANES[NAME], lanes.PATHS[NAME] = lanes.InlineLane, "nccl"
    store = dist.PrefixStore(NAME, dist.group.WORLD.get_group_store())
    dist.destroy_process_group()
    dist.init_process_group(NAME, store=store, rank=world.rank, world_size=world.size)
