"""Muon for matrices and AdamW for the rest: one optimizer over the flat shards that engines keep.

    matrices, rest = split(model)
    Engine(
        model,
        functools.partial(MuonAdamW, muon={"lr": 0.02}, adamw={"lr": 1e-3}),
        param_groups=[{"params": matrices, "whole": True}, {"params": rest}],
    )

Muon steps a matrix by its momentum, made nearly orthogonal. That needs the whole matrix, and its shape; all else of a
step looks at single elements. So the optimizer asks `Whole` for it: some engines keep matrices whole, others cut them.

Source: Jordan et al., Muon, 2024, as torch.optim.Muon has it; Moonlight, arXiv 2502.16982.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz  # torch has no public way to one matrix alone

from common.tensors import within


@dataclass
class Whole:
    """The parameters of a whole group in a flat tensor, all of each; `common.engine.matrices` has pieces of some."""

    parts: list  # [(slice of the flat tensor, shape)]

    def of(self, segment):
        """Those in a slice of the flat tensor, which is then the flat tensor."""
        inside = [(part, shape) for part, shape in self.parts if segment.start <= part.start < segment.stop]
        return replace(self, parts=[(within(part, segment), shape) for part, shape in inside])

    def each(self, weights, update, function, finish):
        """Call `finish(weights, function(update), shape)` for each parameter: now or, if shards cut it, after the step.

        Args:
            weights, update: flat tensors, whose parts belong to the parameters.
            function: gets a whole update, a copy in the parameter's shape; returns one of its shape and dtype.
            finish: steps the weights, whole or a piece, by as much of what the function returned.
        """
        for part, shape in self.parts:
            finish(weights[part].view(shape), function(update[part].view(shape).clone()), shape)


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon on matrices in groups that are `whole`, torch.optim.AdamW on other groups.

    Args:
        params: parameters, or groups. Those of a whole group are matrices or, in engines, flat tensors with `whole`.
        muon, adamw: options of the two, such as {"lr": 0.02}; a group's own come first.

    Raises:
        TypeError, ValueError: an option is unknown, or out of range.
        ValueError: in `step`, a parameter of a whole group is no matrix.
    """

    def __init__(self, params, muon=None, adamw=None):
        self._muon = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **(muon or {}))
        self._adamw = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **(adamw or {}))
        super().__init__(params, {"whole": False})

    def __getstate__(self):
        return {**super().__getstate__(), "_muon": self._muon, "_adamw": self._adamw}

    def add_param_group(self, param_group):
        stepping = self._muon if param_group.get("whole") else self._adamw
        super().add_param_group({**stepping.defaults, **param_group})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            if group["whole"]:
                for flat in group["params"]:
                    if flat.grad is not None:
                        self._step_matrices(group, flat)
            else:
                self._adamw.param_groups, self._adamw.state = [group], self.state
                self._adamw.step()
        return loss

    def _step_matrices(self, group, flat):
        """Step the momentum here, and the matrices as torch.optim.Muon does, where each of them is whole."""
        rate, momentum = group["lr"], self.state[flat].setdefault("momentum_buffer", torch.zeros_like(flat.grad))
        momentum.lerp_(flat.grad, 1 - group["momentum"])
        update = flat.grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum

        def orthogonal(update):
            return _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])

        def finish(weights, update, shape):
            weights.mul_(1 - rate * group["weight_decay"])
            weights.add_(update, alpha=-_adjust_lr(rate, group["adjust_lr_fn"], shape))

        whole = getattr(flat, "whole", Whole([(slice(None), flat.shape)]))
        whole.each(flat, update.bfloat16(), orthogonal, finish)  # in bf16 it is made orthogonal, and so it is sent


def split(model):
    """The parameters that Muon takes, and the others: ([...], [...]).

    Muon takes matrices within elements of a list, except embeddings. In a plain Sequential a head would be among them:
    list the groups yourself.
    """
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            inner = any(part.isdigit() for part in name.split("."))
            (matrices if inner and parameter.ndim == 2 and parameter not in tables else rest).append(parameter)
    return matrices, rest
