"""How an optimizer steps one shard, alone; and probes whether its steps on shards are those that torch would take."""

import contextlib
import copy
import math
import zlib

import torch
from torch import nn

from common.errors import InputError
from common.measure.memory import storage_bytes
from common.optim import Whole
from common.tensors import FakeTensor, host_value, tensors_of_state

WHERE_TO_WRITE = "do it in step() of the optimizer that the factory makes, which sees each shard alone"
STEPS = 24  # of a probe: some optimizers estimate, or read older weights, only after some steps, or at every tenth
# Block formats take 4,096 elements or more. The second half begins amid a block, and amid a vector of most kernels.
ELEMENTS, HALVES = 8192 + 100, ((4120,), (4172,))
SHAPES = (  # of parameters that hold them, as models have them
    ("two parameters", *HALVES),
    ("matrices", (ELEMENTS // 4, 4)),
    ("tensors of three dimensions", (ELEMENTS // 12, 3, 4)),
    ("tensors of four dimensions", (ELEMENTS // 12, 3, 2, 2)),
)
OF_SHARDS = "so its step on a shard would depend on what other ranks hold"
OF_ENDS = "as torch does on a CPU in powers, exponentials and 16-bit sums, and shards end elsewhere"
OF_COUNTS = "so each shard of a step would count; keep the count in the state of a parameter, or in param_groups"
OF_LOSSES = "and engines step without the loss; write SAM by engine.gradients() and gathered(write=True)"
OF_NORMS = "which some ranks would not see; the engine's skip_norm= and clip_norm= look at the whole gradient"
OF_SHAPES = (
    "and engines step flat shards of several parameters; give what each kind needs in param_groups=, and what it must "
    'see as matrices in a group with "whole": True, see common.optim.MuonAdamW'
)
_probes = {}  # what is known of torch's own optimizers in this process


class Options:
    """The options of an optimizer's groups, in a step that it takes shard by shard: as if it took all of them at once.

    Some optimizers count in them, as ScheduleFree in its `k`. So every shard starts from the options as they were when
    the step began. What it makes of them must be the same for all shards, and is taken over once. What is estimated
    over the elements that a step sees, as Prodigy's `d`, comes out differently, and is refused.

    Attributes:
        counts: whether the optimizer changes options: then ranks compare them, a number for each group.
        made: what this step has made of options so far, {number of a group: {name: value}}.
    """

    def __init__(self, optimizer, counts=False):
        self.optimizer, self.counts, self._kept = optimizer, counts, None
        self.begin()

    @property
    def groups(self):
        """The groups of the optimizer."""
        return self._kept or self.optimizer.param_groups

    def hand_over(self):
        """Another engine goes on. Until this one steps, a scheduler that sets an option, in this very list, is told."""
        self._kept = list(self.groups)
        self.optimizer.param_groups[:] = [HandedOver(plain(own) | {"params": own["params"]}) for own in self._kept]

    def begin(self):
        """A step begins."""
        if self._kept and isinstance(self.optimizer.param_groups[0], HandedOver):  # no load has made others
            self.optimizer.param_groups[:] = self._kept
        self._kept = None
        self._groups = [dict(group) for group in self.optimizer.param_groups]
        self._tensors = [
            {name: (value._version, value.clone()) for name, value in group.items() if torch.is_tensor(value)}
            for group in self._groups
        ]
        self.made, self._stepped = {}, []

    @contextlib.contextmanager
    def alone(self, weights, number):
        """In this context the optimizer has only these weights, in their group, a number, as the step found it.

        So a `step` that clips gradients by value or clamps weights treats each shard as it would treat the whole.
        """
        groups = self.optimizer.param_groups
        own, before = groups[number], self._groups[number]
        own["params"], self.optimizer.param_groups = [weights], [own]
        try:
            yield
        finally:
            self.optimizer.param_groups, made = groups, self.made_of(number, own)
            for name in self._tensors[number].keys() & made:
                before[name].copy_(self._tensors[number][name][1])
            own.clear()  # the next shard starts as this one did
            own |= before
        self.came_out(number, made)

    def made_of(self, number, group):
        """What a step has made of a group: {name: value} of the options that it set."""
        before = self._groups[number]
        made = {n: value for n, value in group.items() if n != "params" and value is not before.get(n)}
        for name, (version, _) in self._tensors[number].items():
            if group.get(name) is before[name] and before[name]._version != version:
                made[name] = group[name].clone()
        return made

    def came_out(self, number, made):
        """Take note of what a shard's step, on any thread, made of its group."""
        self._stepped.append(number)
        first = self.made.setdefault(number, made)
        for name in {**first, **made} if first is not made else ():
            one, other = (plain({name: of.get(name, self._groups[number].get(name))}) for of in (first, made))
            if str(one) != str(other):
                raise InputError(_estimated(number, name, (one, other), "two shards"))

    @property
    def changed(self):
        """Whether a shard of this step has changed options."""
        return any(self.made.values())

    def end(self, shards, axes=()):
        """Take over what a step of so many shards has made of the options; nothing while some are under way.

        Args:
            axes: the Collectives of ranks that must have made the same.
        """
        if len(self._stepped) < shards:
            return
        made, self.made, self._stepped = self.made, {}, []
        for number, options in made.items():
            self.optimizer.param_groups[number].update(options)
        for comm in axes if self.counts else ():
            told = [plain(made.get(number, {})) for number in range(len(self._groups))]
            sums = torch.tensor([zlib.crc32(str(sorted(of.items())).encode()) for of in told], device=comm.device)
            if host_value((comm.everyones(sums, "the optimizer's options") != sums).any(), False):
                self._name_difference(comm.gather_objects(told, "the optimizer's options"))

    def _name_difference(self, everyones):
        for rank, theirs in enumerate(everyones):
            for number, (one, other) in enumerate(zip(everyones[0], theirs, strict=True)):
                for name in (name for name in {**one, **other} if str(one.get(name)) != str(other.get(name))):
                    raise InputError(_estimated(number, name, (one, other), f"ranks 0 and {rank}"))


class HandedOver(dict):
    """A group of an optimizer whose engine another continues from: plain numbers, to read."""

    def __setitem__(self, name, value):
        raise InputError(
            f"{name!r} is set in the optimizer of an engine that another one continues from, which is not told: build "
            "the scheduler over the new engine's optimizer, and give it the old scheduler's state_dict()"
        )


def _estimated(number, name, made, where):
    values = " and ".join(str(of.get(name)) for of in made)
    return (
        f"{name!r} of group {number} of the optimizer came out as {values} from {where}: it is estimated over the "
        "elements that a step sees, and engines step shards"
    )


def check_elementwise(optimizer, device, refusal="the optimizer does not work element by element"):
    """Probe that the optimizer steps elements alike however parameters hold them, as engines step flat shards.

    After gradients that shrink comes one with a huge element, and one with a NaN and an infinity: an optimizer that
    clips or skips by the whole gradient would do so on some ranks only.

    Args:
        optimizer, device: the factory, and the device that it steps on.
        refusal: the message if it fails on that device.

    Returns:
        Bytes of state per element and per tensor; whether it changes options; the optimizer and its options, as text.
    """
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise InputError(
            "optimizer is an optimizer, not a factory; give what builds one over the shards, such as "
            "functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    _check_settings(optimizer, device)
    of_torch = getattr(optimizer, "func", None)
    if getattr(of_torch, "__module__", "").startswith("torch.optim.") and not optimizer.args:
        options = str({**optimizer.keywords, **plain(optimizer.keywords)})
        key = str(device), isinstance(torch.empty(0), FakeTensor), of_torch, of_torch.step, options
        if key not in _probes:
            _probes[key] = _check_elementwise(optimizer, device, refusal)
        return _probes[key]
    return _check_elementwise(optimizer, device, refusal)


def _check_elementwise(optimizer, device, refusal):
    values, *gradients = _gradients_as_in_training().to(device)
    gradients[-2][0], gradients[-1][0], gradients[-1][1] = 1e6, math.nan, math.inf

    def probed(*shapes, **how):
        try:
            held = slice(sum(map(math.prod, shapes)))
            return _probed(optimizer, values[held], [gradient[held] for gradient in gradients], *shapes, **how)
        except InputError:
            raise
        except Exception as error:
            hence = OF_LOSSES if "closure" in str(error) or "grad_fn" in str(error) else OF_SHAPES
            where = "whole parameters" if how.get("together") else "a flat shard"
            _refuse(f"it fails on {where}: {error}", hence, refusal)

    expected, whole, _ = probed((ELEMENTS,))
    name, halved, estimated = type(whole).__name__, None, ""
    try:
        halved, halves, counts = probed(*HALVES)
    except InputError as error:
        estimated = str(error)
    if estimated or not _alike(halved[:STEPS], expected[:STEPS]):
        middle = slice(STEPS), slice(*HALVES[0], -32)  # the second half without its end
        if not estimated and _alike(halved[middle], expected[middle]):
            _refuse(f"{name} rounds the last elements of a tensor otherwise", OF_ENDS)
        apart, one, _ = probed(*HALVES, apart=True)
        if plain(one.param_groups[0]) == plain(whole.param_groups[0]) and _alike(apart[middle], expected[middle]):
            _refuse(f"{name} counts its steps beside its states and options", OF_COUNTS)
        _refuse(estimated or f"{name} steps elements differently from their two halves", OF_SHARDS)
    whole_blocks, parts = (probed(*shapes)[0][:STEPS, :4096] for shapes in ([(8192,)], [(4128,), (4064,)]))
    if not _alike(whole_blocks, parts):  # some formats leave alone what is no multiple of their block
        _refuse(f"{name} steps whole blocks differently from parts of them", OF_SHARDS)
    if not _alike(halved, expected):
        _refuse(f"{name} looks at a whole gradient that is huge or not finite", OF_NORMS)
    for what, *shapes in SHAPES:
        if not _alike(probed(*shapes, together=True)[0], expected):
            _refuse(f"{name} steps {what} differently from the same elements flattened", OF_SHAPES)
    once, twice = (storage_bytes(tensors_of_state(made)) for made in (whole, halves))
    per_element = (2 * once - twice) // ELEMENTS
    return (per_element, once - ELEMENTS * per_element), counts, f"{name}{plain(whole.param_groups[0])}"


def check_whole(optimizer, groups, named, device, is_part=False):
    """Probe that the optimizer steps each parameter of a `whole` group by itself, wherever in a flat shard it lies.

    Its states must have a number for each element, or be the same for all parameters: only those can be cut and joined.

    Args:
        optimizer: the factory.
        groups: of the model's parameters, whose names `named` has.
        is_part: whether the model is a part of one, which may have no matrix.

    Returns:
        {number of a whole group: bytes of state per element, and per tensor}; the groups' options, as text.
    """
    sizes, told, names = {}, [], {parameter: name for name, parameter in named}
    values, *gradients = _drawn(3).to(device)
    gradients[1][0] = math.nan
    for number, group in enumerate(groups):
        if group.get("whole") and not group["params"] and not is_part:
            raise InputError(f'group {number} is "whole" and lists no parameter; leave it out, or list its matrices')
        built = optimizer([{**group, "params": [nn.Parameter(values.clone())]}]) if group.get("whole") else None
        told += [plain(built.param_groups[0])] if built else []
        for parameter in {parameter.ndim: parameter for parameter in group["params"]}.values() if built else ():
            shape = (4, 8, *[1] * (parameter.ndim - 2)) if parameter.ndim > 1 else (32,)
            whole = {**group, "params": shape}
            try:
                expected, two, _ = _probed(optimizer, values, gradients, (32,), (32,), whole=whole)
                stepped, one, _ = _probed(optimizer, values, gradients, (64,), whole=whole)
            except Exception as error:
                why = " ".join(str(error).split())
                raise InputError(f"the optimizer cannot step {names[parameter]!r}, of a whole group: {why}") from error
            if not _alike(stepped, expected):
                raise InputError(
                    f"{type(one).__name__} steps two parameters in one flat tensor differently from each alone; step "
                    "each of its `whole` by itself, as common.optim.MuonAdamW does"
                )
            beside = [_beside(flat, states) for made in (one, two) for flat, states in made.state.items()]
            if len(set(map(str, beside))) > 1 or any(isinstance(value, list) for of in beside for value in of.values()):
                raise InputError(
                    f"{type(one).__name__} keeps states of single parameters in a flat tensor; keep states as long "
                    "as the flat tensor, which checkpoints cut, or equal for all"
                )
            once, twice = (storage_bytes(tensors_of_state(made)) for made in (one, two))
            sizes[number] = (2 * once - twice) // 64, twice - once
    if not told and "whole" in optimizer([nn.Parameter(values.clone())]).defaults:
        raise InputError('no group is "whole", so no matrix would be stepped as one; see common.optim.split')
    return sizes, str(told)


def _beside(flat, states):
    """The states of a flat tensor that have no number for each of its elements: {name: value}, tensors as lists."""
    plain = {name: value for name, value in states.items() if getattr(value, "shape", None) != flat.shape}
    return {name: value.tolist() if torch.is_tensor(value) else value for name, value in plain.items()}


def _drawn(number):
    """The values of 64 elements and their gradients, the same on each rank: [number, 64], on the CPU."""
    return torch.randn(number, 64, generator=torch.Generator("cpu").manual_seed(0), device="cpu")


def _gradients_as_in_training():
    """Values, and gradients that mostly point one way, large and alike, then smaller: [1 + STEPS + 2, ELEMENTS]."""
    drawn = torch.randn(STEPS + 4, ELEMENTS, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    drawn[3:6], drawn[0, 0], drawn[1:, 0] = drawn[2], 0.05, 0.0  # the last gradients are nearly perpendicular
    sizes = torch.linspace(1.0, 0.02, STEPS + 2, device="cpu")
    sizes[:4], sizes[STEPS // 2] = 10.0, 0.0  # a batch may not use a parameter
    return torch.cat([drawn[:1], (drawn[1:2] + drawn[2:] / 2) * sizes[:, None]])


def _probed(optimizer, values, gradients, *shapes, together=False, apart=False, whole=None):
    """Step elements held by parameters of these shapes, `together` or, as engines do, each alone.

    They are flat shards of a group of whole parameters if that is given, with the shape of 32 elements as its `params`.

    Args:
        apart: with an optimizer for each.

    Returns:
        The elements after each step [steps, elements]; the optimizer; whether its steps changed options.
    """
    sizes, found, counts = [math.prod(shape) for shape in shapes], [], False
    parts = [nn.Parameter(part.clone().view(shape)) for part, shape in zip(values.split(sizes), shapes, strict=True)]
    for part in parts if whole else ():
        part.whole = Whole([(slice(at, at + 32), whole["params"]) for at in range(0, len(part), 32)])
    held = [[part] for part in parts] if apart else [parts]
    probes = [(optimizer([{**whole, "params": some}] if whole else some), some) for some in held]
    for gradient in gradients:
        pieces = dict(zip(parts, gradient.split(sizes), strict=True))
        for probe, some in probes:
            options, numbers = Options(probe), groups_of(probe)
            for part in some:
                part.grad = pieces[part].clone().view_as(part)
                if not together:
                    with options.alone(part, numbers[part]):
                        probe.step()
                    part.grad = None
            if together:
                probe.step()
            counts |= options.changed
            options.end(0)
        found.append(torch.cat([part.detach().flatten() for part in parts]))
    return torch.stack(found), probes[0][0], counts


def _alike(one, other):
    return host_value(((one == other) | (one.isnan() & other.isnan())).all(), True)


def states_by(engine, options):
    """The names of the states that an engine's optimizer has after a step with a group's options, in order."""
    device = next(weights.device for group in engine.optimizer.param_groups for weights in group["params"])
    weights = nn.Parameter(torch.zeros(32, device=device))
    weights.grad, weights.whole = torch.ones_like(weights), Whole([(slice(0, 32), (8, 4))])
    probe = engine.make_optimizer([weights])
    probe.param_groups[0] |= copy.deepcopy(options)
    probe.step()
    return sorted(probe.state[weights])


def check_swapped(optimizer):
    """Probe that an optimizer steps weights that have no values when it is built, and between its steps.

    Returns:
        Bytes of an element of each of its states, which are swapped too.
    """
    values, *gradients = _drawn(1 + STEPS)
    expected, nothing = _probed(optimizer, values, gradients, (64,))[0][-1], torch.full_like(values, math.nan)
    weight, now = nn.Parameter(nothing.clone()), values.clone()
    probe = optimizer([weight])
    for gradient in gradients:
        weight.data, weight.grad = now, gradient.clone()
        probe.step()
        now, weight.data, weight.grad = weight.detach(), nothing, None
    if not _alike(now, expected):
        raise InputError(
            f"{type(probe).__name__} reads the weights when it is built, and on disk they have no values yet; "
            "place the optimizer by tiers= on 'cpu' or 'device', or use AdamW, Adam, SGD, Adagrad or RMSprop"
        )
    return [value.itemsize for value in tensors_of_state(probe) if value.shape == weight.shape]


def _check_settings(optimizer, device):
    """Refuse an optimizer that could train no model: lr=nan has nothing to do with elements and shards."""
    try:
        built = optimizer([nn.Parameter(torch.zeros(8, 8, device=device))])  # a matrix, as models have them
    except Exception as error:
        raise InputError(f"the optimizer cannot be built: {error}") from error
    if not isinstance(built, torch.optim.Optimizer):
        raise InputError(f"optimizer makes a {type(built).__name__}; give what makes a torch.optim.Optimizer")
    check_hooks(built)
    check_rates(built.param_groups)


def check_rates(groups):
    for rate in (float(group["lr"]) for group in groups if "lr" in group):
        if not 0 <= rate < math.inf:
            raise InputError(f"the optimizer's lr is {rate}; give a finite learning rate, of 0 or more")


def plain(options):
    """Those options of an optimizer that read alike in every process."""
    options = {name: value.tolist() if torch.is_tensor(value) else value for name, value in options.items()}
    allowed = (bool, int, float, str, tuple, list, type(None))
    return {name: value for name, value in options.items() if isinstance(value, allowed) and name != "params"}


def _refuse(why, hence, refusal="the optimizer does not work element by element"):
    instead = "use AdamW, Adam, SGD, Adagrad or RMSprop, or common.optim.MuonAdamW"
    raise InputError(f"{refusal} ({' '.join(why.split())}), {hence}; {instead}")


def groups_of(optimizer):
    """{parameter of an optimizer: the number of its group}."""
    return {weights: number for number, group in enumerate(optimizer.param_groups) for weights in group["params"]}


def check_hooks(optimizer):
    """Refuse an optimizer with hooks on its step. torch has no public API to ask for them."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        refuse_hook()


def refuse_hook(*_, **__):
    raise InputError(f"a hook of the optimizer's step would be called once per shard; {WHERE_TO_WRITE}")
