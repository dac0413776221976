"""Units of stage 3 and its descendants: which parameters are gathered together, and the hooks that say when.

This file finds out *that* a unit is about to run, forward or backward; what happens then is the engine's:
`before_forward`, `after_forward`, `before_backward`. The engine calls nothing here but `Order`.
"""

import dataclasses
import itertools

import torch
from torch import nn

from common import layout


class Unit:
    """Parameters gathered and freed together: those of one module, less what belongs to units inside it.

    Attributes:
        name, module: the module whose forward the unit spans.
        buckets: one run for each kind of parameter in it.
        encloses: the units whose modules lie inside this one's.
        visits: forwards that have not met their backward yet.
        open: its backward has begun and not ended.
        pins: contexts that hold it gathered.
    """

    def __init__(self, name, module, buckets):
        self.name, self.module, self.buckets = name, module, buckets
        self.encloses = set()
        self.visits = self.pins = self.depth = 0
        self.open = self.gathered = False

    @property
    def trainable(self):
        """Its buckets that get gradients."""
        return [bucket for bucket in self.buckets if bucket.kind.trainable]


def make_units(model, param_groups, world_size, make):
    """Cut a model into units, in the order of their first parameter.

    An element of an outermost ModuleList or Sequential is one unit with all that is in it; never a part of it, an
    expert, say, whose ranks may disagree on calling it. Every other module with parameters of its own is a unit.
    A parameter that several modules use belongs to their lowest common ancestor.
    """
    homes = _homes(model)
    members = {}  # path of the unit's module -> [(name, parameter)]
    for name, parameter in model.named_parameters():
        members.setdefault(homes[parameter], []).append((name, parameter))
    units = []
    for path, named in members.items():
        runs = [make(same, kind, world_size) for kind, same in layout.kinds(named, param_groups).items()]
        units.append(Unit(path, model.get_submodule(path), runs))
    for outer, inner in itertools.permutations(units, 2):
        if outer.name == "" or inner.name.startswith(outer.name + "."):
            outer.encloses.add(inner)
    return units


def _homes(model):
    """For each parameter the path of the module it is gathered with."""
    homes = {}
    for path, module in model.named_modules(remove_duplicate=False):
        home = _outermost_element(model, path)
        for parameter in module.parameters(recurse=False):
            homes[parameter] = _common_ancestor(homes.get(parameter, home), home)
    return {parameter: _nearest_with_forward(model, path) for parameter, path in homes.items()}


def _outermost_element(model, path):
    """The path of the outermost list element that `path` lies in, or `path` itself."""
    parts = path.split(".") if path else []
    for depth in range(len(parts)):
        if isinstance(model.get_submodule(".".join(parts[:depth])), (nn.ModuleList, nn.Sequential)):
            return ".".join(parts[: depth + 1])
    return path


def _common_ancestor(one, other):
    if one == other:
        return one
    pairs = zip(one.split("."), other.split("."), strict=False)
    return ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _nearest_with_forward(model, path):
    """A ModuleList or a ParameterList never runs; the module that holds it does."""
    while path and type(model.get_submodule(path)).forward is nn.Module.forward:
        path = path.rpartition(".")[0]
    return path


class Order:
    """The order in which units were needed, recorded as it happens and used to look one unit ahead."""

    def __init__(self):
        self._recorded, self._position = [], 0

    def rewind(self):
        """A new forward or backward begins."""
        self._position = 0

    def visit(self, unit):
        """`unit` is needed now. Where that is not what was recorded, what follows is recorded anew."""
        if self._position and self._recorded[self._position - 1] is unit:
            return
        if self._position == len(self._recorded) or self._recorded[self._position] is not unit:
            del self._recorded[self._position :]
            self._recorded.append(unit)
        self._position += 1

    def ahead(self):
        """The unit that came next the last time; None where that is not known."""
        return self._recorded[self._position] if self._position < len(self._recorded) else None


def watch(engine, units):
    """Call the engine's phases as the units' modules run, forward and backward."""
    for unit in units:
        _watch(engine, unit)


def _watch(engine, unit):
    def before(module, args):
        # A module may call itself: the outermost call counts. In backward, checkpoints run forwards again, and
        # stop them half way: there only the gathering matters.
        if inside_backward():
            engine.before_recomputation(unit)
            return
        unit.depth += 1
        if unit.depth == 1:
            engine.before_forward(unit)

    def after(module, args, output):
        met = False

        def before_backward(gradient):
            nonlocal met
            engine.before_backward(unit, first=not met)
            met = True

        def hook(tensor):
            if tensor.requires_grad:
                tensor.register_hook(before_backward)
            return tensor

        map_tensors(hook, output)
        if inside_backward():
            return
        unit.depth -= 1
        if unit.depth == 0:
            engine.after_forward(unit)

    unit.module.register_forward_pre_hook(before)
    unit.module.register_forward_hook(after)


def map_tensors(function, value):
    """Apply `function` to every tensor in nested tuples, lists, dicts and dataclasses; return the same structure."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        return {key: map_tensors(function, item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: map_tensors(function, getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value


def inside_backward():
    """Whether autograd is running a backward in this thread. torch has no public way to ask."""
    return torch._C._current_graph_task_id() != -1
