"""Units of stage 3 and its descendants: which parameters are gathered together, and the hooks that say when.

This file finds out *that* a unit is about to run, forward or backward; the engine decides what happens then:
`before_forward`, `after_forward`, `before_backward`.

A module may ask for units of its own inside that of another: `gathered_apart`, see `make_units`.
"""

import itertools
import weakref
from collections import Counter
from operator import attrgetter

import torch
from torch import nn

from common.engine import layout
from common.engine.hooks import ModuleHook
from common.engine.mixed_precision import running_backward
from common.engine.readers import Freed, Reader, become_readable, copy_weights
from common.patches import become
from common.tensors import graph_task, inside_backward, past_subclasses, set_versions, tensors_in

# A module is gathered with the root if its parameters are this fraction of the largest unit's, or less: holding them
# costs less than a message of their own.
SMALL = 1 / 8
LISTS = (nn.ModuleList, nn.Sequential)
# Modules that read the weights of modules inside them without calling those: one unit with all that is in them.
READ_THEIR_CHILDREN = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


class Unit:
    """Parameters gathered and freed together: those of one module, except those of units inside it.

    Attributes:
        name, module: the module whose forward the unit spans.
        apart: whether it lies in a module that is `gathered_apart`; it is freed when a checkpoint has recomputed it.
        buckets: one for each kind of parameter in it.
        gathered: whether its parameters are whole on this rank, or their all-gather is in flight.
        pins: how many contexts hold it gathered.
        whole_before, shown_before: whether it was `whole` and `shown` before the first of those; it is so again after.
        depth: how many of its forwards run now; more than one if a module calls itself.
        enclosing: the units that were running when it ran, including itself.
        forward_gathers, backward_gathers: how often the forwards since the last step have to gather it, and how often
            their backwards.
        open: whether its backward has begun and not ended.
    """

    def __init__(self, name, module, buckets, apart=False):
        self.name, self.module, self.buckets, self.apart = name, module, buckets, apart
        self.pins = self.depth = 0
        self.gathered = self.open = self.whole_before = self.shown_before = False
        self.forward_gathers = self.backward_gathers = 1
        self.enclosing = weakref.WeakSet()
        for number, bucket in enumerate(buckets):
            bucket.name = (name or "the root") + (f"/{number}" if number else "")

    def beside(self, other):
        """Whether neither of them ran inside the other."""
        return other not in self.enclosing and self not in other.enclosing

    @property
    def whole(self):
        """Whether its buffer has its parameters."""
        return self.gathered and all(bucket.gathering is None for bucket in self.buckets)

    @property
    def shown(self):
        """Whether its parameters can be read: it runs, is pinned, its backward is open, or a penalty's is to come."""
        return all(map(attrgetter("values.shown"), self.buckets))

    @property
    def trainable(self):
        return [bucket for bucket in self.buckets if bucket.kind.trainable]


def make_units(model, param_groups, dtype_of, world_size, make, **own):
    """Cut a model into units, in the order of their first parameter.

    An element of an outermost ModuleList or Sequential is one unit with all that is in it. A part of it is never one:
    ranks may disagree on calling an expert, say. An element that is itself a list never runs, so its elements are taken
    instead. Every other module with parameters of its own is a unit, except small ones such as norms, which the root
    takes. A parameter shared by several modules, or of a module that stands in several places, belongs to the
    innermost module around all of them.

    If a module has the attribute `gathered_apart = True`, elements of lists inside it are units, even within another
    unit. It promises that all ranks run them, in the same order, whenever they run that unit.
    """
    homes, paths = _modules_that_gather(model), {module: path for path, module in model.named_modules()}
    sizes = Counter()
    for parameter, home in homes.items():
        sizes[home] += parameter.numel()
    largest = max(sizes.values(), default=0)
    for parameter, home in homes.items():
        in_list = any(isinstance(module, LISTS) for module in _modules_on(model, paths[home])[:-1])
        if sizes[home] <= SMALL * largest and not in_list:
            homes[parameter] = model
    members = {}  # module -> [(name, parameter)]
    for name, parameter in model.named_parameters():
        members.setdefault(homes[parameter], []).append((name, parameter))
    units = []
    for module, named in members.items():
        kinds = layout.kinds(named, param_groups, dtype_of, **own)
        runs = [make(same, kind, world_size) for kind, same in kinds.items()]
        units.append(Unit(paths[module], module, runs, any(map(_apart, _modules_on(model, paths[module])))))
    return units


def _modules_that_gather(model):
    """For each parameter the module it is gathered with: the innermost that runs and lies on every path to it."""
    common = {}  # parameter -> the modules that all paths to it have in common, from the model inwards
    for path, module in model.named_modules(remove_duplicate=False):
        candidates = _candidates(model, path)
        for parameter in module.parameters(recurse=False):
            common[parameter] = [module for module in common.get(parameter, candidates) if module in candidates]
    return {
        parameter: [module for module in shared if module is model or _runs(module)][-1]
        for parameter, shared in common.items()
    }


def _candidates(model, path):
    """The modules from the model to the one at `path`, or to the outermost list element before it.

    Inside a module that is gathered apart, the outermost list element is looked for anew.
    """
    candidates, ended, in_list = [], False, False
    for module in _modules_on(model, path):
        if _apart(module):
            ended = in_list = False
        if not ended:
            candidates.append(module)
            ended = in_list and _runs(module)
            in_list = in_list or isinstance(module, LISTS)
        if isinstance(module, READ_THEIR_CHILDREN):
            break
    return candidates


def _modules_on(model, path):
    """The modules from the model to the one at `path`, both included."""
    names = path.split(".") if path else []
    return [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]


def _apart(module):
    return getattr(module, "gathered_apart", False)


def _runs(module):
    """Whether a module has a forward: lists and dicts of modules or parameters have none."""
    return type(module).forward is not nn.Module.forward


class PrefetchOrder:
    """The order in which units were needed, recorded to prefetch the next one."""

    def __init__(self):
        self._recorded, self._position = [], 0

    def rewind(self):
        """A new forward or backward begins: keep the units that the last one visited, drop the rest."""
        del self._recorded[self._position :]
        self._position = 0

    def visit(self, unit):
        """`unit` is needed now. If another one was recorded here, the record starts anew from this unit."""
        if self.now() is unit:
            return
        if self._position == len(self._recorded) or self._recorded[self._position] is not unit:
            del self._recorded[self._position :]
            self._recorded.append(unit)
        self._position += 1

    def now(self):
        """The unit visited last; None before the first."""
        return self._recorded[self._position - 1] if self._position else None

    def ahead(self):
        """The unit that came next the last time; None if that is not known."""
        return self._recorded[self._position] if self._position < len(self._recorded) else None

    def upcoming(self, number, anew=False):
        """Up to `number` units that came next the last time; if `anew`, from the beginning."""
        begin = 0 if anew else self._position
        return self._recorded[begin : begin + number]


def watch(engine, units):
    """Call the engine's phases as the units' modules run, forward and backward, and watch modules that read weights.

    Returns a `_Watch` for each unit; its hooks work as long as the engine keeps it.
    """
    watches = {unit: _Watch(engine, unit) for unit in units}
    unit_of = {parameter: unit for unit in units for bucket in unit.buckets for parameter in bucket.members.values()}
    for bucket in (bucket for unit in units for bucket in unit.buckets):
        bucket.values.engine = weakref.ref(engine)
    for path, module in engine._module.named_modules():
        for unit in dict.fromkeys(unit_of[parameter] for parameter in module.parameters(recurse=False)):
            watches[unit].readers.append(Reader(engine, unit, path, module))
    return list(watches.values())


class _Watch:
    """The hooks of a unit's module, which find out when the unit runs."""

    def __init__(self, engine, unit):
        self.engine, self.unit, self.readers = weakref.proxy(engine), unit, []
        self.first = unit.module.register_forward_pre_hook(ModuleHook(self.before), prepend=True)
        self.last = unit.module.register_forward_hook(ModuleHook(self.after))
        engine.hooks += [self.first, self.last]

    def move_hooks(self):
        """Before a forward: move these hooks to the first and last place. Others, added since, may read the weights."""
        self.give_up()
        engine = self.engine
        if engine.state.records and not engine.accounting.backwards and not engine.backward_order.forwards:
            self.unit.forward_gathers = self.unit.backward_gathers = 0
        # torch's public API puts a hook first when it is registered, but does not keep it first.
        self.unit.module._forward_pre_hooks.move_to_end(self.first.id, last=False)
        self.unit.module._forward_hooks.move_to_end(self.last.id)

    def give_up(self):
        for reader in self.readers:
            if reader.alone:
                reader.give_up()

    def before(self, module, args):
        # In backward, checkpoints recompute forwards and stop them half way: only gathering matters there.
        if inside_backward():
            self.engine.before_recomputation(self.unit)
            return
        self.unit.depth += 1
        if self.unit.depth == 1 or not self.unit.gathered:  # an exception may have left the depth of another call
            counts = not self.unit.pins or self.unit.forward_gathers == 0  # while pinned, it is gathered once at most
            if counts and self.engine.state.records and self.engine.forward_prefetch.now() is not self.unit:
                self.unit.forward_gathers += 1
            self.engine.before_forward(self.unit)

    def after(self, module, args, output):
        unit, output = self.unit, copy_weights(self.unit, output)
        tensors, call = tensors_in(output), None
        if not inside_backward():
            unit.depth -= 1
            if unit.depth > 0:  # a module called itself: the outermost call counts
                return output
            self.engine.after_forward(unit, has_outputs=bool(tensors))
            if self.engine.state.records:
                call = self.engine.backward_order.note(unit, args, tensors)
                if call is not None and not tensors:
                    call.gathers = False  # it stays gathered: nothing shows when its backward begins
        else:
            call = self.engine.backward_order.of_run(unit)
            if unit.apart and not unit.open:  # else a checkpoint would keep all of them gathered
                self.engine.free(unit)
                unit.backward_gathers += not unit.gathered
        if torch.is_grad_enabled():
            _watch_backward(self.engine, unit, tensors, call)
        return output


def is_freed(parameter):
    """Whether a parameter's unit is freed: one number stands for all of its elements."""
    return parameter.numel() > 1 and not any(parameter.stride())


def _watch_backward(engine, unit, tensors, call):
    """Have `before_backward` called when a gradient reaches one of the tensors that a forward returned."""

    def before_backward(gradient):
        if torch.is_grad_enabled() and not unit.pins:
            raise RuntimeError(
                f"create_graph=True reads the weights of {unit.name or 'the model'!r} again when they are freed: "
                "use it, and engine.backward() of the result, within engine.gathered()"
            )
        by_autograd = running_backward.loss_scale is None  # torch.autograd.grad, not an engine's backward
        if by_autograd and engine.backward_order.is_new(graph_task()):
            engine.begin_backward()
        engine.before_backward(unit, call)

    for tensor in tensors:
        for made in (tensor, tensor._base):  # a view changed in place leaves the graph, its base does not
            if made is None or made.grad_fn is None:
                continue
            # A tensor of another unit may pass through: its gradient comes after this unit's backward.
            maker = made.grad_fn.metadata.setdefault("unit", unit)
            if unit in maker.enclosing:
                made.register_hook(before_backward)


def _add_root(engine):
    """Add a unit for the model itself, which has none so far and is running."""
    root = Unit("", engine._module, [])
    engine.units.append(root)
    engine.watches.append(_Watch(engine, root))
    root.depth, root.gathered = 1, True
    for unit in engine.units:
        unit.enclosing.add(root)
    return root


class Values:
    """Whether the values of a bucket's parameters can be read: they are shown, hidden or freed.

    Shown, a parameter is a view of the gathered run. Hidden it is too, but Python's reads of it raise: see `Freed`.
    Freed it is NaN in its shape, or zeros for integers: one number for all of its elements, so that a write reaches no
    other parameter, and if torch counts it is gone when the bucket is freed again.

    Autograd refuses a saved tensor whose version, its count of writes, is another one by now. A parameter shares its
    version with its views and detached copies. So a freed one has a version of its own, until its values are back.

    Attributes:
        gathered, freed: {name: what the parameter is}.
        numbers, written: the base of the latter, one number for each parameter; whether one may have been written.
        shown: whether they are.
        versions: those that belong to the values, which `WeightWrites.made` raises; None unless they are freed.
        marks: those while they are freed, never used before: torch's error tells no more than these.
        engine: a weak reference to the engine, once it runs.
    """

    engine, shown, versions, marks, written = None, True, None, (), True
    _marks = itertools.cycle(range(2**31, 2**32))

    def __init__(self, bucket):
        self._bucket, self.numbers = weakref.ref(bucket), bucket.full_parameters.new_empty(len(bucket.slots))
        self.gathered, slots = bucket.views(bucket.full_parameters), bucket.slots.values()
        self.freed = {slot.name: number.expand(slot.shape) for number, slot in zip(self.numbers, slots, strict=True)}

    def hide(self):
        """A parameter that is read raises, or moves to the unit that reads it."""
        if not self.shown:
            return
        self.shown, own = False, weakref.ref(self)
        hidden = {n: p for n, p in self._bucket().members.items() if type(p) is nn.Parameter}  # not users' subclasses
        become(hidden.values(), Freed)
        for name, parameter in hidden.items():
            parameter.freed_name, parameter.freed_values = name, own

    @past_subclasses
    def free(self):
        """The gathered run is freed: hide the parameters from the graph, too."""
        self.hide()
        bucket = self._bucket()
        if not bucket.full_parameters.untyped_storage().resizable():
            self.leave()  # to an array, as numpy() makes one
        if self.versions is None:
            bucket.note_strays()
            self.versions, self.marks = bucket.versions, [next(self._marks) for _ in bucket.members]
            set_versions(bucket.members.values(), self.marks)
            if self.written:
                self.numbers.fill_(float("nan") if self.numbers.is_floating_point() else 0)
            for name, parameter in bucket.members.items():
                parameter.data = self.freed[name]

    @past_subclasses
    def leave(self):
        """Leave the memory, with its values, to others that share it, such as an array; take other memory."""
        bucket = self._bucket()
        bucket.full_parameters = bucket.full_parameters.clone()
        self.gathered = bucket.views(bucket.full_parameters)
        for name, parameter in bucket.members.items() if self.versions is None else ():
            parameter.data = self.gathered[name]
        bucket.note_storages()

    @past_subclasses
    def show(self):
        """The run has been gathered, or is so still."""
        bucket = self._bucket()
        if not self.shown:
            bucket.note_strays()
            for name, parameter in bucket.members.items():
                parameter.data = self.gathered[name]
            become_readable(bucket.members.values())
            if self.versions is not None:
                self.written = [parameter._version for parameter in bucket.members.values()] != self.marks
                set_versions(bucket.members.values(), self.versions)
            self.shown, self.versions = True, None

    def move(self):
        """Move the bucket to the unit that reads its weights while its own does not run, as T5's head the embedding's.

        The running unit takes it, and gathers it from then on, if it is around the bucket's own; else the root takes
        it, as with weights that two units share. All ranks read it at the same place of a forward. Returns whether it
        was moved, and can be read now.
        """
        engine, bucket = self.engine(), self._bucket()
        running = [unit for unit in engine.units if unit.depth]
        if inside_backward() or not (running or engine.state.inside):
            return False
        first, reader = bucket.unit, max(running, key=lambda unit: len(unit.name), default=None)
        if reader is None or first.module not in reader.module.modules():
            reader = next((unit for unit in engine.units if unit.module is engine._module), None) or _add_root(engine)
        if reader is first:
            return False
        watch_of = dict(zip(engine.units, engine.watches, strict=True))
        for of_module in watch_of[first].readers:
            if not set(bucket.members.values()).isdisjoint(of_module.module.parameters(recurse=False)):
                of_module.look_after(reader)
        first.buckets.remove(bucket)
        bucket.unit, alone = reader, Unit(f"{reader.name or 'the root'}/{bucket.name}", reader.module, [bucket])
        alone.gathered = first.gathered
        engine.unshard(alone, PrefetchOrder())
        reader.buckets.append(bucket)
        return True
