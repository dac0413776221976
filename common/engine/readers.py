"""Reads of a unit's weights while the unit does not run: by a module of it that runs alone, a state dict, other code.

A module that runs alone has its unit gathered meanwhile. Within a forward, a freed weight that is read moves to the
unit that is running, which gathers it from then on. Any other read of a freed weight raises, with the weight's name.
"""

import weakref

import torch
from torch import nn

from common.engine.hooks import Guard, Hook, LeafHook
from common.errors import InputError
from common.measure.memory import storage_id
from common.patches import become
from common.tensors import inside_backward, map_tensors, own_parameters, tensors_in, unwrapped


class Reader:
    """Watches a module that reads weights of a unit at times when the unit does not run.

    If the module runs alone, inside generate() for instance, the unit is pinned meanwhile. For its state_dict, or a
    copy of it, the unit must be whole already, and the state_dict holds copies, or the weights themselves if these may
    be written.
    """

    def __init__(self, engine, unit, path, module):
        self.engine, self.path, self.module, self.hooked = weakref.proxy(engine), path, module, False
        self.alone = 0  # its current runs that the unit is pinned for
        engine.hooks.append(module.register_state_dict_pre_hook(Guard(self.before_state_dict)))
        engine.hooks.append(module.register_state_dict_post_hook(Hook(self.after_state_dict)))
        self.look_after(unit)

    def look_after(self, unit):
        """The module's weights now belong to this unit."""
        self.unit = unit
        if self.module is not unit.module and not self.hooked:
            self.hooked = True
            self.engine.hooks.append(self.module.register_forward_pre_hook(LeafHook(self.before), prepend=True))
            # Without always_call, with which torch.compile makes a graph for each block.
            self.engine.hooks.append(self.module.register_forward_hook(LeafHook(self.after)))

    def before(self, module, args):
        unit, own = self.unit, bool(self.alone)  # `own`: the unit is pinned for this module, which calls itself
        outside = not (unit.shown and (unit.depth or unit.pins > own or inside_backward()))
        if outside or own:
            read = [*module.parameters(), *tensors_in(args)] if outside and torch.is_grad_enabled() else ()
            if any(tensor.requires_grad for tensor in read):
                raise RuntimeError(
                    f"{self.path!r} runs outside the forward of {unit.name or 'the model'!r}, which unshards "
                    "its parameters, and backward would miss them: call that module, use torch.no_grad(), or hold "
                    "it by engine.gathered() until backward ends"
                )
            if not own:
                self.engine.pin(unit)
            self.alone += 1

    def after(self, module, args, output):
        if self.alone:
            self.alone -= 1
            output = copy_weights(self.unit, output)
            if self.alone == 0:
                self.engine.unpin(self.unit)
        return output

    def give_up(self):
        """Unpin after a run that an exception ended: torch calls no hook then."""
        self.alone = 0
        self.engine.unpin(self.unit)

    def before_state_dict(self, *_):
        if not (self.unit.shown or self.engine.state.names_state):
            raise RuntimeError(
                f"the parameters of {self.path or 'the model'!r} are sharded: read engine.full_state_dict(), or the "
                "module within engine.gathered()"
            )

    def after_state_dict(self, module, state, prefix, *_):
        for name, parameter in own_parameters(module).items():
            value = state.get(prefix + name)
            kept = value is None or value is parameter or self.engine.weight_writes.is_open(parameter)
            if not kept and value.layout is torch.strided:
                state[prefix + name] = value.clone()


def copy_weights(unit, output):
    """`output`, with the unit's own weights copied: they are freed while the caller may still read them."""
    own = {storage_id(bucket.full_parameters) for bucket in unit.buckets}

    def copied(tensor):
        inner = unwrapped(tensor)
        if inner.layout is torch.strided and storage_id(inner) in own:  # sparse ones have no storage
            return tensor.clone()
        return tensor

    return map_tensors(copied, output)


# Functions that a freed parameter allows: its shape and the like, and those that Module.to() calls.
TELLS = {"__get__", "__set__", "__delete__", "__repr__", "__len__", "__hash__", "size", "dim", "numel", "nelement"}
TELLS |= {"stride", "storage_offset", "element_size", "is_contiguous", "is_floating_point", "is_complex", "get_device"}
TELLS |= {"untyped_storage", "data_ptr", "is_shared", "is_pinned", "is_inference", "type", "detach", "requires_grad_"}
TELLS |= {"register_hook", "register_post_accumulate_grad_hook", "_has_compatible_shallow_copy_type"}
TELLS |= {"to", "cpu", "cuda", "float", "double", "half", "bfloat16"}

# Functions whose result reads the values later.
VIEWS = {"T", "mT", "H", "mH", "data", "real", "imag", "detach"}


class Freed(nn.Parameter):
    """A parameter while it is freed: it has a shape and the like, and raises if it is read, unless a unit takes it.

    It becomes an `nn.Parameter` again when it gets other data.

    Attributes:
        freed_name: its name.
        freed_values: a weak reference to the `units.Values` of its bucket; False for a view of a freed parameter.
    """

    freed_values = staticmethod(lambda: False)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, function.__name__
        tells = name in TELLS
        if name == "__get__":
            name = function.__self__.__name__
        if not tells or name in VIEWS:
            freed = [tensor for tensor in tensors_in([args, kwargs]) if isinstance(tensor, cls)]
            owners = [tensor.freed_values() for tensor in freed]
            if None in owners:
                raise RuntimeError("the engine that held these parameters is deleted, and they have no values any more")
            if all(values and values.move() for values in dict.fromkeys(owners)):
                return function(*args, **kwargs)
            freed = [tensor for tensor in freed if isinstance(tensor, cls)]  # the others' buckets have moved
        with torch._C.DisableTorchFunctionSubclass():
            if not tells:
                raise InputError(
                    f"the values of {freed[0].freed_name!r} are freed outside of its module: read "
                    "engine.full_state_dict(), or the module within engine.gathered(), with write=True to write"
                )
            result, freed = function(*args, **kwargs), args[0]
            if function.__name__ == "__set__" and function.__self__ is torch.Tensor.data:
                if not isinstance(args[1], cls):
                    become_readable([freed])
            elif torch.is_tensor(result) and result is not freed and storage_id(result) == storage_id(freed):
                result = result.as_subclass(cls)
                result.freed_name = freed.freed_name
        return result


def become_readable(parameters):
    """Make those of the parameters that are `Freed` nn.Parameters again."""
    freed = [parameter for parameter in parameters if type(parameter) is Freed]
    become(freed, nn.Parameter)
    for parameter in freed:
        for name in ("freed_name", "freed_values"):
            vars(parameter).pop(name, None)
