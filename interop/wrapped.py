"""What other libraries' APIs share: building an engine from a script's objects, and wrappers of model and optimizer.

Other trainers take the wrappers for torch's own, and so train by an engine. Both Trainers, Accelerate and Fabric
use the forward, `no_sync` and attributes of a model, and `step`, `zero_grad` and `param_groups` of an optimizer:
the wrappers have those.
"""

import contextlib
import copy
import importlib.metadata
import inspect
import math
import os
import warnings
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from common.engine.guards import watched
from common.engine.hooks import Hook
from common.engine.validation import check_numbers
from common.engines import find_engine
from common.errors import InputError
from common.probes import WHERE_TO_WRITE, check_hooks
from common.ranks.lanes import backend_of, device_of
from common.tensors import checksum, map_tensors

TRIED = {"transformers": "5.24.0", "accelerate": "1.15.0", "peft": "0.21.2", "lightning": "2.6.6"}


def tried(*libraries):
    """Raise an InputError if a library is not installed; warn if its version is not that of TRIED."""
    for library in libraries:
        try:
            found = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError as error:
            raise InputError(f"{library} is not installed; write pip install -e '.[words]'") from error
        if found != TRIED[library]:
            said = f"interop was tried with {library} {TRIED[library]}, not with {found}"
            warnings.warn(said, RuntimeWarning, stacklevel=3)


def init_distributed(dist_backend=None, timeout=None):
    """Make the default process group from torchrun's environment, if there is none: NCCL with GPUs, else gloo.

    Raises:
        InputError: torchrun did not start this.
    """
    if dist.is_initialized():
        return
    if "RANK" not in os.environ:
        raise InputError("there are no ranks: start the script by torchrun --nproc-per-node 2 script.py")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    backend = dist_backend if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend or "nccl", **({} if timeout is None else {"timeout": timeout}))


def take_from_rank_0(model):
    """Move a model to the device of the default group, and give it rank 0's values; not one on the meta device."""
    tensors = [*model.parameters(), *model.buffers()]
    if any(tensor.is_meta for tensor in tensors):
        return
    model.to(device_of(backend_of(None)))
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            dist.broadcast(tensor.data, 0)


def refused(why):
    """The method in place of a refused one; it can be pickled, as tensors with it are."""
    return partial(_refuse, why)


def _refuse(why, /, *_, **__):
    raise InputError(why)


def factory_of(optimizer):
    """A factory of optimizers of its class, with its defaults and attributes; its groups are for `param_groups=`.

    Raises:
        InputError: it cannot be built again; or it has step hooks, a `step`, attributes or states that would be lost.
    """
    kind = type(optimizer)
    check_hooks(optimizer)
    own, taken = _own_attributes(optimizer), inspect.signature(kind).parameters
    needed = {name: own[name] for name in own if name in taken and taken[name].default is inspect.Parameter.empty}
    again = partial(kind, **needed | {name: value for name, value in optimizer.defaults.items() if name in taken})
    try:
        fresh = again([nn.Parameter(torch.zeros(1))])
    except Exception as error:
        raise InputError(f"optimizer: {kind.__name__} cannot be built again: {error}; give a function") from error
    own = {name: value for name, value in own.items() if not _alike(value, vars(fresh).get(name, _ITSELF))}
    again = partial(_with_attributes, again, own) if own else again  # probes know torch's own factories
    if optimizer.state:
        as_built = again(copy.deepcopy(optimizer.param_groups)).state  # Adagrad's has some
        if not _alike([*optimizer.state.values()], [*as_built.values()]):
            raise InputError(f"optimizer: this {kind.__name__} has states already, which the engine would not have")
    return again


_ITSELF = object()  # in copies of an optimizer's attributes it stands for the optimizer
_bits = partial(map_tensors, lambda tensor: tensor.shape if tensor.is_meta else checksum(tensor))


def _alike(one, other):
    """Whether two values have the same bits; False if they do not say, as arrays do not."""
    with contextlib.suppress(Exception):
        return bool(_bits(one) == _bits(other))
    return False


def _own_attributes(optimizer):
    """Copies of an optimizer's defaults, and of the attributes that it has beyond torch's: {name: value}."""
    kind, known = type(optimizer), vars(torch.optim.Optimizer([nn.Parameter(torch.zeros(1))], {}))
    if watched(optimizer.step) is not kind.step:
        raise InputError(f"optimizer: the step of this {kind.__name__} was replaced; {WHERE_TO_WRITE}")
    own, parameters = {}, {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name in sorted(vars(optimizer).keys() - known - {"step", "_opt_called"} | {"defaults"}):  # schedulers set two
        seen = {id(optimizer): _ITSELF}
        with contextlib.suppress(Exception):
            own[name] = copy.deepcopy(vars(optimizer)[name], seen)
        if name not in own or not parameters.isdisjoint(seen):
            raise InputError(f"optimizer: {name!r} of this {kind.__name__} holds parameters, or cannot be copied")
    return own


def _with_attributes(make, own, parameters):
    """What `make` makes of parameters or groups, with copies of these attributes."""
    made = make(parameters)
    vars(made).update(copy.deepcopy(own, {id(_ITSELF): made}))
    return made


def copy_options(source, target):
    """Copy the options of one optimizer's groups to another's: rates, decay."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update((name, value) for name, value in group.items() if name != "params")


def trained_groups(optimizer):
    """Its groups without frozen parameters, which torch's optimizers take and never step."""
    return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in optimizer.param_groups]


def engine_for(name, model, optimizer, options):
    """Build an engine, by its name, for a model that has an optimizer already; `options` are the engine's.

    The model moves to this rank's device and takes rank 0's values, as under DDP. The optimizer, a torch optimizer over
    its parameters, is built anew, over shards, with its own groups.

    Raises:
        InputError: there are no ranks; or the engine cannot train this model, or with this optimizer.
    """
    init_distributed()
    make, again = find_engine(name), factory_of(optimizer)
    take_from_rank_0(model)
    return make(model, again, param_groups=trained_groups(optimizer), **options)


class Model(nn.Module):
    """The script's model, `module`, whose forward calls the engine's.

    `around` makes a context for every forward, such as autocast; `finish` maps the forward's output, or is None.
    """

    _is_accelerate_prepared = True  # Accelerate neither moves it nor wraps it

    def __init__(self, engine, around=contextlib.nullcontext, finish=None):
        super().__init__()
        self.module, self.engine = engine.module, engine
        self._around, self._finish = around, finish

    def forward(self, *inputs, **named):
        """The model's own. The Trainer's count of tokens is a float, and engines cast floats to their precision."""
        if torch.is_tensor(named.get("num_items_in_batch")):
            named["num_items_in_batch"] = named["num_items_in_batch"].long()
        with self._around():
            out = self.engine(*inputs, **named)
        return out if self._finish is None else self._finish(out)

    def no_sync(self):
        """Backwards in this context do not communicate, in stages 0 and 1."""
        return self.engine.no_sync()

    def zero_grad(self, set_to_none=True):
        """Drop the gradients since the last step."""
        self.engine.zero_grad()

    def state_dict(self):
        """The whole model, on every rank; a collective."""
        return self.engine.full_state_dict()

    load_state_dict = refused(
        "load_state_dict: load into the model before it is wrapped, or write engine.load_weights(file)"
    )

    def __getattr__(self, name):
        """The model's other attributes."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return whole_for(getattr(super().__getattr__("module"), name), self.engine)


def whole_for(found, engine):
    """An attribute of the model. Its methods run with gathered weights, a collective: call them on every rank."""
    if not callable(found) or isinstance(found, nn.Module):
        return found

    def called(*inputs, **named):
        with engine.gathered():
            return found(*inputs, **named)

    return called


class StandIn(torch.optim.Optimizer):
    """A wrapper of an engine's optimizer, with its groups and states.

    `given` is the optimizer that the script built, or None: it shares the groups, so that its scheduler sets the rates.
    """

    def __init__(self, engine, given):
        self._engine, self._given = engine, given
        if given is not None:
            given.register_step_pre_hook(_TAKEN)
            given.state_dict = given.load_state_dict = _TAKEN
            given.zero_grad = lambda set_to_none=True: engine.zero_grad()
            self._known = list(given.param_groups)
            engine.optimizer.register_load_state_dict_post_hook(Hook(self._share))  # a load makes new groups
            self._share()

    param_groups = property(lambda self: self._engine.optimizer.param_groups)
    state = property(lambda self: self._engine.optimizer.state)
    defaults = property(lambda self: self._engine.optimizer.defaults)

    def _share(self, *_):
        """Let both have the groups that the script knows, the very objects, with the engine's shards in them."""
        for known, own in zip(self._known, list(self.param_groups), strict=True):
            known.update(own)
        self.param_groups[:] = self._known
        self._given.param_groups = self.param_groups

    def has_stepped(self):
        """Note a step of the engine. torch's schedulers ask their optimizer for it."""
        for optimizer in filter(None, (self, self._given)):
            optimizer._opt_called = True

    def zero_grad(self, set_to_none=True):
        """Drop the gradients since the last step, those of earlier micro-batches too."""
        self._engine.zero_grad()

    def add_param_group(self, param_group):
        """Refused, by the engine."""
        self._engine.optimizer.add_param_group(param_group)


_TAKEN = refused("an engine has taken over this optimizer; use the one that was returned for it")


class Optimizer(StandIn):
    """The optimizer, whose step is the engine's. `optimizer` is the one that the script built.

    Attributes:
        step_was_skipped: the last step changed nothing, because a gradient overflowed in fp16.
        asked: what the next step clips by, [(norm, type)], or []. Fabric's copies of this wrapper share the list.
    """

    _is_accelerate_prepared = True
    state_dict = refused("optimizer.state_dict: its states are shards; write engine.save(path), with the model's")
    load_state_dict = refused("optimizer.load_state_dict: its states are shards; write engine.load(path)")

    def __init__(self, engine, optimizer):
        super().__init__(engine, optimizer)
        self.engine, self.optimizer, self.step_was_skipped = engine, optimizer, False
        self._always, self.asked = (engine.clip_norm, engine.norm_type), []
        self._norm = torch.tensor(math.nan)

    def clip(self, max_norm, norm_type=2.0):
        """Let the next step scale its gradient down to this norm.

        Returns:
            The norm before, a scalar tensor: NaN until that step, which computes it and fills it in.

        Raises:
            InputError: the norm is not above 0, its type is neither 2 nor infinity, or the step is to have another.
        """
        asked = float(max_norm), float(norm_type)  # a tensor, or "inf"
        check_numbers(asked[0], None, asked[1], bucket_mb=1.0)
        if self.asked not in ([], [asked]):
            raise InputError(f"one step clips once, and is to do so by {self.asked[0]}; leave one of the two calls out")
        self.asked[:], self._norm = [asked], torch.tensor(math.nan)
        return self._norm

    def zero_grad(self, set_to_none=True):
        super().zero_grad()
        self.asked.clear()

    def step(self, closure=None):
        """The engine's step, clipped by the last call of `clip` since the step before, or else as the engine was built.

        Raises:
            InputError: `closure` is given.
        """
        if closure is not None:
            raise InputError("step(closure): an engine steps once per gradient; call backward first, then step()")
        self.engine.clip_norm, self.engine.norm_type = self.asked.pop() if self.asked else self._always
        result = self.engine.step()
        self.step_was_skipped = result.skipped
        self.has_stepped()
        if result.norm is not None:
            self._norm.fill_(result.norm)
