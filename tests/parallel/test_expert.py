"""Expert parallelism: the bits of all ranks' routers, sends and experts in turn, around stages and hybrid sharding."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Barrier

import pytest
import split_training
import torch
from split_training import SGD, TRANSFORMERS, build, expert_engine, on_one_thread, twelve
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.nn.utils import clip_grad_norm_
from training import STAGES, make_engine, message_in_step, same_bits, text

from common import models
from common.data import Batches
from common.models.gpt import GPTConfig
from common.models.moe import MoEGPT
from common.models.recompute import KINDS
from parallel.accounting import layers_of_experts, predicted
from parallel.expert import LIBRARIES

STEPS, SAMPLES = 3, 24
BOUND = 1e-6  # relative; with Adam the third step is farther, split or not: it enlarges rounding of small gradients
LAYOUTS = [(4, 2), (4, 4), (6, 2), (6, 3), (8, 2), (4, 1)]  # ranks, and expert ranks among them
FIVE = (*STAGES, "replicated:Pairs")  # nodes of as many ranks as there are expert ranks
NODES = {(4, 4): "zeropp.hybrid", (6, 3): "replicated:Threes", (8, 2): "replicated:Fours"}  # else in pairs


train = partial(split_training.train, loss_of=models.loss, ranks=1, samples=SAMPLES)


@pytest.fixture(autouse=True)
def library(request):
    """Hugging Face's models need theirs."""
    if any(model in request.node.name for model in TRANSFORMERS):
        pytest.importorskip("transformers")


def whole(made):
    """The weights of all experts and of all else, in one order on all ranks."""
    return dict(sorted(made.full_state_dict().items()))


@on_one_thread
def split(world, engine, ranks, micro_batches=1, **options):
    made = expert_engine(world, engine, ranks, **options)
    found = train(world, made, micro_batches=micro_batches)
    assert made.accounting.measured() == made.accounting.predicted()
    return found, whole(made)


# ---- all ranks in turn ------------------------------------------------------------------------------------------


class Meeting:
    """Where the copies of a model, a thread each, meet at every layer of experts: the last to come computes for all.

    An expert is its owner's, of `ranks` in a row, and takes the tokens of all in their order.
    """

    def __init__(self, copies, ranks):
        self.ranks, self.layers, self.inputs = ranks, [None] * len(copies), [None] * len(copies)
        self.barrier = Barrier(len(copies), self.compute, timeout=60)
        for rank, copy in enumerate(copies):
            for layer in copy.modules():
                if type(layer).__name__ in LIBRARIES:
                    layer.forward = partial(self.forward, rank, layer)

    def forward(self, rank, layer, x):
        self.layers[rank], self.inputs[rank] = layer, x
        self.barrier.wait()
        return self.answers[rank]

    def compute(self):
        library, self.answers = LIBRARIES[type(self.layers[0]).__name__], []
        tokens = [x.flatten(0, -2) for x in self.inputs]
        routers = [getattr(layer, library.router) for layer in self.layers]
        routed = [library.route(router, own) for router, own in zip(routers, tokens, strict=True)]
        experts = getattr(self.layers[0].experts, "num_experts", None) or len(self.layers[0].experts)
        orders = [choice.flatten().argsort(stable=True) for _, choice in routed]
        parts = [
            own[order // choice.shape[1]].split(choice.flatten().bincount(minlength=experts).tolist())
            for own, order, (_, choice) in zip(tokens, orders, routed, strict=True)
        ]
        for first in range(0, len(tokens), self.ranks):
            group, of_experts = range(first, first + self.ranks), []
            for index in range(experts):
                of_ranks = [parts[rank][index] for rank in group]
                owner = self.layers[first + index * self.ranks // experts].experts
                of_experts.append(answer_of(owner, index, torch.cat(of_ranks)).split([len(part) for part in of_ranks]))
            for rank, own in zip(group, zip(*of_experts, strict=True), strict=True):
                probability, choice = routed[rank]
                answers = torch.empty_like(torch.cat(own)).index_copy(0, orders[rank], torch.cat(own))
                total = (probability[..., None] * answers.view(*choice.shape, -1)).sum(dim=1)
                self.answers.append(total.to(answers.dtype).view_as(self.inputs[rank]))


def answer_of(experts, index, tokens):
    """What one expert answers, of a list or of Hugging Face's stack."""
    if isinstance(experts, nn.ModuleList):
        return experts[index](tokens)
    gate, up = linear(tokens, experts.gate_up_proj[index]).chunk(2, dim=-1)
    return linear(experts.act_fn(gate) * up, experts.down_proj[index])


def losses_in_turn(copies, windows):
    def loss_of(copy, part):
        torch.set_num_threads(1)
        inputs, targets = copy.inputs_and_targets(part)
        return models.loss(copy(inputs), targets)

    with ThreadPoolExecutor(len(copies)) as threads:
        return list(threads.map(loss_of, copies, windows))


@on_one_thread
def in_turn(world, size, ranks, micro_batches=1, precision="fp32", model=twelve, checkpoints=None, **options):
    """One process: copies of the model for `size` ranks, means in rank order, steps of the whole model's engine.

    Without `checkpoints` of activations, which change no bit.
    """
    made = make_engine("stage0_ddp", build(model), precision=precision, **options)
    copies = [build(model) for _ in range(size)]
    for copy in copies:
        models.materialize(copy, models.initial_values(0), world.device)
        copy.to(made.dtype)
    Meeting(copies, ranks)
    batches, found = Batches(text(), made.module.window, SAMPLES), [[] for _ in copies]
    for step in range(STEPS):
        with torch.no_grad():
            for copy in copies:
                for own, new in zip(copy.parameters(), made.module.parameters(), strict=True):
                    own.copy_(new)
        windows = [batches.of(step, rank, size).to(world.device).chunk(micro_batches) for rank in range(size)]
        totals, means = [0.0] * size, {}
        for parts in zip(*windows, strict=True):
            losses = [loss / micro_batches for loss in losses_in_turn(copies, parts)]
            sum(losses).backward()
            totals = [total + loss.item() for total, loss in zip(totals, losses, strict=True)]
            for name, of_copies in zip(
                dict(copies[0].named_parameters()),
                zip(*(copy.parameters() for copy in copies), strict=True),
                strict=True,
            ):
                first, *others = [own.grad.float() for own in of_copies if own.grad is not None]  # of experts: replicas
                mean = (sum(others, first) / size).to(made.dtype).float()
                means[name] = means[name] + mean if name in means else mean
            for copy in copies:
                copy.zero_grad()
        made.backward(models.loss(made(parts[0][:, :-1].long()), parts[0][:, 1:].long()))  # a gradient to write
        with made.gradients(write=True) as written:
            for name, mean in means.items():
                written[name].copy_(mean)
        norm = made.step().norm
        for own, total in zip(found, totals, strict=True):
            own.append((total, norm))
    return found, made.full_state_dict()


OPTIONS = [{"precision": "fp32"}, {"precision": "bf16"}, {"precision": "bf16", "micro_batches": 2}]
CASES = [(size, ranks, options) for size, ranks in LAYOUTS for options in OPTIONS]
CASES += [(4, 2, {"model": model, "precision": precision}) for model in TRANSFORMERS for precision in ("fp32", "bf16")]
CASES += [(4, 2, {"checkpoints": kind}) for kind in KINDS]


@pytest.mark.parametrize(("size", "ranks", "options"), CASES, ids=str)
def test_a_split_model_has_the_bits_of_all_ranks_computed_in_turn(worlds, size, ranks, options):
    options = {**options, "clip_norm": 0.5}
    expected, weights = worlds(1).run(partial(in_turn, size=size, ranks=ranks, **options))[0]
    for engine in (*STAGES, NODES.get((size, ranks), "replicated:Pairs")):
        ended = worlds(size).run(partial(split, ranks=ranks, **options), engine)
        assert [found for found, _ in ended] == expected, engine
        assert all(same_bits(own, weights) for _, own in ended), engine


def squares(world, engine):
    """What stands under the root of each norm, in float64: it shows an order of summands that the norm rarely does."""
    made, found = expert_engine(world, engine, clip_norm=0.5, precision="bf16"), []
    combine = made.axes.combine
    made.axes.combine = lambda sums, how: found.append(sums.tolist()) or combine(sums, how)
    train(world, made)
    return found


@pytest.mark.parametrize(("size", "hybrid"), [(6, "replicated:Pairs"), (8, "replicated:Fours")])
def test_hybrid_sharding_adds_squares_in_the_order_of_stage_3(worlds, size, hybrid):
    assert worlds(size).run(squares, hybrid) == worlds(size).run(squares, "stage3_param")


# ---- beside what is not split -----------------------------------------------------------------------------------


@on_one_thread
def in_float64(world, model):
    """(loss, norm) of each step of the whole model in float64, without an engine."""
    module = build(model)
    models.materialize(module, models.initial_values(0), world.device)
    module.double()
    optimizer, batches, found = SGD(module.parameters()), Batches(text(), module.window, SAMPLES), []
    for step in range(STEPS):
        inputs, targets = module.inputs_and_targets(batches.of(step, 0, 1).to(world.device))
        loss = cross_entropy(module(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        found.append((loss.item(), clip_grad_norm_(module.parameters(), 0.5).item()))
        optimizer.step()
    return found


WHOLE = [(*layout, twelve) for layout in LAYOUTS] + [(4, 2, model) for model in TRANSFORMERS]


@pytest.mark.parametrize(("size", "ranks", "model"), WHOLE)
def test_losses_and_norms_are_those_of_the_whole_model_in_float64(worlds, size, ranks, model):
    ended = worlds(size).run(partial(split, ranks=ranks, clip_norm=0.5, optimizer=SGD, model=model), "stage1_os")
    losses = [sum(of_step) / size for of_step in zip(*([loss for loss, _ in found] for found, _ in ended), strict=True)]
    expected = worlds(1).run(partial(in_float64, model=model))[0]
    assert losses == pytest.approx([loss for loss, _ in expected], rel=BOUND)
    assert [norm for _, norm in ended[0][0]] == pytest.approx([norm for _, norm in expected], rel=BOUND)


@on_one_thread
def on_the_expert_axis(world, ranks, kind, model):
    """What this rank sends there in a step, predicted and counted, and the tokens that each layer sent and received."""
    made = expert_engine(world, "stage3_param", ranks, model=model, checkpoints=kind, precision="bf16")
    layers = layers_of_experts(made.module)
    for step in range(2):
        made.axes.expert.traffic.reset()
        for layer in layers:
            layer.routed.clear()
        train(world, made, micro_batches=2, begin=step, steps=step + 1)
    foreseen = predicted(made, SAMPLES // world.size // 2, micro_batches=2)["expert"]
    return (
        foreseen,
        made.axes.expert.traffic.by_collective(),
        [(of.routed["sent"], of.routed["received"]) for of in layers],
    )


LAYERS = [(*layout, kind, twelve) for layout in LAYOUTS[:4] for kind in (None, *KINDS)] + [(4, 2, None, "Qwen3Moe")]


@pytest.mark.parametrize(("size", "ranks", "kind", "model"), LAYERS)
def test_the_expert_axis_sends_what_is_predicted_of_routed_tokens(worlds, size, ranks, kind, model):
    foreseen, counted, routed = zip(*worlds(size).run(on_the_expert_axis, ranks, kind, model), strict=True)
    assert counted == foreseen
    assert len({one for of_rank in routed for one in of_rank}) > size  # layers and ranks send different numbers
    assert min(min(one) for of_rank in routed for one in of_rank) > 0


# ---- files and gradients, overflows, refusals --------------------------------------------------------------------


@pytest.mark.parametrize(("writer", "reader"), list(zip(FIVE, (*FIVE[1:], FIVE[0]), strict=True)))
@pytest.mark.parametrize("model", [twelve, "Qwen3Moe"])
@pytest.mark.ranks(4)
def test_a_checkpoint_has_the_global_names_of_experts_and_fits_any_layout(world, tmp_path, writer, reader, model):
    """Saved from two expert ranks: in another layout, in the whole model, and back."""
    first, most = expert_engine(world, writer, model=model), 2 if reader == FIVE[-1] else 4
    train(world, first, steps=2)
    first.save(tmp_path / "split")
    other, one, back = (expert_engine(world, reader, ranks, 1, model) for ranks in (most, 1, 2))
    other.load(tmp_path / "split")
    one.load(tmp_path / "split")
    one.save(tmp_path / "whole")
    back.load(tmp_path / "whole")
    fresh = expert_engine(world, reader, most, 1, model)
    fresh.load_weights(whole(first))
    for made in (other, one, back, fresh):
        assert same_bits(whole(made), whole(first))
    for made in (first, back):
        train(world, made, begin=2)
    assert same_bits(whole(back), whole(first))


@pytest.mark.parametrize("stage", FIVE)
@pytest.mark.parametrize("model", [twelve, "Qwen3Moe"])
@pytest.mark.ranks(4)
def test_an_engine_continues_from_one_with_as_many_expert_ranks(world, stage, model):
    old, new, other = (expert_engine(world, stage, ranks, seed, model) for ranks, seed in ((2, 0), (2, 1), (1, 1)))
    train(world, old, steps=1)
    new.continue_from(old)
    then, weights = old.snapshot(), whole(old)
    train(world, old, steps=1)
    old.restore(then)
    assert all(same_bits(whole(made), weights) for made in (old, new))
    assert "hold other experts" in message_in_step(other.continue_from, old)


@pytest.mark.parametrize("stage", FIVE)
@pytest.mark.parametrize("model", [twelve, *TRANSFORMERS])
@pytest.mark.ranks(2)
def test_a_model_that_has_weights_keeps_them(world, stage, model):
    def built():
        module = build(model)
        models.materialize(module, models.initial_values(1), world.device)
        return module

    made = expert_engine(world, stage, model=built, init=None)
    assert same_bits(whole(made), dict(sorted(built().state_dict().items())))
    assert bool(made.full_state_dict(to_rank=1)) == (world.rank == 1)


@pytest.mark.parametrize(("ranks", "hybrid"), [(2, FIVE[-1]), (4, NODES[4, 4])])
@pytest.mark.ranks(4)
def test_experts_that_train_alone_have_the_same_norm_in_all_engines(world, ranks, hybrid):
    def else_frozen():
        module = twelve()
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(".experts." in name)
        return module

    one, *others = [split(world, made, ranks, clip_norm=0.5, model=else_frozen) for made in (*STAGES, hybrid)]
    assert all(found == one[0] and same_bits(weights, one[1]) for found, weights in others)


@pytest.mark.parametrize("stage", FIVE)
@pytest.mark.ranks(4)
def test_an_overflow_in_one_expert_skips_the_step_on_all_ranks(world, stage):
    made = expert_engine(world, stage, precision="fp16")
    train(world, made, steps=1)
    assert made.loss_scaler.good_steps == 1
    before = whole(made)
    if world.rank in (1, 3):  # the replicas of one expert
        weight = next(made.module.blocks[0].mlp.experts.parameters())
        weight.register_hook(lambda gradient: gradient + torch.inf)
    train(world, made, steps=1)
    assert made.loss_scaler.good_steps == 0
    assert same_bits(whole(made), before)


@pytest.mark.parametrize("stage", FIVE)
@pytest.mark.ranks(4)
def test_weights_and_gradients_of_experts_are_written_alike_on_their_replicas(world, stage):
    made = expert_engine(world, stage)
    inputs, targets = made.module.inputs_and_targets(torch.zeros(2, made.module.window, dtype=torch.uint8))
    made.backward(models.loss(made(inputs.to(world.device)), targets.to(world.device)))
    name = min(made.axes.experts)
    parameter = dict(made.module.named_parameters())[name]

    def write_gradient(value):
        with made.gradients(write=True) as found:
            found[name] += value

    def write(value):
        with made.gathered(write=True):
            parameter.data.add_(value)

    for call in (write_gradient, write):
        assert message_in_step(call, world.rank % 2) is None
        assert "differs between rank" in message_in_step(call, world.rank)


REFUSED = {
    "offload": "holds all experts",
    "offload.nvme": "holds all experts",
    "zeropp": "holds all experts",
    "replicated:Threes": "2 expert ranks do not divide nodes of 1; give",
}


@pytest.mark.parametrize("one", REFUSED)
@pytest.mark.ranks(2)
def test_engines_that_cannot_hold_a_part_of_the_experts_say_so(world, one):
    assert REFUSED[one] in message_in_step(expert_engine, world, one)


@pytest.mark.ranks(2)
def test_layers_that_cannot_be_split_are_refused(world):
    def three():
        return MoEGPT(GPTConfig(layers=1, width=16, heads=2, sequence=16), experts=3)

    def jittering():
        module = twelve()
        module.blocks[1].mlp.jitter_noise = 0.1  # as Mixtral's layers may have
        return module

    for model, message in (
        (three, "do not divide the 3 experts"),
        (jittering, "set router_jitter_noise=0.0"),
        ("gpt-tiny", "no layer of experts"),
    ):
        assert message in message_in_step(expert_engine, world, "stage0_ddp", model=model)
