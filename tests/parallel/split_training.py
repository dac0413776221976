"""What ranks run on several axes: an engine around a model that is split."""

import functools
import importlib

import torch
import torch.nn.functional as F
from pieces import in_pieces
from pieces import loss as loss_in_pieces
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from traces import allocations
from training import ADAMW, make_engine, text

from common import models
from common.data import Batches
from common.models.gpt import GPT, Decoder, FeedForward, GPTConfig
from common.models.moe import MoEGPT
from common.ranks.axes import Axes
from common.tiers.activations import HostActivations
from parallel import expert, pipeline, tensor
from parallel.activations import PartitionedActivations

AXES = ("pipeline", "data", "tensor")
TRANSFORMERS = ("Qwen3Moe", "Mixtral")
SGD = functools.partial(torch.optim.SGD, lr=0.1)  # it shows a factor on the gradients, which Adam hides


@functools.cache
def mesh(device, *shape):
    return init_device_mesh(device, shape, mesh_dim_names=AXES)


def on_one_thread(function):
    """Run a function on one thread of each rank: the sums of kernels depend on it, and worlds differ in it."""

    @functools.wraps(function)
    def call(*args, **options):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return function(*args, **options)
        finally:
            torch.set_num_threads(threads)

    return call


def allocated(run):
    """Bytes of CPU memory that a call leaves allocated."""
    result, changes = allocations(run)
    return sum(changes), result


class Drops(FeedForward):
    """A feed-forward layer with dropout inside the region that is cut, and after it."""

    def __init__(self, config):
        super().__init__(config)
        self.inside, self.after = tensor.CutDropout(0.1), nn.Dropout(0.1)

    def forward(self, x):
        return self.after(self.down(self.inside(F.gelu(self.up(x)))))


def dropping():
    return GPT(GPTConfig(layers=2, width=16, heads=2, sequence=16), Drops)


def three_heads():
    """A model that three tensor ranks can hold; its vocabulary is padded then."""
    return GPT(GPTConfig(layers=2, width=24, heads=3, sequence=16))


def six_heads(feed_forward=FeedForward):
    """A model that two or three tensor ranks can hold; both pad its vocabulary."""
    return GPT(GPTConfig(layers=1, width=24, heads=6, sequence=16, vocabulary=53), feed_forward)


def build(model):
    """A model on the meta device, of the zoo, of Hugging Face's or by a function."""
    if isinstance(model, str) and model not in TRANSFORMERS:
        return models.build(model)
    with torch.device("meta"):
        return OfTransformers(model) if model in TRANSFORMERS else model()


def split_engine(world, engine, ranks=2, model="gpt-tiny", seed=0, checkpoints=None, partitioned=None, **options):
    """An engine around a zoo model that `ranks` tensor ranks hold, and the loss of its outputs.

    Its activation checkpoints, of a kind, are `partitioned` on the "device" or the "host", or not.
    """
    grid = mesh(world.device.type, 1, world.size // ranks, ranks)
    axes, module = Axes(tensor=grid["tensor"].get_group(), deterministic=True), build(model)
    tensor.split(module, axes)
    init = tensor.cut_init(models.initial_values(seed), axes)
    group = grid["data"].get_group()
    made = make_engine(engine, module, init=init, process_group=group, model_parallel=axes, **options)
    if checkpoints:
        module.checkpoint_activations = checkpoints
    if partitioned:
        module.saving = PartitionedActivations(axes, HostActivations(made) if partitioned == "host" else None)
    return made, tensor.VocabParallelLoss(axes)


def twelve():
    """A model whose experts two, three and four ranks divide."""
    return MoEGPT(GPTConfig(layers=2, width=16, heads=2, sequence=16), experts=12)


class OfTransformers(Decoder):
    """A model of Hugging Face's with twelve experts, of which a token takes two, one expert's product at a time."""

    window = 17

    def __init__(self, kind):
        nn.Module.__init__(self)
        transformers = importlib.import_module("transformers")
        sizes = {"hidden_size": 32, "intermediate_size": 16, "moe_intermediate_size": 16, "head_dim": 16}
        sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 256}
        sizes |= {"num_experts": 12, "num_local_experts": 12, "num_experts_per_tok": 2}
        config = getattr(transformers, f"{kind}Config")(**sizes)
        self.model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")

    def forward(self, inputs):
        return self.model(inputs).logits


@functools.cache
def data_by_expert(device, *shape):
    return init_device_mesh(device, shape, mesh_dim_names=("data", "expert"))


def expert_engine(world, engine, ranks=2, seed=0, model=twelve, checkpoints=None, optimizer=ADAMW, **options):
    """An engine around a model whose experts lie on `ranks` expert ranks; 1 does not split."""
    grid = data_by_expert(world.device.type, world.size // ranks, ranks)
    axes, module = Axes(expert=grid["expert"].get_group()), build(model)
    if axes.expert is not None:
        expert.split(module, axes)
    module.checkpoint_activations = checkpoints
    options.setdefault("init", tensor.cut_init(models.initial_values(seed), axes))
    return make_engine(engine, module, optimizer, model_parallel=axes, **options)


def train(world, made, loss_of, steps=3, ranks=2, micro_batches=1, begin=0, samples=8):
    """Train; return (loss, norm) of each step; `ranks` in a row have the same samples."""
    found = []
    batches = Batches(text(), made.module.window, samples)
    for step in range(begin, steps):
        windows = batches.of(step, world.rank // ranks, world.size // ranks).to(world.device)
        total = 0.0
        made.comm.traffic.reset()
        if made.axes.tensor:
            made.axes.tensor.traffic.reset()
        for part in windows.chunk(micro_batches):
            inputs, targets = made.module.inputs_and_targets(part)
            loss = loss_of(made(inputs), targets) / micro_batches
            made.backward(loss)
            total += loss.item()
        with made.gradients():  # a read changes nothing
            pass
        found.append((total, made.step().norm))
    return found


def untied(model):
    built = models.build(model)
    pipeline.untie(built)
    return built


def engine_of_a_stage(world, name, model="gpt-tiny", frozen=None, **options):
    """An engine around this rank's of two stages; one may be frozen."""
    grid = mesh(world.device.type, 2, world.size // 2, 1)
    axes, module = Axes(pipeline=grid["pipeline"].get_group()), untied(model)
    pipeline.keep_stage(module, axes.pipeline)
    if axes.pipeline.rank == frozen:
        module.requires_grad_(False)
    return make_engine(name, module, SGD, process_group=grid["data"].get_group(), model_parallel=axes, **options)


def train_stages(world, made, samples, steps, micro_batches=4, schedule=Schedule1F1B):
    """Train this rank's stage; return [(loss, norm) of each step], the loss on the last stage."""
    stage = pipeline.Stage(made, samples // made.world_size // micro_batches)
    runs = schedule(stage, micro_batches, pipeline.mean(models.loss, micro_batches), scale_grads=False)
    batches, found = Batches(text(), made.module.window, samples), []
    for step in range(steps):
        made.comm.traffic.reset()
        made.axes.pipeline.traffic.reset()
        windows = batches.of(step, made.rank, made.world_size).to(world.device)
        inputs, targets = made.module.inputs_and_targets(windows)
        losses = []
        runs.step(*([inputs] if stage.is_first else []), target=targets if stage.is_last else None, losses=losses)
        found.append((sum(loss.item() for loss in losses), made.step().norm))
    return found


def whole(made):
    """The weights of all parts as one state dict. A collective."""
    own, axes = made.full_state_dict(), made.axes
    everyones = axes.tensor.gather_objects(own)
    joined = {name: axes.cuts[name].join([part[name] for part in everyones]) for name in axes.cuts}
    for name in axes.whole:
        assert all(torch.equal(part[name], own[name]) for part in everyones), f"{name} drifted apart"
    return {
        name: joined.get(name, joined.get("wte.weight", value)) if name not in axes.whole else value
        for name, value in own.items()
    }


@on_one_thread
def of_split(world, engine, ranks=2, model="gpt-tiny", steps=3, micro_batches=1, **options):
    made, loss_of = split_engine(world, engine, ranks, model, **options)
    return train(world, made, loss_of, steps, ranks, micro_batches), whole(made)


@on_one_thread
def of_one(world, engine, ranks=2, model="gpt-tiny", steps=3, micro_batches=1, pieces=True, **options):
    """The same on data ranks alone: the whole model, or the pieces of `ranks` tensor ranks one after the other."""
    module = in_pieces(build(model), ranks) if pieces else build(model)
    made = make_engine(engine, module, **options)
    loss_of = loss_in_pieces if pieces else models.loss
    return train(world, made, loss_of, steps, 1, micro_batches), made.full_state_dict()
