"""Units of stage 3 and its descendants: which parameters are gathered together, and the hooks that say when.

This file finds out *that* a unit is about to run, forward or backward; what happens then is the engine's:
`before_forward`, `after_forward`, `before_backward`. The engine calls nothing here but `Order`.

A module may ask for units of its own inside that of another: `gathered_apart`, see `make_units`.
"""

import weakref
from collections import Counter

import torch
from torch import nn

from common.engine import layout
from common.engine.hooks import Guard, Hook
from common.errors import InputError
from common.measure.memory import storage_id
from common.tensors import inside_backward, map_tensors, own_parameters, tensors_in, unwrapped

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
        apart: it lies in a module that is `gathered_apart`, and is freed when a checkpoint has run it again.
        buckets: one run for each kind of parameter in it.
        gathered: its parameters are whole on this rank, or on their way.
        pins: contexts that hold it gathered; found_whole: as the first of them found it.
        depth: its forwards that run now; more than one where a module calls itself.
        inside: the units that were running when it ran, itself among them.
        forward_gathers, backward_gathers: how often the forwards since the last step have to gather it, and how often
            their backwards.
        open: its backward has begun and not ended.
    """

    def __init__(self, name, module, buckets, apart=False):
        self.name, self.module, self.buckets, self.apart = name, module, buckets, apart
        self.pins = self.depth = 0
        self.gathered = self.open = self.found_whole = False
        self.forward_gathers = self.backward_gathers = 1
        self.inside = weakref.WeakSet()
        for number, bucket in enumerate(buckets):
            bucket.name = (name or "the root") + (f"/{number}" if number else "")

    def beside(self, other):
        """Neither of them ran inside the other."""
        return other not in self.inside and self not in other.inside

    @property
    def whole(self):
        """Its parameters can be read."""
        return self.gathered and all(bucket.gathering is None for bucket in self.buckets)

    @property
    def trainable(self):
        """Its buckets that get gradients."""
        return [bucket for bucket in self.buckets if bucket.kind.trainable]


def make_units(model, param_groups, dtype_of, world_size, make):
    """Cut a model into units, in the order of their first parameter.

    An element of an outermost ModuleList or Sequential is one unit with all that is in it; never a part of it, an
    expert, say, whose ranks may disagree on calling it. An element that is itself a list never runs, so its elements
    are taken instead. Every other module with parameters of its own is a unit, but for small ones, which the root
    takes: a norm, say. A parameter that several modules use, or that one uses which stands in several places, belongs
    to the innermost module that holds all of those.

    Where a module has the attribute `gathered_apart = True`, elements of lists inside it are units wherever it stands,
    within another unit too. It promises that all ranks run them, in the same order, whenever they run that unit.
    """
    homes, paths = _homes(model), {module: path for path, module in model.named_modules()}
    sizes = Counter()
    for parameter, home in homes.items():
        sizes[home] += parameter.numel()
    largest = max(sizes.values(), default=0)
    for parameter, home in homes.items():
        if sizes[home] <= SMALL * largest and not _in_list(model, paths[home]):
            homes[parameter] = model
    members = {}  # module -> [(name, parameter)]
    for name, parameter in model.named_parameters():
        members.setdefault(homes[parameter], []).append((name, parameter))
    units = []
    for module, named in members.items():
        runs = [make(same, kind, world_size) for kind, same in layout.kinds(named, param_groups, dtype_of).items()]
        units.append(Unit(paths[module], module, runs, any(map(_apart, _stops(model, paths[module])))))
    return units


def _homes(model):
    """For each parameter the module it is gathered with: the innermost that runs and lies on every road to it."""
    common = {}  # parameter -> the modules that all roads to it have in common, from the model inwards
    for path, module in model.named_modules(remove_duplicate=False):
        road = _road(model, path)
        for parameter in module.parameters(recurse=False):
            common[parameter] = [stop for stop in common.get(parameter, road) if stop in road]
    return {
        parameter: [stop for stop in stops if stop is model or _runs(stop)][-1] for parameter, stops in common.items()
    }


def _road(model, path):
    """The modules from the model to that at `path`, or to the outermost list element on the way there.

    A module that is gathered apart begins the way anew.
    """
    road, ended, in_list = [], False, False
    for module in _stops(model, path):
        if _apart(module):
            ended = in_list = False
        if not ended:
            road.append(module)
            ended = in_list and _runs(module)
            in_list = in_list or isinstance(module, LISTS)
        if isinstance(module, READ_THEIR_CHILDREN):
            break
    return road


def _in_list(model, path):
    """Whether `path` lies in a ModuleList or Sequential."""
    return any(isinstance(module, LISTS) for module in _stops(model, path)[:-1])


def _stops(model, path):
    """The modules on the way from the model to that at `path`, both among them."""
    names = path.split(".") if path else []
    return [model.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]


def _apart(module):
    return getattr(module, "gathered_apart", False)


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
        if self.now() is unit:
            return
        if self._position == len(self._recorded) or self._recorded[self._position] is not unit:
            del self._recorded[self._position :]
            self._recorded.append(unit)
        self._position += 1

    def now(self):
        """The unit that was needed last; None before the first."""
        return self._recorded[self._position - 1] if self._position else None

    def ahead(self):
        """The unit that came next the last time; None where that is not known."""
        return self._recorded[self._position] if self._position < len(self._recorded) else None

    def upcoming(self, number, anew=False):
        """Up to so many units as they came next the last time; `anew` from the beginning."""
        begin = 0 if anew else self._position
        return self._recorded[begin : begin + number]


def watch(engine, units):
    """Call the engine's phases as the units' modules run, forward and backward. Look after who reads their weights.

    Returns:
        A `_Watch` for each unit, which the hooks call as long as the engine keeps it.
    """
    watches = {unit: _Watch(engine, unit) for unit in units}
    unit_of = {parameter: unit for unit in units for bucket in unit.buckets for parameter in bucket.members.values()}
    weakref.finalize(engine, _leave_hollow, weakref.ref(engine._module)).atexit = False
    for path, module in engine._module.named_modules():
        for unit in dict.fromkeys(unit_of[parameter] for parameter in module.parameters(recurse=False)):
            watches[unit].readers.append(_Reader(engine, unit, path, module))
    return list(watches.values())


class _Watch:
    """Finds out when a unit runs: the hooks of its module."""

    def __init__(self, engine, unit):
        self.engine, self.unit, self.readers = weakref.proxy(engine), unit, []
        self.first = unit.module.register_forward_pre_hook(Hook(self.before), prepend=True)
        self.last = unit.module.register_forward_hook(Hook(self.after))
        engine.handles += [self.first, self.last]

    def settle(self):
        """Before a forward: end what an interrupt left, and surround the hooks that others have added since."""
        for reader in self.readers:
            reader.give_up()
        if self.engine.recording and not self.engine.accounts.backwards and not self.engine.turns.forwards:
            self.unit.forward_gathers = self.unit.backward_gathers = 0
        self.surround()

    def surround(self):
        """Be the first and the last of the module's hooks: others may read the weights.

        torch has a public way to be the first when a hook is registered, and none to stay it.
        """
        self.unit.module._forward_pre_hooks.move_to_end(self.first.id, last=False)
        self.unit.module._forward_hooks.move_to_end(self.last.id)

    def before(self, module, args):
        # In backward, checkpoints run forwards again and stop them half way: there only the gathering matters.
        if inside_backward():
            self.engine.before_recomputation(self.unit)
            return
        self.unit.depth += 1
        if self.unit.depth == 1 or not self.unit.gathered:  # an exception may have left the depth of another call
            if self.engine.recording and self.engine.forward_order.now() is not self.unit:
                self.unit.forward_gathers += not (self.unit.pins and self.unit.forward_gathers)
            self.engine.before_forward(self.unit)

    def after(self, module, args, output):
        unit, output = self.unit, _copy_weights(self.unit, output)
        turn = self.engine.turns.next_of(unit)
        tensors = tensors_in(output)
        if not inside_backward():
            unit.depth -= 1
            if unit.depth > 0:  # a module called itself: the outermost call counts
                return output
            self.engine.after_forward(unit, traced=bool(tensors))
            if self.engine.recording:
                turn = self.engine.turns.note(unit, args, tensors)
                if turn is not None and not tensors:
                    turn.gathers = False  # nothing shows when its backward begins, so that it stays until then
        elif unit.apart and not unit.open:  # else a checkpoint that runs it again would gather all of its kind
            self.engine.free(unit)
            unit.backward_gathers += not unit.gathered
        if torch.is_grad_enabled():
            _watch_backward(self.engine, unit, tensors, turn)
        return output


class _Reader:
    """Looks after a module that reads weights of a unit at times when the unit does not run.

    The module may run alone, inside generate() for instance: then the unit is held as long as it does. Its state_dict
    may be asked for, or a copy of it: then the unit must be whole already, and the state_dict holds copies.
    """

    def __init__(self, engine, unit, path, module):
        self.engine, self.unit, self.path = weakref.proxy(engine), unit, path
        self.alone = 0  # its runs now, since the unit is held for them
        engine.handles.append(module.register_state_dict_pre_hook(Guard(self.before_state_dict)))
        engine.handles.append(module.register_state_dict_post_hook(Hook(self.after_state_dict)))
        if module is not unit.module:
            engine.handles.append(module.register_forward_pre_hook(Hook(self.before), prepend=True))
            engine.handles.append(module.register_forward_hook(Hook(self.after), always_call=True))

    def before(self, module, args):
        if self.alone:  # it calls itself
            self.alone += 1
        elif not (self.unit.whole and (self.unit.depth or self.unit.pins or inside_backward())):
            if torch.is_grad_enabled() and any(t.requires_grad for t in [*module.parameters(), *tensors_in(args)]):
                raise RuntimeError(
                    f"{self.path!r} runs outside the forward of {self.unit.name or 'the model'!r}, to which its "
                    "parameters belong, and backward would miss them: call that module, use torch.no_grad(), or hold "
                    "it by engine.gathered() until backward ends"
                )
            self.engine.hold(self.unit)
            self.alone = 1

    def after(self, module, args, output):
        if self.alone:
            self.alone -= 1
            output = _copy_weights(self.unit, output)
            if self.alone == 0:
                self.engine.release(self.unit)
        return output

    def give_up(self):
        """Release what a run holds that never ended: Ctrl-C passes by hooks."""
        if self.alone:
            self.alone = 0
            self.engine.release(self.unit)

    def before_state_dict(self, *_):
        if not (self.unit.whole or self.engine.naming):
            raise RuntimeError(
                f"the parameters of {self.path or 'the model'!r} are sharded: read engine.full_state_dict(), or the "
                "module within engine.gathered()"
            )

    def after_state_dict(self, module, state, prefix, *_):
        for name, parameter in own_parameters(module).items():
            value = state.get(prefix + name)
            if value is not None and value is not parameter and value.layout is torch.strided:
                state[prefix + name] = value.clone()


def hollow(parameter):
    """Whether a parameter is what a freed unit leaves of it: one number in the place of all."""
    return parameter.numel() > 1 and not any(parameter.stride())


def _leave_hollow(model):
    """The engine of a model is gone, and its shards with it: whoever runs or saves the model is to learn of that."""
    for module in model().modules() if model() is not None else ():
        if any(hollow(parameter) for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_refuse_hollow)
            module.register_state_dict_pre_hook(_refuse_hollow)


def _refuse_hollow(module, *_):
    if any(hollow(parameter) for parameter in module.parameters(recurse=False)):
        raise RuntimeError("the engine that held these parameters is deleted, and they have no values any more")


def _watch_backward(engine, unit, tensors, turn):
    """Have `before_backward` called when a gradient reaches one of the tensors that a forward returned."""

    def before_backward(gradient):
        if torch.is_grad_enabled() and not unit.pins:
            raise RuntimeError(
                f"create_graph=True reads the weights of {unit.name or 'the model'!r} again when they are freed: "
                "do it, and engine.backward() of what comes of it, within engine.gathered()"
            )
        engine.before_backward(unit, turn)

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
    own = {storage_id(bucket.full) for bucket in unit.buckets}

    def copied(tensor):
        inner = unwrapped(tensor)
        if inner.layout is torch.strided and storage_id(inner) in own:  # sparse ones have no storage
            return tensor.clone()
        return tensor

    return map_tensors(copied, output)


class Nothing:
    """What a bucket's parameters are while they are freed: NaN in their shape, or zeros where they are integers.

    One number stands for all elements of a parameter. Where something is written there all the same, it reaches no
    other parameter, and is gone when the bucket is freed anew. Who asks for the values is refused: see `Freed`.

    Attributes:
        views: {name: tensor}.
        numbers: what those are views of, a number for each parameter.
    """

    def __init__(self, bucket):
        self.numbers, self._members = bucket.full.new_empty(len(bucket.slots)), bucket.members
        shapes = zip(self.numbers, bucket.slots.values(), strict=True)
        self.views = {slot.name: number.expand(slot.shape) for number, slot in shapes}

    def restore(self):
        """Have them read as nothing, whatever was there: whenever the bucket is freed."""
        self.numbers.fill_(float("nan") if self.numbers.is_floating_point() else 0)
        for name, parameter in self._members.items():
            if type(parameter) is nn.Parameter:  # a class of somebody else's stays what it is
                parameter.__class__, parameter.freed_name = Freed, name


# What a freed parameter is asked for in peace: its shape and the like, and what Module.to() asks.
TELLS = {"__get__", "__set__", "__delete__", "__repr__", "__len__", "__hash__", "size", "dim", "numel", "nelement"}
TELLS |= {"stride", "storage_offset", "element_size", "is_contiguous", "is_floating_point", "is_complex", "get_device"}
TELLS |= {"untyped_storage", "data_ptr", "is_shared", "is_pinned", "is_inference", "type", "detach", "requires_grad_"}
TELLS |= {"register_hook", "register_post_accumulate_grad_hook", "_has_compatible_shallow_copy_type"}
TELLS |= {"to", "cpu", "cuda", "float", "double", "half", "bfloat16"}


class Freed(nn.Parameter):
    """A parameter while it is freed: it tells its shape and the like, and refuses whoever wants its values.

    It is an `nn.Parameter` again when it gets other data.
    """

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function.__name__ not in TELLS:
                freed = next(tensor for tensor in tensors_in([args, kwargs or {}]) if isinstance(tensor, cls))
                raise InputError(
                    f"the values of {freed.freed_name!r} are freed outside of its module: read "
                    "engine.full_state_dict(), or the module within engine.gathered(), with write=True to write"
                )
            result, freed = function(*args, **kwargs or {}), args[0]
            if function.__name__ == "__set__" and function.__self__ is torch.Tensor.data:
                freed.__class__ = cls if isinstance(args[1], cls) else nn.Parameter
            elif torch.is_tensor(result) and result is not freed and storage_id(result) == storage_id(freed):
                result = result.as_subclass(cls)
                result.freed_name = freed.freed_name
        return result
