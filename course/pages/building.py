"""Is a student's class the stage's engine, bit for bit?

A class of a cell is trained beside the stage's own engine, on every rank. If the two part, `check` says at which
weight, and which idea to think about, by the sentences of building.toml.
"""

import inspect
import re
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import pad

from common import models
from common.loop import train_step as train
from common.measure.memory import storage_id
from common.ranks.world import RankFailed
from course.pages.ranks import progress
from course.pages.recording import KINDS, MODEL, batch, build, reference_of, stepped_by, train_step

STEPS = 3  # of a check
SENTENCES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


class Mistake(Exception):
    """Ends a step on all ranks. The message says what is wrong, and names the idea."""


@dataclass(frozen=True)
class Page:
    """What is expected of a stage's class.

    Each group of parameters lies in one flat tensor, padded to N shards of a multiple of 32 elements, and the optimizer
    steps a shard of each.
    """

    cut: object  # from a model to groups of its parameters
    sharded: tuple  # of which kinds of model states a rank keeps a shard
    whole_at_once: tuple = ()  # of which kinds at most the shards and one whole group may be live at once


def by_layer(model):
    """First what is in no block, then a group for each block."""
    layers = [list(block.parameters()) for block in model.blocks]
    inside = {p for layer in layers for p in layer}
    return [[p for p in model.parameters() if p not in inside], *layers]


PAGES = {
    "stage1_os": Page(lambda model: [list(model.parameters())], KINDS[2:]),
    "stage2_grad": Page(lambda model: [[p] for p in model.parameters()], KINDS[1:], whole_at_once=("gradients",)),
    "stage3_param": Page(by_layer, KINDS, whole_at_once=("gradients", "gathered units")),
}


# ---- on each rank: beside the stage's engine --------------------------------------------------------------------


def flat(tensors, world_size):
    """Some tensors as one [numel], padded with zeros to `world_size` shards of a multiple of 32."""
    joined = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return pad(joined, (0, -joined.numel() % (32 * world_size)))


class Comparison:
    """A class of a cell and the stage's engine on one rank, compared step by step.

    A plain model goes along: it has the weights that are right, and tells which gradients are.
    """

    def __init__(self, world, make, stage):
        self.world, self.page = world, PAGES[stage]
        self.reference = reference_of(stage)
        self.plain = models.build(MODEL)
        models.materialize(self.plain, models.initial_values(0), world.device)
        self.elements = [len(flat(group, world.size)) for group in self.page.cut(self.plain)]
        self.engine, self.module = build(world, make)
        self.last = [None] * len(self.elements)  # means of the step before

    def compare(self):
        """Train, and raise `Mistake` on every rank for the first fault."""
        self._agree(self._fault_of_what_is_stepped() or self._fault_of_views())
        watch(self.engine, self.module)
        for step in progress(range(STEPS)):
            self._compare_step(step)

    def _agree(self, fault, step=None):
        """Raise `Mistake` on all ranks if one has found a fault."""
        for rank, said in enumerate(self.reference.comm.gather_objects(fault)):
            if said:
                raise Mistake(("" if step is None else f"in step {step + 1}, ") + f"on rank {rank}: {said}")

    def _compare_step(self, step):
        before = {name: weight.clone() for name, weight in self.plain.state_dict().items()}
        mean, own = self._gradients(step)

        def before_update(held):
            faults = [self._fault_of_bytes(held.bytes(), first=step == 0)]
            faults += map(self._fault_of_gradient, stepped_by(self.engine), mean, own, self.last)
            self._agree(next(filter(None, faults), None), step)

        recording = train_step(self.world, self.engine, self.module, step, before_update=before_update)
        train(self.reference, [batch(self.world, self.plain, step)])
        self.plain.load_state_dict(self.reference.full_state_dict())
        self.last = mean
        self._agree(self._fault_of_weights(before) or self._fault_of_peak(recording), step)

    def _fault_of_what_is_stepped(self):
        steps, own = [p.numel() for p in stepped_by(self.engine)], [n // self.world.size for n in self.elements]
        if steps != own:
            return SENTENCES["stepped"].format(stepped=sum(steps), own=sum(own))
        return None

    def _fault_of_views(self):
        units = getattr(self.engine, "units", None)
        if units is not None:
            return next(filter(None, map(fault_of_unit, units)), None)
        if not storages(stepped_by(self.engine)) <= storages(self.module.parameters()):
            return SENTENCES["copy"]
        return None

    def _gradients(self, step):
        """This rank's shards of the mean over ranks, and of its own gradients, from a plain model: two lists [n]."""
        inputs, targets = batch(self.world, self.plain, step)
        parameters = list(self.plain.parameters())
        values = torch.autograd.grad(models.loss(self.plain(inputs), targets), parameters)
        gradients = dict(zip(parameters, values, strict=True))
        local = [flat([gradients[p] for p in group], self.world.size) for group in self.page.cut(self.plain)]
        everyone = self.reference.comm.gather_objects([part.cpu() for part in local])
        means = [sum(parts) / self.world.size for parts in zip(*everyone, strict=True)]  # in rank order
        return [[self._mine(part.to(self.world.device)) for part in parts] for parts in (means, local)]

    def _mine(self, tensor):
        return tensor.chunk(self.world.size)[self.world.rank]

    def formula(self, first=False):
        """Bytes of each kind of model state by the formula; a first step begins without optimizer states."""
        shares = {kind: self.world.size if kind in self.page.sharded else 1 for kind in KINDS}
        sizes = {"parameters": 4, "gradients": 4, "optimizer states": 0 if first else 8}
        return {kind: sizes[kind] * sum(self.elements) // shares[kind] for kind in KINDS}

    def _fault_of_bytes(self, held, first):
        for kind, formula in self.formula(first).items():
            if held[kind] != formula:
                idea = "what may be given back, and when" if held[kind] > formula else SENTENCES[kind]
                return SENTENCES["held"].format(held=held[kind], kind=kind, formula=formula, idea=idea)
        return None

    def _fault_of_gradient(self, shard, mean, own, last):
        gradient = shard.grad
        if gradient is None:
            return SENTENCES["no gradient"]
        if torch.equal(gradient, mean):
            return None
        if torch.equal(gradient, own):
            return SENTENCES["not reduced"]
        known = {"order": mean, "sum, not mean": self.world.size * mean}
        known |= {} if last is None else {"old gradient": mean + last}
        near = [idea for idea, other in known.items() if torch.allclose(gradient, other, rtol=1e-4, atol=1e-7)]
        return SENTENCES[next(iter(near), "no mean")].format(size=self.world.size)

    def _fault_of_peak(self, recording):
        for name in self.page.whole_at_once:
            shards = sum(self.elements) // self.world.size if name == "gradients" else self.elements[0]
            others = self.elements if name == "gradients" else self.elements[1:]
            most, bound = recording.peak_of(name), 4 * (shards + max(others))
            if most > bound:
                return SENTENCES["peak"].format(most=most, kind=name, bound=bound)
        return None

    def _fault_of_weights(self, before):
        ours, truth = self._weights(), self.plain.state_dict()
        for name, right in truth.items():
            wrong = (ours[name] != right).nonzero()
            if len(wrong):
                at, idea = tuple(wrong[0].tolist()), SENTENCES[self._idea(ours, before)]
                return SENTENCES["weight"].format(
                    name=name, place=list(at), found=ours[name][at], right=right[at], idea=idea
                )
        return None

    def _idea(self, ours, before):
        whole = getattr(self.engine, "parameters", None)
        if torch.is_tensor(whole) and storage_id(whole) not in storages(self.module.parameters()):
            return "a new tensor"
        if all(torch.equal(ours[name], before[name]) for name in before):
            return "not stepped"
        names = {p: name for name, p in self.plain.named_parameters()}
        for group in self.page.cut(self.plain):
            mine = flat([ours[names[p]] for p in group], self.world.size)
            if not torch.equal(self._mine(mine), self._mine(flat(group, self.world.size))):
                return "own shard"
        return "not gathered"

    def _weights(self):
        for unit in getattr(self.engine, "units", []):
            unit.gather()
        weights = {name: weight.clone() for name, weight in self.module.state_dict().items()}
        for unit in getattr(self.engine, "units", []):
            unit.free()
        return weights


def storages(tensors):
    return set(map(storage_id, tensors))


def fault_of_unit(unit):
    """A sentence if a unit's parameters are no longer views of its flat tensor; else None."""
    whole = getattr(unit, "whole", None)
    if torch.is_tensor(whole) and len(whole) and storages(unit.parameters) == storages([whole]):
        return None
    return SENTENCES["not whole"]


def watch(engine, module):
    """Raise `Mistake` if a unit is about to be read without its weights, which would end the process."""
    root, *units = getattr(engine, "units", None) or [None]
    if root is not None:
        module.register_forward_pre_hook(partial(_must_be_whole, root, "the model begins its forward"))
    for (name, layer), unit in zip(module.blocks.named_children(), units, strict=False):
        layer.register_forward_pre_hook(partial(_must_be_whole, unit, f"blocks.{name} begins its forward"))
        layer.register_full_backward_pre_hook(partial(_must_be_whole, unit, f"blocks.{name} begins its backward"))
        for p in layer.parameters():
            p.register_post_accumulate_grad_hook(partial(_must_wait, unit, f"blocks.{name}"))


def _must_be_whole(unit, moment, *_):
    if fault := fault_of_unit(unit):
        raise Mistake(f"{moment}, and {fault}")
    if unit.whole.untyped_storage().nbytes() == 0:
        raise Mistake(SENTENCES["not there"].format(moment=moment))


def _must_wait(unit, name, _):
    if unit.whole.untyped_storage().nbytes() == 0 and unit.shard.grad is None:
        raise Mistake(SENTENCES["freed too early"].format(name=name))


def compare(world, make, stage):
    """Train a class of a cell beside the stage's engine.

    Returned are the first fault, a sentence or None; the number of weights; the bytes of model states by the formula.
    """
    comparison, fault = Comparison(world, make, stage), None
    try:
        comparison.compare()
    except Mistake as mistake:
        fault = str(mistake)
    return fault, models.count(comparison.plain), sum(comparison.formula().values())


# ---- in the notebook ------------------------------------------------------------------------------------------


def check(ranks, make, stage, *parts):
    """Print whether a class, `make`, is the stage's engine, bit for bit, or the idea to think about; return whether.

    `ranks` are a `Ranks`, whose timeout ends a class that hangs; `parts` are functions and classes of other cells that
    it is made of, and that have marked lines too.
    """
    still_open = open_lines(*parts, make)
    if still_open:
        which = "YOUR LINE ({}) is" if len(still_open) == 1 else "YOUR LINES {} are"
        print("not solved yet:", which.format(", ".join(map(str, still_open))), "still open")
        return False
    try:
        fault, numel, held = ranks.run(compare, make, stage)[0]
    except RankFailed as failure:
        fault = _what_happened(str(failure), [name for part in (make, *parts) for name in vars(part)])
    if fault:
        print(f"not yet: {fault}.")
        return False
    print(
        f"solved: all {numel:,} weights are equal to {stage}'s, bit for bit, after each of {STEPS} steps, on every "
        f"rank; held {held:,} bytes = the formula"
    )
    return True


def open_lines(*parts):
    """Numbers of the marked lines that still have three dots, in functions and classes of cells."""
    functions = [f for part in parts for f in (vars(part).values() if inspect.isclass(part) else [part])]
    sources = [inspect.getsource(f) for f in functions if inspect.isfunction(f)]
    return sorted(int(n) for source in sources for n in re.findall(r"\.\.\. *# YOUR LINE \((\d+)\)", source))


def _what_happened(message, methods):
    """A sentence from the message of a RankFailed. `methods` are the names of the student's methods."""
    for said, sentence in (("no answer", "hang"), ("died", "died")):
        if said in message:
            return SENTENCES[sentence].format(message=message)
    within = [name for name in re.findall(r"line \d+, in (\w+)", message) if name in methods]
    where = f"in {within[-1]} " if within else ""
    if "out of bounds for storage of size" in message:
        return SENTENCES["no memory"].format(where=where)
    return where + f"a rank raised {message.strip().splitlines()[-1].rstrip('.')}"
