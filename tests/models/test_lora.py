"""LoRA: it starts as its base, trains the adapters alone, and all stages end with the same bits."""

import pytest
import torch
from torch import nn
from training import same_bits

from common import models
from common.models.lora import LoRALinear, add_adapters

ADAPTERS = ("lora_a", "lora_b")


def real_model(name):
    model = models.build(name)
    models.materialize(model, models.initial_values(0), "cpu")
    return model


def of_base(state):
    return {name: tensor for name, tensor in state.items() if not name.endswith(ADAPTERS)}


def test_it_starts_as_its_base_does():
    base, lora = real_model("gpt-tiny"), real_model("lora-tiny")
    assert same_bits(of_base(lora.state_dict()), base.state_dict())
    inputs = torch.arange(16)[None]
    assert torch.equal(lora(inputs), base(inputs))


@pytest.mark.parametrize("name", ["lora-tiny", "lora-nano"])
def test_only_adapters_train_and_they_are_few(name):
    sizes = {True: 0, False: 0}
    for parameter_name, parameter in models.build(name).named_parameters():
        assert parameter.requires_grad == parameter_name.endswith(ADAPTERS)
        sizes[parameter.requires_grad] += parameter.numel()
    assert 0 < sizes[True] < sizes[False] / 4


def test_an_adapter_adds_its_scaled_product():
    base = nn.Linear(5, 3)
    adapter = LoRALinear(base, rank=2, alpha=8)
    nn.init.normal_(adapter.lora_b)
    x = torch.randn(4, 5)
    torch.testing.assert_close(adapter(x), base(x) + 4 * x @ (adapter.lora_b @ adapter.lora_a).T)


def test_adapters_go_into_a_trained_model_and_change_nothing_at_first():
    model = real_model("llama-tiny")
    inputs = torch.arange(16)[None]
    before = model(inputs)
    add_adapters(model, rank=3, alpha=3)
    assert torch.equal(model(inputs), before)
    assert sum(isinstance(module, LoRALinear) for module in model.modules()) == 14
    assert all(parameter.abs().sum() > 0 for name, parameter in model.named_parameters() if name.endswith("lora_a"))


def fit(model, windows):
    """Forty steps on one batch; return the first and the last loss."""
    inputs, targets = model.inputs_and_targets(windows)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = models.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


def test_adapters_teach_a_trained_base_another_text():
    model = real_model("gpt-tiny")
    one, other = (torch.tensor(list(text * 4))[: model.window][None] for text in (b"abcdefg", b"gfedcba"))
    fit(model, one)
    add_adapters(model, rank=2, alpha=4)
    before, after = fit(model, other)
    assert after < 0.5 * before
