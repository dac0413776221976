"""Optimizers as others write them: with counts and estimates in the options of their groups."""

import torch


class CountsInItsGroup(torch.optim.SGD):
    """Counts calls of `step` in the group, as Apex's FusedAdam does, and takes ever smaller steps."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = 0.1 / group["step"]
        super().step()


class ScheduleFree(torch.optim.Optimizer):
    """SGD on a sequence whose average is trained, with its count and sum of weights in the group.

    Source: Defazio et al., "The Road Less Scheduled", arXiv 2405.15682, sec. 2. A tensor counts in place.
    """

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "weight_sum": torch.zeros(())})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            rate = group["lr"] * min(1.0, (group["k"] + 1) / 3)
            group["k"] += 1
            group["weight_sum"] += rate**2
            share = (rate**2 / group["weight_sum"]).item()
            for parameter in group["params"]:
                state = self.state[parameter]
                z = state["z"] if "z" in state else state.setdefault("z", parameter.clone())
                parameter.lerp_(z, share).add_(parameter.grad, alpha=rate * (group["beta"] * (1 - share) - 1))
                z.sub_(parameter.grad, alpha=rate)


class Estimates(torch.optim.Optimizer):
    """Estimates a step size over all that it sees, as Prodigy does, after some steps."""

    def __init__(self, params, after=10):
        super().__init__(params, {"d": 1e-3, "k": 0, "after": after})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if group["k"] >= group["after"]:
                group["d"] = sum(parameter.grad.abs().sum().item() for parameter in group["params"]) * 1e-6
            group["k"] += 1
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["d"])


class Narrow(torch.optim.Optimizer):
    """Keeps a momentum in its own dtype and a count of an element's signs in a byte; its learning rate is a tensor."""

    def __init__(self, params, lr=0.05, dtype=torch.bfloat16):
        super().__init__(params, {"lr": torch.tensor(lr)})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter, dtype=self.dtype)
                    state["positive"] = torch.zeros_like(parameter, dtype=torch.uint8)
                state["momentum"].copy_(state["momentum"].float() * 0.9 + parameter.grad * 0.1)
                state["positive"] += parameter.grad > 0
                parameter.sub_(group["lr"] * state["momentum"].float() / (1 + state["positive"]))
