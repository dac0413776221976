"""The model zoo: what every model must do, and the one property that each is there for."""

import pytest
import torch
from torch import nn

from common.models import SIZES, build, initial_values, loss, materialize
from common.models.gpt import GPTConfig
from common.models.llama import rotate
from common.models.lora import LoRALinear, add_adapters
from common.models.moe import MixtureOfExperts

SMALL = ["mlp", "gpt-tiny", "llama-tiny", "resnet-tiny", "moe-tiny", "lora-tiny"]


def real_model(name, seed=0):
    model = build(name)
    materialize(model, initial_values(seed), "cpu")
    return model


def fit(model, windows, steps):
    """Train on one batch; return the first and the last loss."""
    inputs, targets = model.inputs_and_targets(windows)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(inputs), targets)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses[0], losses[-1]


def random_windows(model, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (batch, model.window), dtype=torch.uint8, generator=generator)


def test_initial_values_depend_on_seed_and_name_alone():
    def drawn(seed, name, dtype=torch.float32):
        tensor = torch.empty(5, 3, dtype=dtype)
        initial_values(seed)(name, tensor)
        return tensor

    torch.manual_seed(1)
    first = drawn(0, "a.weight")
    drawn(0, "b.weight")
    torch.manual_seed(2)
    assert torch.equal(drawn(0, "a.weight"), first)
    assert torch.equal(drawn(0, "a.weight", torch.bfloat16), first.bfloat16())
    assert not torch.equal(drawn(1, "a.weight"), first)
    assert not torch.equal(drawn(0, "b.weight"), first)


def test_initial_values_are_the_same_in_every_process():
    tensor = torch.empty(2, 2)
    initial_values(0)("wte.weight", tensor)
    recorded = [[0.0139146, -0.0193457], [0.0223594, 0.00050150]]
    torch.testing.assert_close(tensor, torch.tensor(recorded), rtol=1e-5, atol=1e-7)


def test_initial_values_follow_the_kind_of_tensor():
    init = initial_values(0)
    for name, shape, std in [
        ("wte.weight", (256, 64), 0.02),
        ("wpe.weight", (256, 64), 0.02),
        ("blocks.0.mlp.up.weight", (256, 64), 64**-0.5),
        ("stem.weight", (64, 16, 3, 3), 144**-0.5),
    ]:
        tensor = torch.empty(shape)
        init(name, tensor)
        assert tensor.std().item() == pytest.approx(std, rel=0.05)
        assert abs(tensor.mean().item()) < 0.05 * std
    state = real_model("resnet-tiny").state_dict()
    for name, value in [("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)]:
        assert torch.equal(state[f"bn.{name}"], torch.full((8,), float(value)))
    assert state["bn.num_batches_tracked"] == 0


@pytest.mark.parametrize("name", SIZES)
def test_every_size_builds_on_the_meta_device(name):
    model = build(name)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize("name", SMALL)
def test_materialize_equals_a_model_built_on_the_device(name):
    model, built = real_model(name), build(name, device="cpu")
    init = initial_values(0)
    for qualified_name, tensor in [*built.named_parameters(), *built.named_buffers()]:
        init(qualified_name, tensor)
    for qualified_name, tensor in built.state_dict().items():
        assert torch.equal(model.state_dict()[qualified_name], tensor), qualified_name


def test_materialize_keeps_tied_weights_tied_and_frozen_ones_frozen():
    model = build("gpt-tiny")
    model.ln_f.requires_grad_(False)
    materialize(model, initial_values(0), "cpu")
    assert model.head.weight is model.wte.weight
    assert isinstance(model.wte.weight, nn.Parameter)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["ln_f.weight", "ln_f.bias"]


def test_gpt_124m_has_gpt2s_parameter_count():
    assert sum(parameter.numel() for parameter in build("gpt-124m").parameters()) == 124_439_808


@pytest.mark.parametrize("name", [name for name in SMALL if name != "lora-tiny"])  # its base is untrained
def test_every_model_learns(name):
    model = real_model(name)
    before, after = fit(model, random_windows(model, batch=4), steps=20)
    assert after < 0.8 * before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SMALL)
def test_every_model_runs_in_16_bits_with_fp32_buffers(name, dtype):
    model = real_model(name)
    inputs, targets = model.inputs_and_targets(random_windows(model))
    expected = loss(model(inputs), targets)
    kept = {p for module in model.modules() if isinstance(module, nn.BatchNorm2d) for p in module.parameters()}
    for parameter in set(model.parameters()) - kept:
        parameter.data = parameter.data.to(dtype)
    outputs = model(inputs.to(dtype) if inputs.is_floating_point() else inputs)
    assert outputs.dtype == dtype
    value = loss(outputs, targets)
    value.backward()
    torch.testing.assert_close(value, expected, rtol=0.05, atol=0)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_no_output_depends_on_a_later_byte(name):
    model = real_model(name)
    inputs, targets = model.inputs_and_targets(random_windows(model))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    changed = inputs.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_rotary_positions_enter_as_a_distance():
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scores = rotate(query.expand(10, 8)) @ rotate(key.expand(10, 8)).T
    for distance in range(-9, 10):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-5)
    assert scores[0, 0] == pytest.approx((query @ key).item())
    assert not torch.allclose(scores[0, 0], scores[0, 1])


def small_mixture():
    mixture = MixtureOfExperts(GPTConfig(layers=1, width=6, heads=1, sequence=4), experts=3)
    for name, parameter in mixture.named_parameters():
        initial_values(0)(name, parameter)
    return mixture


def test_unused_experts_get_no_gradient():
    mixture = small_mixture()
    with torch.no_grad():  # all positive tokens prefer expert 1
        mixture.router.weight.copy_(torch.tensor([-1.0, 1.0, -1.0])[:, None].expand(3, 6))
    mixture(torch.rand(2, 4, 6) + 0.1).sum().backward()
    for index, expert in enumerate(mixture.experts):
        assert all((parameter.grad is not None) == (index == 1) for parameter in expert.parameters())
    assert mixture.router.weight.grad.abs().sum() > 0


def test_a_token_gets_its_best_experts_answer_times_the_probability():
    mixture = small_mixture()
    tokens = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0))
    probabilities = mixture.router(tokens).softmax(dim=-1)
    assert len(probabilities.argmax(dim=-1).unique()) > 1
    answers = mixture(tokens)
    for row, column in torch.cartesian_prod(torch.arange(2), torch.arange(4)):
        best = probabilities[row, column].argmax()
        expected = probabilities[row, column, best] * mixture.experts[best](tokens[row, column])
        torch.testing.assert_close(answers[row, column], expected)


ADAPTERS = ("lora_a", "lora_b")  # what LoRA trains; the rest is its base


@pytest.mark.parametrize("name", ["lora-tiny", "lora-nano"])
def test_only_adapters_train_and_they_are_few(name):
    sizes = {True: 0, False: 0}
    for parameter_name, parameter in build(name).named_parameters():
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


def test_adapters_teach_a_trained_base_another_text():
    model = real_model("gpt-tiny")
    one, other = (torch.tensor(list(text * 4))[: model.window][None] for text in (b"abcdefg", b"gfedcba"))
    fit(model, one, steps=40)
    add_adapters(model, rank=2, alpha=4)
    before, after = fit(model, other, steps=40)
    assert after < 0.5 * before


def test_loss_is_the_mean_cross_entropy_in_fp32():
    outputs = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.tensor([[0, 1, 2], [3, 4, 0]])
    expected = -outputs.float().log_softmax(-1).gather(-1, targets[..., None]).mean()
    assert loss(outputs, targets).dtype == torch.float32
    torch.testing.assert_close(loss(outputs, targets), expected)
