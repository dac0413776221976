"""Muon for matrices and AdamW for the rest: one optimizer over the flat shards that engines keep.

    matrices, rest = split(model)
    Engine(
        model,
        functools.partial(MuonAdamW, muon={"lr": 0.02}, adamw={"lr": 1e-3}),
        param_groups=[{"params": matrices, "whole": True}, {"params": rest}],
    )

Muon steps a matrix by its momentum, made nearly orthogonal. That needs the whole matrix, and its shape. So engines deal
the parameters of a `whole` group to ranks whole, and a flat shard knows where each of them lies.

Source: Jordan et al., Muon, 2024, as torch.optim.Muon has it; Moonlight, arXiv 2502.16982.
"""

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """torch.optim.Muon on matrices in groups that are `whole`, torch.optim.AdamW on other groups.

    Args:
        params: parameters, or groups. Those of a whole group are flat tensors with `whole`, [(slice, shape)] of their
            matrices, as engines make them; or else matrices.
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
                states = {matrix: {"momentum_buffer": momentum} for matrix, momentum in self._matrices(group)}
                self._muon.param_groups, self._muon.state = [{**group, "params": list(states)}], states
                self._muon.step()
            else:
                self._adamw.param_groups, self._adamw.state = [group], self.state
                self._adamw.step()
        return loss

    def _matrices(self, group):
        """Yield a group's matrices, views with views of their gradients; and of their momentum."""
        for flat in group["params"]:
            if flat.grad is not None:
                momentum = self.state[flat].setdefault("momentum_buffer", torch.zeros_like(flat))
                for part, shape in getattr(flat, "whole", [(slice(None), flat.shape)]):
                    matrix = nn.Parameter(flat[part].view(shape))
                    matrix.grad = flat.grad[part].view(shape)
                    yield matrix, momentum[part].view(shape)


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
