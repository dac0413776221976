"""Adapters with our own answers, right ones and others that are wrong in one thing: the docstring says in what."""

from types import SimpleNamespace

import cmu15442
import cmu15442_answer
import cs336
import cs336_answer
import torch.distributed as dist

NOTHING = SimpleNamespace(wait=lambda: None)


def answered(adapter, answer, **functions):
    """A subclass of an adapter whose answer is ours, with other functions."""
    ours = SimpleNamespace(**{**vars(answer), **functions})
    (kind,) = functions.values() if functions else [adapter]
    own = {"answer": staticmethod(lambda: ours), "__doc__": kind.__doc__, "__module__": __name__}
    return type(kind.__name__, (adapter,), own)


def wrong(adapter, answer, function):
    """Make a class the answer's function of that name, and the adapter with that answer of it."""
    return lambda kind: answered(adapter, answer, **{function: kind})


DDP = answered(cs336.DDP, cs336_answer)
DDPOf2025 = answered(cs336.DDPOf2025, cs336_answer)
BucketedDDP = answered(cs336.BucketedDDP, cs336_answer)
ShardedOptimizer = answered(cs336.ShardedOptimizer, cs336_answer)
FSDP = answered(cs336.FSDP, cs336_answer)
ZeRO3 = answered(cmu15442.ZeRO3, cmu15442_answer)


# ---- CS336 --------------------------------------------------------------------------------------------------------


@wrong(cs336.DDP, cs336_answer, "get_ddp")
class SumOfGradients(cs336_answer.DDP):
    """Gradients are added over ranks, and not divided by their number."""

    def finish_gradient_synchronization(self):
        for parameter, gradient, work in self.under_way:
            work.wait()
            cs336_answer.add(parameter, gradient)
        self.under_way.clear()


@wrong(cs336.DDP, cs336_answer, "get_ddp")
class EachForItself(cs336_answer.DDP):
    """No gradient is reduced."""

    def send(self, parameter):
        pass


@wrong(cs336.DDP, cs336_answer, "get_ddp")
class SendsTwice(cs336_answer.DDP):
    """What was reduced is reduced once more."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))


@wrong(cs336.DDP, cs336_answer, "get_ddp")
class NotFilledIn(cs336_answer.DDP):
    """Nothing is there yet, which is not the same as a part that nobody claims."""

    def __init__(self, module):
        raise NotImplementedError


@wrong(cs336.DDP, cs336_answer, "get_ddp")
class NeverWaits(cs336_answer.DDP):
    """Gradients are read as if what was sent had arrived."""

    def finish_gradient_synchronization(self):
        self.under_way = [(parameter, gradient, NOTHING) for parameter, gradient, _ in self.under_way]
        super().finish_gradient_synchronization()


@wrong(cs336.ShardedOptimizer, cs336_answer, "get_sharded_optimizer")
class AllStates(cs336_answer.ShardedOptimizer):
    """Every rank keeps all states, and steps all parameters."""

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        self.own.param_groups[-1]["params"] = self.param_groups[-1]["params"]


@wrong(cs336.ShardedOptimizer, cs336_answer, "get_sharded_optimizer")
class ForgetsMoments(cs336_answer.ShardedOptimizer):
    """A checkpoint has the state of the outer optimizer, which has none."""

    def state_dict(self):
        return {**super().state_dict(), "own": None}

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "own": self.own.state_dict()})


@wrong(cs336.ShardedOptimizer, cs336_answer, "get_sharded_optimizer")
class DeafToSchedulers(cs336_answer.ShardedOptimizer):
    """The inner optimizer keeps the learning rate that it began with."""

    def step(self, closure=None):
        began = [group["initial_lr"] for group in self.param_groups]
        now = [group["lr"] for group in self.param_groups]
        self.set(began)
        super().step(closure)
        self.set(now)

    def set(self, rates):
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate


@wrong(cs336.FSDP, cs336_answer, "get_fsdp")
class NormOfOwnShards(cs336_answer.FSDP):
    """The norm that clips is that of this rank's shards."""

    def over_ranks(self, total):
        return total


@wrong(cs336.FSDP, cs336_answer, "get_fsdp")
class Untied(cs336_answer.FSDP):
    """A weight that two layers share becomes two shards."""

    def shard(self, layer, shards):
        super().shard(layer, {})


@wrong(cs336.FSDP, cs336_answer, "get_fsdp")
class EvenOnly(cs336_answer.FSDP):
    """A weight that ranks do not divide is refused."""

    def shard(self, layer, shards):
        if layer.weight.numel() % dist.get_world_size():
            raise ValueError("a weight has to be divisible by the number of ranks")
        super().shard(layer, shards)


@wrong(cs336.FSDP, cs336_answer, "get_fsdp")
class GathersOnceMore(cs336_answer.FSDP):
    """All weights are gathered after backward as well."""

    def finish_gradient_synchronization(self):
        super().finish_gradient_synchronization()
        self.gather_full_params()


# ---- CMU 15-442 ---------------------------------------------------------------------------------------------------


@wrong(cmu15442.ZeRO3, cmu15442_answer, "ZeroDPStage3FCLayer")
class OwnGradientTimesRanks(cmu15442_answer.ZeroDPStage3FCLayer):
    """A rank takes its own gradient for that of all others."""

    def scattered(self, gradient, into):
        into[...] = self._partition_flat_tensor(self.dp_size * gradient, self.rank, self.dp_size)[0]


@wrong(cmu15442.ZeRO3, cmu15442_answer, "ZeroDPStage3FCLayer")
class KeepsTheWhole(cmu15442_answer.ZeroDPStage3FCLayer):
    """What was gathered last stays."""

    def gathered(self, shard, shape):
        self.whole = super().gathered(shard, shape)
        return self.whole


@wrong(cmu15442.ZeRO3, cmu15442_answer, "ZeroDPAdam")
class Uncorrected(cmu15442_answer.ZeroDPAdam):
    """Moments that begin at zero are taken as they are."""

    def correction(self, beta):
        return 1
