"""Plain data parallelism, with no overlap at all, as a reference for others.

It is written with torch's own collectives, so that it shares no code with what it checks.
"""

import contextlib
import math
from pathlib import Path

import torch
import torch.distributed as dist

from interop.peers.torch_ddp import Replicated


def mean_in_rank_order(tensor, order=1, factor=1.0):
    """The mean over ranks by a loop in rank order, in fp32, divided once, multiplied by a factor, and rounded once.

    An `order` of -1 adds the last rank's gradient first.
    """
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor)
    total = torch.zeros_like(tensor, dtype=torch.float32)
    for piece in pieces[::order]:
        total += piece
    return (total * factor / len(pieces)).to(tensor.dtype)


class ExactNorm:
    """Clips by a norm that is summed in float64, as torch's own is not."""

    def clip(self):
        norm = self.norm([master.grad for master in self.masters.values()])
        for master in self.masters.values():
            master.grad.mul_((self.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def norm(self, gradients):
        """The norm that clips."""
        if self.norm_type == math.inf:
            return torch.stack([gradient.abs().max().float() for gradient in gradients if gradient.numel()]).max()
        return sum(gradient.double().square().sum() for gradient in gradients).sqrt().float()


class AverageAfterBackward(ExactNorm, Replicated):
    """Plain autograd; when it is done, gradients are averaged one by one. All ranks begin with rank 0's weights.

    It has no hooks, so it runs what DDP refuses: unused parameters, reentrant checkpoints, several forwards.
    """

    name = "average_after_backward"

    def __init__(self, model, optimizer, *, bucket_mb=None, deterministic=False, **options):
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        for parameter in model.parameters():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(device)
                whole = parameter.data.contiguous()
                dist.broadcast(whole, 0)
                parameter.data.copy_(whole)
        super().__init__(model, optimizer, **options)
        self.total = {parameter: torch.zeros_like(master) for parameter, master in self.masters.items()}
        self.own = {parameter: torch.zeros_like(master) for parameter, master in self.masters.items()}
        self.sync_gradients = True

    def __call__(self, *args, **kwargs):
        for buffer in self.module.buffers():
            whole = buffer.contiguous()
            dist.broadcast(whole, 0)
            buffer.data = whole  # past autograd's version count
        args, kwargs = self.cast(args, kwargs)
        return self.module(*args, **kwargs)

    def backward(self, loss):
        try:
            self.scaled(loss).backward()
        except BaseException:
            self.zero_grad()
            raise
        self.collect()
        if self.sync_gradients:
            self.average()

    def collect(self):
        """Add gradients up on this rank, in fp32."""
        for parameter in self.masters:
            if parameter.grad is not None:  # as the optimizer's own zero_grad() leaves it
                self.own[parameter] += parameter.grad
                parameter.grad.zero_()

    def average(self):
        """Add the mean over ranks of the collected gradients to that of the step's earlier backwards."""
        for parameter, own in self.own.items():
            self.total[parameter] += self.mean(own.to(parameter.dtype))
            own.zero_()

    def mean(self, gradient):
        """The mean over ranks."""
        return mean_in_rank_order(gradient)

    def step(self):
        self.collect()  # what another engine's backward left
        self.average()  # and what no_sync did
        for parameter, master in self.masters.items():
            master.grad = self.total[parameter].clone()
        return super().step()

    def zero_grad(self):
        super().zero_grad()
        for sums in (self.total, self.own):
            for value in sums.values():
                value.zero_()

    @contextlib.contextmanager
    def no_sync(self):
        self.sync_gradients = False
        yield
        self.sync_gradients = True

    def save(self, path, extra=None):
        """Each rank writes all that it has."""
        state = {"module": self.module.state_dict(), "masters": list(self.masters.values()), "extra": extra}
        state |= {"optimizer": self.optimizer.state_dict(), "loss_scaler": self.loss_scaler}
        torch.save(state, Path(path, f"rank-{dist.get_rank()}.pt"))
        dist.barrier()

    @torch.no_grad()
    def load(self, path):
        """Each rank reads what it wrote, or rank 0's file if there was no such rank."""
        self.zero_grad()
        own = Path(path, f"rank-{dist.get_rank()}.pt")
        state = torch.load(own if own.exists() else own.with_name("rank-0.pt"), weights_only=False)
        self.module.load_state_dict(state["module"])
        for master, saved in zip(self.masters.values(), state["masters"], strict=True):
            master.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        self.loss_scaler = state["loss_scaler"]
        return state["extra"]


class PlainDDP(AverageAfterBackward):
    """It also leaves the mean in `.grad`, as DDP does, and steps with what is there: clipped by hand, for instance.

    Of 16-bit parameters the masters' gradients are out of sight, as in `TorchDDP`.
    """

    name = "plain_ddp"

    def backward(self, loss):
        self.take()
        super().backward(loss)
        for parameter, total in self.in_sight():
            parameter.grad.copy_(total)

    def step(self):
        self.take()
        return super().step()

    def take(self):
        """Take `.grad` for the mean, even if the script has written it."""
        for parameter, total in self.in_sight():
            if parameter.grad is None:  # by the optimizer's own zero_grad()
                parameter.grad = torch.zeros_like(parameter)
            total.copy_(parameter.grad)
            parameter.grad.zero_()

    def in_sight(self):
        """(parameter, the mean of its gradient), of those that the optimizer steps themselves."""
        return [(parameter, self.total[parameter]) for parameter, master in self.masters.items() if parameter is master]


class OtherRounding(AverageAfterBackward):
    """The same mathematics, rounded differently: its error is what an engine's may be.

    Gradients are added from the last rank to the first. As two numbers have one sum only, and one rank adds nothing,
    the loss is also a little smaller and the mean larger by as much, which rounds differently all over backward. How
    much that changes is a matter of chance, above all with Adam, so there are others of its kind.
    """

    name = "other_rounding"
    smaller = 15 / 16  # near 1: in fp16 as much overflows as without

    def scaled(self, loss):
        return super().scaled(loss) * self.smaller

    def mean(self, gradient):
        return mean_in_rank_order(gradient, order=-1, factor=1 / self.smaller)


class PlainOtherwise(PlainDDP, OtherRounding):
    """`PlainDDP`, rounded otherwise."""
