"""Units of stage 3 and its descendants: which parameters are gathered together, and the hooks that say when.

This file finds out *that* a unit is about to run, forward or backward; what happens then is the engine's:
`before_forward`, `after_forward`, `before_backward`. The engine calls nothing here but `Order`.
"""

import copy
import dataclasses
import itertools
from collections import Counter

import torch
from torch import nn

from common import layout

# A module whose parameters are this part of the largest unit's, or less, is gathered with the root: a message of its
# own costs more than to hold it.
SMALL = 1 / 8
LISTS = (nn.ModuleList, nn.Sequential)
# Modules that read the weights of others inside them without calling those: a unit with all that is in it.
READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Unit:
    """Parameters gathered and freed together: those of one module, less what belongs to units inside it.

    Attributes:
        name, module: the module whose forward the unit spans.
        buckets: one run for each kind of parameter in it.
        gathered: its parameters are whole on this rank, or on their way.
        pins: contexts that hold it gathered.
        depth: its forwards that run now; more than one where a module calls itself.
        inside: the units that were running when it ran, itself among them.
        reached: gradients reach what its last recorded forward returned.
        visits: forwards that have not met their backward yet.
        open: its backward has begun and not ended.
    """

    def __init__(self, name, module, buckets):
        self.name, self.module, self.buckets = name, module, buckets
        self.pins = self.depth = self.visits = 0
        self.gathered = self.open = False
        self.reached = True
        self.inside = set()
        for number, bucket in enumerate(buckets):
            bucket.name = (name or "the root") + (f"/{number}" if number else "")

    @property
    def trainable(self):
        """Its buckets that get gradients."""
        return [bucket for bucket in self.buckets if bucket.kind.trainable]


def make_units(model, param_groups, dtype, world_size, make):
    """Cut a model into units, in the order of their first parameter.

    An element of an outermost ModuleList or Sequential is one unit with all that is in it; never a part of it, an
    expert, say, whose ranks may disagree on calling it. An element that is itself a list never runs, so its elements
    are taken instead. Every other module with parameters of its own is a unit, but for small ones, which the root
    takes: a norm, say. A parameter that several modules use belongs to their lowest common ancestor.
    """
    homes = _homes(model)
    sizes = Counter()
    for parameter, home in homes.items():
        sizes[home] += parameter.numel()
    largest = max(sizes.values(), default=0)
    for parameter, home in homes.items():
        if sizes[home] <= SMALL * largest and not _in_list(model, home):
            homes[parameter] = ""
    members = {}  # path of the unit's module -> [(name, parameter)]
    for name, parameter in model.named_parameters():
        members.setdefault(homes[parameter], []).append((name, parameter))
    units = []
    for path, named in members.items():
        runs = [make(same, kind, world_size) for kind, same in layout.kinds(named, param_groups, dtype).items()]
        units.append(Unit(path, model.get_submodule(path), runs))
    return units


def _homes(model):
    """For each parameter the path of the module it is gathered with."""
    homes, first_path = {}, {}  # a module that stands in several places goes by its first path
    for path, module in model.named_modules(remove_duplicate=False):
        home = _outermost_element(model, path)
        home = first_path.setdefault(model.get_submodule(home), home)
        for parameter in module.parameters(recurse=False):
            homes[parameter] = _common_ancestor(homes.get(parameter, home), home)
    return {parameter: _nearest_that_runs(model, path) for parameter, path in homes.items()}


def _outermost_element(model, path):
    """The path of the outermost list element that `path` lies in, or `path` itself."""
    parts = path.split(".") if path else []
    in_list = False
    for depth in range(len(parts) + 1):
        outer = ".".join(parts[:depth])
        module = model.get_submodule(outer)
        if (in_list and _runs(module)) or isinstance(module, READ_THEIR_CHILDREN):
            return outer
        in_list = in_list or isinstance(module, LISTS)
    return path


def _in_list(model, path):
    """Whether `path` lies in a ModuleList or Sequential."""
    parts = path.split(".")
    around = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
    return any(isinstance(module, LISTS) for module in around)


def _common_ancestor(one, other):
    if one == other:
        return one
    pairs = zip(one.split("."), other.split("."), strict=False)
    return ".".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _nearest_that_runs(model, path):
    """Where `path` never runs, the module that holds it."""
    while path and not _runs(model.get_submodule(path)):
        path = path.rpartition(".")[0]
    return path


def _runs(module):
    """Whether a module has a forward: lists and dicts of modules or parameters have none."""
    return type(module).forward is not nn.Module.forward


class Order:
    """The order in which units were needed, recorded as it happens and used to look one unit ahead."""

    def __init__(self):
        self._recorded, self._position = [], 0

    def rewind(self):
        """A new forward or backward begins: keep what the last one did, drop what it did not come to."""
        del self._recorded[self._position :]
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
        _watch_forward(engine, unit)


def _watch_forward(engine, unit):
    def before(module, args):
        # In backward, checkpoints run forwards again and stop them half way: there only the gathering matters.
        if inside_backward():
            engine.before_recomputation(unit)
            return
        unit.depth += 1
        if unit.depth == 1:
            engine.before_forward(unit)

    def after(module, args, output):
        output = _copy_weights(unit, output)
        tensors = _tensors_in(output)
        if not inside_backward():
            unit.depth -= 1
            if unit.depth > 0:  # a module called itself: the outermost call counts
                return output
            engine.after_forward(unit, traced=bool(tensors))
        if torch.is_grad_enabled():
            unit.reached = any(tensor.requires_grad for tensor in tensors)
            _watch_backward(engine, unit, tensors)
        return output

    unit.module.register_forward_pre_hook(before, prepend=True)  # other hooks may read the weights
    unit.module.register_forward_hook(after)


def _watch_backward(engine, unit, tensors):
    """Have `before_backward` called when a gradient reaches one of the tensors that a forward returned."""
    met = False

    def before_backward(gradient):
        nonlocal met
        engine.before_backward(unit, first=not met)
        met = True

    for tensor in tensors:
        for made in (tensor, tensor._base):  # who changes a view in place takes it out of the graph, not its base
            if made is None or made.grad_fn is None:
                continue
            # Another unit's tensor may pass through this one: its gradient comes when this one's backward is over.
            maker = made.grad_fn.metadata.setdefault("unit", unit)
            if unit in maker.inside:
                made.register_hook(before_backward)


def _copy_weights(unit, output):
    """`output`, with copies for the unit's own weights: those are freed while the caller may still read them."""
    own = {bucket.full.untyped_storage()._cdata for bucket in unit.buckets}

    def copied(tensor):
        if tensor.layout is torch.strided and tensor.untyped_storage()._cdata in own:  # sparse ones have no storage
            return tensor.clone()
        return tensor

    returns_weights = any(copied(tensor) is not tensor for tensor in _tensors_in(output))
    return map_tensors(copied, output) if returns_weights else output


def _tensors_in(value):
    found = []

    def note(tensor):
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def map_tensors(function, value):
    """Apply `function` to every tensor in nested tuples, lists, dicts and dataclasses; return the same structure."""
    if torch.is_tensor(value):
        return function(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a namedtuple
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    if isinstance(value, dict):
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = map_tensors(function, item)
        return mapped
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        mapped = copy.copy(value)
        for field in dataclasses.fields(value):
            # Past __setattr__, which a frozen dataclass refuses.
            object.__setattr__(mapped, field.name, map_tensors(function, getattr(value, field.name)))
        return mapped
    return value


def inside_backward():
    """Whether autograd is running a backward in this thread. torch has no public way to ask."""
    return torch._C._current_graph_task_id() != -1
