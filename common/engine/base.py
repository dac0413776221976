"""The door that every engine shares: checks, casts, the optimizer over shards, the calls of a training loop.

What a rank keeps, when it communicates and when it frees is not here: that is the stage's own `engine.py`, whose
phases this file calls by name:

    __init__   -> partition -> owned
    engine(x)  -> begin_forward, module, end_forward
    backward   -> begin_backward, (hooks) gradient_ready -> reduce, finish_backward
    step       -> update
"""

import contextlib
import itertools
import weakref
import zlib
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from common.engine import checkpoint
from common.engine.hooks import Hook, remove_with
from common.engine.layout import Run, distinct
from common.engine.mixed_precision import DTYPES, LossScaler, dtype_of, gradient_norm, overflow_flag
from common.engine.units import hollow, inside_backward, map_tensors
from common.errors import InputError
from common.measure.memory import storage_bytes, storage_id
from common.ranks.collectives import Collectives

# torch's batch norms have fp32 statistics, and run in 16-bit only if their weight and bias are fp32 as well.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Owned:
    """What a rank keeps of a bucket between steps: slices of the run, in elements."""

    parameters: slice
    gradients: slice
    optimizer: slice


@dataclass(frozen=True)
class StepResult:
    """What a step did.

    Attributes:
        norm: global 2-norm of the mean gradient before clipping, unscaled; None without `clip_norm`.
        skipped: the step changed nothing, because a gradient overflowed in fp16.
    """

    norm: float | None
    skipped: bool


class Bucket(Run):
    """A run, with the tensors that this rank holds of it.

    `scale_of_backward`, one for all buckets of a process, is the loss scale of the backward that runs, of whichever
    engine; None while none does.

    Attributes:
        parameters, gradients: flat tensors, as long as `owned` says. None for the gradients of frozen parameters.
        stepped: the optimizer's part of `parameters`.
        master: what the optimizer steps, an nn.Parameter: `stepped` itself or, if that is 16-bit, a copy in fp32.
        reduced: the optimizer's part of `gradients`, where the mean gradient arrives.
        carried: the sum of the step's earlier means, in fp32, where `reduced` does not hold it.
        handle: the reduction under way in this backward.
        gathering: the all-gather of parameters under way.
        full, unit: the whole run of parameters where it is not kept, and the unit it belongs to.
        views, nothing: what each parameter, by name, is where `full` holds it, and a `units.Nothing` for where it does
            not.
        storages: what its parameters lie in, as `storage_id` has it.
    """

    scale_of_backward = None

    def __init__(self, named_parameters, kind, world_size):
        super().__init__(named_parameters, kind, world_size)
        self.members = dict(named_parameters)  # name -> the model's own parameter
        self.parameters = self.gradients = self.stepped = self.master = self.reduced = self.local = None
        self.full = self.handle = self.gathering = self._unit = self.views = self.nothing = None
        self.storages = set()
        self.fires_in_parts = False  # reentrant checkpoints give a weight they share its gradient in parts
        self.forget()

    def forget(self):
        """Drop every gradient since the last step."""
        self.reported = set()  # names whose gradient came in this backward
        self._filled = set()  # names whose place in `local` holds a gradient
        self.sums = {}  # name -> fp32 sum of gradients that came one by one, and have not travelled
        self.carried = None
        self.has_gradient = False
        self.handle = None
        self.scales = set()  # the loss scales under which its gradients came
        if self.local is not self.gradients:
            self.local = None
        if self.master is not None:
            self.master.grad = None

    @property
    def local(self):
        """The whole run of this rank's own gradients on their way to the mean; None when there is none."""
        return self._local

    @local.setter
    def local(self, flat):
        self._local, self._places = flat, None if flat is None else self.cut(flat)

    @property
    def unit(self):
        """The unit that it belongs to; None in stages that have none."""
        return self._unit and self._unit()

    @unit.setter
    def unit(self, unit):
        self._unit = weakref.ref(unit)  # which holds its buckets

    @property
    def complete(self):
        """Every gradient of this backward is in, and none of them can come a second time."""
        return len(self.reported) == len(self.slots) and not self.fires_in_parts

    @property
    def pending(self):
        """Gradients are here that no rank but this one has seen."""
        return bool(self._filled) or self.handle is not None

    @property
    def sixteen_bit(self):
        """The parameters are rounded, so that the optimizer needs fp32 master weights beside them."""
        return self.kind.dtype != torch.float32

    @property
    def packs_in_place(self):
        """Gradients are packed where they are kept."""
        return self.local is self.gradients

    @property
    def mean(self):
        """The mean gradient since the last step: of one backward as it arrived, of several the sum, in fp32."""
        return self.reduced if self.carried is None else self.carried

    def pack(self, name, gradient):
        """Move a gradient to its place in `local`. One that finds another there, left by `no_sync`, adds in fp32."""
        self._make_room()
        place = self._places[name]
        if name not in self._filled:
            place.copy_(gradient)
        elif name in self.reported and name not in self.sums:  # a part of the same gradient: added as autograd does
            place.add_(gradient)
        else:
            if name not in self.sums:
                self.sums[name] = place.float()  # fp32 adds up in place
            self.sums[name].add_(gradient)
        self._filled.add(name)
        self.reported.add(name)
        self.scales.add(Bucket.scale_of_backward)

    def seal(self):
        """Make `local` what travels: sums rounded once to its dtype, zeros where no gradient came, and as padding."""
        self._make_room()
        for name, total in self.sums.items():
            self._places[name].copy_(total)
        self.sums.clear()
        for name in self.slots:
            if name not in self._filled:
                self._places[name].zero_()
        self.local[self.numel :].zero_()
        self._resize_gradients(self.gradients.nbytes)

    def _make_room(self):
        # An earlier backward's mean stands aside before this one's gradients or their mean arrive in its place.
        if self.has_gradient and self.carried is None:
            self.carried = self.reduced.to(torch.float32, copy=True)
        self.has_gradient = False

    def arrive(self):
        """Wait for the reduction; add the mean to those of the step's earlier backwards.

        16-bit gradients would lose small ones in a growing sum. So they add up in fp32, and where their own room has
        no other use it gives way to that sum.
        """
        self.handle.wait()
        self.handle = None
        if self.carried is not None and self.sixteen_bit:
            self.carried.add_(self.reduced)
            if not self.packs_in_place:
                self._resize_gradients(0)
        elif self.carried is not None:
            self.reduced.add_(self.carried)
            self.carried = None
        self._filled.clear()
        self.has_gradient = True

    def _resize_gradients(self, nbytes):
        storage = self.gradients.untyped_storage()
        if storage.nbytes() != nbytes:
            if self.gradients.is_cuda:  # made in backward, on a stream that need not be this one, which may still read
                self.gradients.record_stream(torch.cuda.current_stream())
            storage.resize_(nbytes)


class EngineBase:
    """What the engines share. See a stage's `Engine` for the phases.

    Args:
        model: an nn.Module on the group's device, or on the meta device together with `init`.
        optimizer: a factory, from parameters or param_groups to a torch.optim.Optimizer that works element by
            element, such as `functools.partial(torch.optim.AdamW, lr=3e-4, fused=True)`.
        param_groups: torch's list of dicts over the model's trainable parameters; None is one group.
        precision: "fp32", "bf16" or "fp16": what parameters built in fp32 are kept and used in, and floating inputs
            are cast to. Parameters built in another dtype keep it; buffers keep theirs. Whatever is 16-bit is stepped
            by fp32 master weights.
        clip_norm: scale the gradient down to this global 2-norm; None does not, and does not compute the norm.
        bucket_mb: MiB of a gradient bucket, counted in fp32 in every precision.
        process_group: the data-parallel group; None is the default group.
        init: `init(qualified name, tensor)` fills each parameter and buffer of a meta-device model in place.
        deterministic: sum gradients in rank order with NCCL too. gloo always does.
        keep_fp32: classes of modules, or names (of modules, of parameters, or parts of these between dots), whose
            parameters stay in fp32 in every precision: torch's batch norms, unless you say otherwise. The modules
            themselves must then take inputs of the precision; see `_keep_in_fp32_modules` of your model, if it has it.
        broadcast_buffers: give every rank the buffers of rank 0 before each forward in training, as torch's DDP does.

    Attributes:
        loss_scaler: in fp16 a `LossScaler`, which may be replaced by one with other settings; else None.

    Raises:
        InputError: the input cannot be used; the message says why and how to mend it.
    """

    own_options = ()  # names of what a stage takes besides, and has set as attributes

    def __init__(
        self,
        model,
        optimizer,
        *,
        param_groups=None,
        precision="fp32",
        clip_norm=None,
        bucket_mb=25.0,
        process_group=None,
        init=None,
        deterministic=False,
        keep_fp32=BATCH_NORMS,
        broadcast_buffers=True,
    ):
        settings = {  # what all ranks must agree on
            "the engine": f"{type(self).__module__}.{type(self).__qualname__}",
            **{name: getattr(self, name) for name in self.own_options},
            "precision": precision,
            "clip_norm": clip_norm,
            "bucket_mb": bucket_mb,
            "deterministic": deterministic,
            "broadcast_buffers": broadcast_buffers,
        }
        self.loss_scaler = LossScaler() if precision == "fp16" else None
        self.clip_norm = clip_norm
        self.comm = Collectives(process_group, deterministic=deterministic)
        self.rank, self.world_size = self.comm.rank, self.comm.size
        self.syncing = True
        self._module, self._init, self._broadcasts = model, init, broadcast_buffers
        try:
            self.dtype = dtype_of(precision)
            _check_numbers(clip_norm, bucket_mb)
            self._optimizer_bytes, settings["the optimizer"] = _check_elementwise(optimizer, self.comm.device)
            self.param_groups = _check_groups(model, param_groups)
            settings["param_groups"] = [_plain(group) for group in self.param_groups]
            self._kept_fp32 = _check_kept(model, keep_fp32)
            settings["keep_fp32"] = sorted(self._kept_fp32)
            agreed = [(what, str(value), "give it alike on every rank") for what, value in settings.items()]
            agreed += _check_model(model, self.comm, init, self.param_groups, self.dtype)
        except InputError as error:
            agreed = error
        _check_agreement(agreed, self.comm)
        self.comm.owner = _name(self, self.comm)
        self.bucket_bytes = bucket_mb * 2**20
        self._uninitialized, self._filled = self._leave_meta_device(), []

        self.buckets, self.frozen = [], []  # of trainable and of frozen parameters
        self.bucket_of = {}  # parameter -> bucket
        self.handles = []  # of the hooks on the model
        remove_with(self, self.handles)
        self._parameters = list(model.parameters())
        self._trainable = [parameter for parameter in self._parameters if parameter.requires_grad]
        _engine_of.update((id(parameter), self) for parameter in self._parameters)
        self.partition()
        self._place_buffers()
        _check_agreement(self._filled, self.comm, "the check of initial values")
        self.begin_backward()
        for bucket in self.buckets + self.frozen:
            bucket.storages = {
                storage_id(tensor) for tensor in [*bucket.members.values(), bucket.full] if tensor is not None
            }
        self._state_bytes = self._factor = None
        self._backwards = self._reductions = 0  # since the last step
        self._last_step = (1, 1)  # the same of the last step
        self._summed = set()  # the buckets in which it added up 16-bit gradients
        self._uses = Counter()
        self._watch_modules()
        self._buffers_differ = True
        self._failed = self._stepping = self.recording = self.reducing = self.naming = False
        self.optimizer = optimizer(self._shard_groups(param_groups))
        self.optimizer.register_step_pre_hook(Hook(self._before_optimizer))

    # ---- the calls of a training loop -------------------------------------------------------------------------

    @property
    def module(self):
        """The model, safe to read."""
        self.synchronize()
        return self._module

    def __call__(self, *args, **kwargs):
        """The module's own forward; floating inputs are cast to the precision."""
        self.comm.traffic.phase = "forward"
        if self._failed:
            self.synchronize()
            self.zero_grad()
        self._check_parameters()
        self._begin_gradients()
        torch.clear_autocast_cache()  # it keeps casts of weights, whose graph or values may be gone
        self.recording = torch.is_grad_enabled()
        self.begin_forward()
        self._broadcast_buffers()
        try:
            out = self._module(*map_tensors(self._cast, args), **map_tensors(self._cast, kwargs))
            self._find_gradients_in_parts()
            self.end_forward()
        finally:
            self.recording = False
        return out

    def _begin_gradients(self):
        for bucket in self.buckets:
            bucket.reported.clear()

    def _cast(self, tensor):
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def backward(self, loss):
        """Backpropagate a scalar loss; when it returns, the mean gradient is there.

        Several backwards before a step add up, in fp32. It does not divide by their number (DeepSpeed's does): scale
        the loss yourself.
        After an exception the gradients since the last step are dropped.

        Raises:
            InputError: the loss is not a scalar.
        """
        if loss.numel() != 1:
            raise InputError(f"the loss has shape {tuple(loss.shape)}; reduce it to a scalar, by mean() for instance")
        self.comm.traffic.phase = "backward"
        self._check_trainable()
        self._failed = True
        self._begin_gradients()
        self.begin_backward()
        Bucket.scale_of_backward, self.reducing = self._scale, self.syncing
        try:
            (loss if self.loss_scaler is None else loss.float() * self._scale).backward()
        finally:
            # What comes later is of another engine's backward: ranks may disagree on it, so that it waits for step().
            Bucket.scale_of_backward, self.reducing = None, False
        self.finish_backward()
        self._backwards += 1
        self._reductions += self.syncing
        self._failed = False
        self._uses.clear()

    @property
    def _scale(self):
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def step(self):
        """Clip, update the parameters, release the gradients. In fp16 all ranks skip it where any has an overflow.

        Returns:
            StepResult.

        Raises:
            RuntimeError: there was no backward since the last step; or a gradient came under another loss scale than
                this engine's, from another engine's backward or because `loss_scaler` was replaced.
        """
        self._check_parameters()
        self._check_trainable()
        if self._failed:
            self.zero_grad()
        if any(bucket.pending for bucket in self.buckets):  # of another engine's backward, or under no_sync
            self._flush()
        if not all(bucket.has_gradient for bucket in self.buckets):
            raise RuntimeError("step() without a backward() since the last step")
        self.comm.traffic.phase = "step"
        norm, scale, self._factor = None, self._scale, None
        if any(bucket.scales - {scale} for bucket in self.buckets):
            raise RuntimeError(
                "a gradient came under another loss scale than this engine's; in fp16 give each engine a loss of its "
                "own, and replace loss_scaler right after a step"
            )
        if self.loss_scaler is not None:
            if host_value(overflow_flag(self.buckets, self.comm), 0) > 0:
                self.loss_scaler.update(overflow=True)
                self.zero_grad()
                return StepResult(None, skipped=True)
            self._factor = 1 / scale
        if self.clip_norm is not None:
            norm = gradient_norm(self.buckets, self.comm) / scale
            self._factor = (self.clip_norm / (norm + 1e-6)).clamp(max=1.0) / scale
            norm = host_value(norm, 0.0)
        # Nothing may be in flight now: what still is gathered or still holds gradients is a model state, kept.
        live = self.live()
        self._state_bytes = {
            "parameters": storage_bytes(live["parameters"] + live["gathered units"]),
            "gradients": storage_bytes(live["gradients"] + live["buckets in flight"]),
        }
        self._summed = {bucket for bucket in self.buckets if bucket.carried is not None}
        self._last_step = max(1, self._backwards), self._reductions
        self.update()
        # A graph of before this step computes with weights that are gone: its backward raises, as without an engine.
        torch.autograd.graph.increment_version(self._trainable)
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflow=False)
        self.zero_grad()
        return StepResult(norm, skipped=False)

    def _flush(self):
        """Reduce what no backward of this engine has."""
        before, self.syncing = self.syncing, True
        self.finish_backward()
        self.syncing = before
        self._reductions += 1

    def step_shard(self, bucket):
        """Step the optimizer over one bucket's shard. 16-bit gradients are cast to fp32 for it, a bucket at a time."""
        self._failed = True  # until all shards are stepped
        gradient = bucket.mean
        if gradient.dtype != torch.float32:
            gradient = self.comm.scratch(len(gradient), torch.float32).copy_(gradient)
        if self._factor is not None:
            gradient.mul_(self._factor)
        bucket.master.grad, self._stepping = gradient, True
        try:
            self.optimizer.step()  # passes over the shards that have no gradient
        finally:
            bucket.master.grad, self._stepping = None, False
        if bucket.sixteen_bit:
            bucket.stepped.copy_(bucket.master.detach())

    def zero_grad(self):
        """Drop the gradients since the last step."""
        for bucket in self.buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
            bucket.forget()
        self._backwards = self._reductions = 0
        self._uses.clear()
        self._failed = False

    @contextlib.contextmanager
    def no_sync(self):
        """Accumulate gradients on this rank: backwards in this context do not communicate."""
        before, self.syncing = self.syncing, False
        try:
            yield
        finally:
            self.syncing = before

    def train(self, mode=True):
        """Set the module's training mode."""
        self._module.train(mode)
        return self

    def eval(self):
        """Set the module's evaluation mode."""
        return self.train(False)

    # ---- phases that not every stage has ----------------------------------------------------------------------

    def begin_forward(self):
        """Before the module runs."""

    def end_forward(self):
        """After the module ran."""

    def begin_backward(self):
        """Before autograd runs."""

    def synchronize(self):
        """Return when the module's parameters may be read."""

    @contextlib.contextmanager
    def gathered(self, *modules):
        """In this context the weights of `modules` (all, if none is named) are whole on every rank, for reading."""
        self.synchronize()
        yield

    # ---- accounting and files ---------------------------------------------------------------------------------

    def model_state_bytes(self):
        """Bytes of model states on this rank, counted from live storages: parameters, gradients, optimizer.

        Parameters and gradients as they stood just before the last update, the optimizer's states as it left them
        (torch creates them in the first step). None before the first step.
        """
        if self._state_bytes is None:
            return None
        return {**self._state_bytes, "optimizer": storage_bytes(self.live()["optimizer"])}

    def predicted_model_state_bytes(self):
        """The same bytes as `owned` has them: per bucket the elements kept of each state, padding included.

        A step of several backwards holds their sum too, in 16-bit: 4 bytes for each element of the optimizer's part,
        in place of the gradients or, where these are packed in place, beside them. It follows the last step in that.
        """
        predicted = {"parameters": 0, "gradients": 0, "optimizer": 0}
        for bucket in self.buckets + self.frozen:
            owned, itemsize = self.owned(bucket), bucket.kind.dtype.itemsize
            predicted["parameters"] += _length(owned.parameters) * itemsize
            if bucket.kind.trainable:
                per_element, per_tensor = self._optimizer_bytes
                masters = 4 if bucket.sixteen_bit else 0
                summed = bucket in self._summed
                predicted["gradients"] += _length(owned.optimizer) * 4 if summed else 0
                if bucket.packs_in_place or not summed:
                    predicted["gradients"] += _length(owned.gradients) * itemsize
                predicted["optimizer"] += _length(owned.optimizer) * (masters + per_element) + per_tensor
        return predicted

    def predicted_wire_bytes_per_step(self):
        """Bytes this rank sends in a step, by collective: summed from `sends`, padding included.

        In a step of as many backwards as the last one had, and as many of them under `no_sync`.
        """
        predicted, (backwards, reductions) = Counter(), self._last_step
        for bucket in self.buckets + self.frozen:
            shard = bucket.shard_numel * bucket.kind.dtype.itemsize
            for collective, times in self.sends(bucket, reductions).items():
                shards = 2 if collective == "all_reduce" else 1  # a reduce-scatter and an all-gather
                predicted[collective] += times * shards * shard * (self.world_size - 1)
        if self.loss_scaler is not None:
            predicted["all_gather"] += 4 * (self.world_size - 1)  # one fp32 flag for the overflow
        if self.clip_norm is not None and _length(self.owned(self.buckets[0]).optimizer) < self.buckets[0].padded_numel:
            predicted["all_gather"] += 8 * (self.world_size - 1)  # one float64 for the norm
        buffers = sum(distinct(buffer).nbytes for buffer in self._module.buffers()) if self._broadcasts else 0
        predicted["broadcast"] += backwards * buffers * self.comm.broadcast_copies()
        return {collective: sent for collective, sent in sorted(predicted.items()) if sent}

    def live(self):
        """The tensors that this rank holds now, by class: the model states, and what comes and goes within a step."""
        everything = self.buckets + self.frozen
        handles = [h for b in everything for h in (b.handle, b.gathering) if h is not None]
        # What freed weights read as, a number for each, is not counted.
        nothing = {storage_id(b.nothing.numbers) for b in everything if b.nothing is not None}
        parameters = [p for p in self._parameters if storage_id(p) not in nothing]
        live = {
            "gathered units": [b.full for b in everything],
            "parameters": [b.parameters for b in everything] + parameters,
            "gradients": [b.gradients for b in self.buckets] + [b.carried for b in self.buckets],
            "optimizer": [b.master for b in self.buckets if b.sixteen_bit] + list(_tensors_of_state(self.optimizer)),
            "receive buffer": [self.comm.room],
            "buckets in flight": [b.local for b in self.buckets]
            + [total for b in self.buckets for total in b.sums.values()]
            + [b.master.grad for b in self.buckets]
            + [p.grad for p in self._parameters]
            + [tensor for handle in handles for tensor in handle.buffers],
        }
        return {name: [tensor for tensor in tensors if tensor is not None] for name, tensors in live.items()}

    def full_state_dict(self):
        """The whole model on every rank, a collective: keys of model.state_dict(), full tensors on the CPU.

        Parameters that have fp32 master weights come as those, others in their own dtype.
        """
        self.synchronize()
        self._broadcast_buffers()
        values = {}
        for bucket in self.buckets + self.frozen:
            whole = self._whole(bucket)
            for name, parameter in bucket.members.items():
                values[parameter] = bucket.view(whole, name).detach().cpu().clone()
        state = self.state_as_it_stands()
        return {
            key: values[tensor] if tensor in values else tensor.detach().cpu().clone() for key, tensor in state.items()
        }

    def state_as_it_stands(self):
        """model.state_dict() with the parameters and buffers themselves, whole or not: for its keys."""
        self.naming = True
        try:
            return self._module.state_dict(keep_vars=True)
        finally:
            self.naming = False

    def _whole(self, bucket):
        kept = bucket.master.detach() if bucket.kind.trainable and bucket.sixteen_bit else bucket.parameters
        if len(kept) == bucket.padded_numel:
            return kept
        whole = torch.empty(bucket.padded_numel, dtype=kept.dtype, device=kept.device)
        self.comm.all_gather(kept, whole, bucket.name).wait()
        return whole

    def save(self, path, extra=None):
        """Write a checkpoint that any stage at any world size can load. A collective; see `checkpoint.py`."""
        self.synchronize()
        self._broadcast_buffers()
        checkpoint.save(self, path, extra)

    def load(self, path):
        """Read a checkpoint and return its `extra`; drop gradients. A collective; see `checkpoint.py`."""
        self.zero_grad()
        self.synchronize()
        extra = checkpoint.load(self, path)
        torch.autograd.graph.increment_version(self._parameters)
        return extra

    # ---- building ---------------------------------------------------------------------------------------------

    def allocate(self, bucket):
        """Give a bucket the storage that `owned` says this rank keeps, and its initial values."""
        owned, device, dtype = self.owned(bucket), self.comm.device, bucket.kind.dtype
        exact = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype  # masters: unrounded
        whole = torch.zeros(bucket.padded_numel, dtype=exact, device=device)
        with torch.no_grad():
            for name, parameter in bucket.members.items():
                parameter.grad = None  # of a time before the engine
                self.bucket_of[parameter] = bucket
                if name in self._uninitialized:
                    self._fill(f"parameter {name!r}", name, bucket.view(whole, name))
                else:
                    bucket.view(whole, name).copy_(parameter)
        keeps_all = owned.parameters == bucket.whole()
        bucket.parameters = whole.to(dtype) if keeps_all else whole[owned.parameters].to(dtype, copy=True)
        if not bucket.kind.trainable:
            return
        bucket.gradients = torch.zeros(_length(owned.gradients), dtype=dtype, device=device)
        bucket.stepped = bucket.parameters[_within(owned.optimizer, owned.parameters)]
        bucket.master = nn.Parameter(whole[owned.optimizer].clone() if bucket.sixteen_bit else bucket.stepped)
        bucket.reduced = bucket.gradients[_within(owned.optimizer, owned.gradients)]

    def dtype_of(self, name, parameter):
        """What a parameter is kept in: the precision, if it was built in fp32 and `keep_fp32` does not name it."""
        rounded = parameter.dtype == torch.float32 and name not in self._kept_fp32
        return self.dtype if rounded else parameter.dtype

    def watch_gradient(self, bucket, name, parameter):
        """Have `gradient_ready` called when autograd has added up all uses of a trainable parameter in a backward."""
        if bucket.kind.trainable:
            report = Hook(self._report_gradient, name)
            self.handles.append(parameter.register_post_accumulate_grad_hook(report))

    def _report_gradient(self, name, parameter):
        if Bucket.scale_of_backward is None:
            parameter.grad = None
            raise RuntimeError(f"{name!r} got a gradient outside of engine.backward(): write that for loss.backward()")
        self.gradient_ready(self.bucket_of[parameter], name, parameter)

    def _fill(self, what, name, tensor):
        self._init(name, tensor)
        if not self.comm.simulated:
            self._filled.append((what, _checksum(tensor), "init= must fill it alike on every rank"))

    def _leave_meta_device(self):
        """Put parameters of the group's device in the places of meta ones. They have a shape, but no storage yet.

        Returns:
            Their names.
        """
        names = {name for name, parameter in self._module.named_parameters() if parameter.is_meta}
        real = {}  # meta parameter -> the one in its place: what was one object stays one object
        for module in self._module.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    if parameter not in real:
                        nothing = torch.empty((), dtype=parameter.dtype, device=self.comm.device)
                        real[parameter] = nn.Parameter(nothing.expand(parameter.shape), parameter.requires_grad)
                    module._parameters[name] = real[parameter]
        for group in self.param_groups:
            group["params"] = [real.get(parameter, parameter) for parameter in group["params"]]
        return names

    def _place_buffers(self):
        for module_name, module in self._module.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=self.comm.device)
                    qualified = f"{module_name}.{name}" if module_name else name
                    self._fill(f"buffer {qualified!r}", qualified, module._buffers[name])

    def _shard_groups(self, param_groups):
        shards = [[] for _ in self.param_groups]
        for bucket in self.buckets:
            shards[bucket.kind.group].append(bucket.master)
        if param_groups is None:
            return shards[0]
        return [{**group, "params": own} for group, own in zip(self.param_groups, shards, strict=True)]

    def _watch_modules(self):
        for module in self._module.modules():
            own = list(module.parameters(recurse=False))
            if any(parameter.requires_grad for parameter in own):
                self.handles.append(module.register_forward_pre_hook(Hook(self._count_use)))
            if own:
                self.handles.append(module.register_load_state_dict_pre_hook(Hook(self._before_load_state_dict)))

    def _count_use(self, module, args):
        if self.recording and not inside_backward():
            self._uses[module, torch.is_grad_enabled()] += 1

    def _find_gradients_in_parts(self):
        # A reentrant checkpoint runs its forward without recording and backpropagates on its own. So a weight used
        # there and elsewhere gets its gradient in parts, and the bucket must not leave with the first.
        if all(recorded for _, recorded in self._uses):
            return
        uses, reentrant = Counter(), set()
        for (module, recorded), times in self._uses.items():
            for parameter in module.parameters(recurse=False):
                uses[parameter] += times
                reentrant.update(() if recorded else (parameter,))
        for parameter in reentrant:
            if parameter.requires_grad and uses[parameter] > 1:
                self.bucket_of[parameter].fires_in_parts = True

    def _check_parameters(self):
        """Refuse parameters that are no longer those that the engine has made: they would not be trained."""
        names = {parameter: name for name, parameter in self._module.named_parameters()}
        for parameter, name in names.items():
            if parameter not in self.bucket_of:
                raise InputError(f"{name!r} is new, and would not be trained; build the engine after that")
            if storage_id(parameter) not in self.bucket_of[parameter].storages:
                raise InputError(
                    f"{name!r} has left the engine's storage, by model.to() or flatten_parameters() for instance, and "
                    "would not be trained; build the engine after that"
                )
        if len(names) < len(self.bucket_of):
            gone = next(n for bucket in self.buckets + self.frozen for n, p in bucket.members.items() if p not in names)
            raise InputError(f"{gone!r} is no part of the model any more; build the engine after that")

    def _check_trainable(self):
        """Refuse what was frozen or thawed: a frozen weight would still be stepped, a thawed one not be trained."""
        for bucket in self.buckets + self.frozen:
            for name, parameter in bucket.members.items():
                if parameter.requires_grad != bucket.kind.trainable:
                    was = "trainable" if bucket.kind.trainable else "frozen"
                    raise InputError(f"{name!r} was {was} when the engine was built; build another one to change that")

    def _before_load_state_dict(self, module, *_):
        own = [self.bucket_of[p] for p in module.parameters(recurse=False) if p in self.bucket_of]
        if any(bucket.full is not None or (bucket.sixteen_bit and bucket.kind.trainable) for bucket in own):
            raise RuntimeError(
                "load_state_dict() reaches the model's weights, which this engine only makes from those it keeps; load "
                "before the engine is built, or use engine.save() and engine.load()"
            )

    def _before_optimizer(self, *_):
        if not self._stepping:
            raise RuntimeError("engine.optimizer.step() has no gradients to step by; write engine.step()")

    def _broadcast_buffers(self):
        """Give every rank the buffers of rank 0, as torch's DDP does before a forward."""
        buffers = [distinct(buffer) for buffer in self._module.buffers()] if self._broadcasts else []
        self._buffers_differ = self._buffers_differ or self._module.training
        if not buffers or not self._buffers_differ:
            return
        whole = [buffer.detach().clone(memory_format=torch.contiguous_format) for buffer in buffers]
        packed = torch.cat([buffer.view(-1).view(torch.uint8) for buffer in whole])
        self.comm.broadcast(packed, label="the buffers").wait()
        parts = packed.split([buffer.nbytes for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            # Through .data, past autograd's version count: a forward that waits for its backward does not read them.
            buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        self._buffers_differ = self._module.training


_number_of = weakref.WeakKeyDictionary()  # engine -> its number


def _name(engine, comm):
    """What a trace calls an engine beside others: "engine 2's ", the same on all ranks."""
    number = 1 + max(_number_of.values(), default=0)
    if not comm.simulated:
        number = max(comm.gather_objects(number, "the engines' numbers"))  # not every rank has collected the last
    _number_of[engine] = number
    return f"engine {number}'s " if number > 1 else ""


_engine_of = weakref.WeakValueDictionary()  # id of a parameter -> its engine, which holds the parameter


def _refuse_other_optimizers(optimizer, *_):
    if any(id(parameter) in _engine_of for group in optimizer.param_groups for parameter in group["params"]):
        raise RuntimeError(
            f"this {type(optimizer).__name__} is over parameters that an engine trains, and finds no gradients there; "
            "give its factory to the engine, and write engine.step()"
        )


register_optimizer_step_pre_hook(_refuse_other_optimizers)


def host_value(tensor, default):
    """A scalar tensor's value, or `default` where it has none: under fake tensors."""
    return default if isinstance(tensor, FakeTensor) else tensor.item()


def _length(part):
    return part.stop - part.start


def _within(part, kept):
    """The slice `part` of a run, counted from where `kept` begins."""
    return slice(part.start - kept.start, part.stop - kept.start)


def _tensors_of_state(optimizer):
    return (value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))


# ---- checks at the door ---------------------------------------------------------------------------------------


def _check_numbers(clip_norm, bucket_mb):
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"clip_norm={clip_norm}: give a norm above 0, or None not to clip")
    if not bucket_mb > 0:
        raise InputError(f"bucket_mb={bucket_mb}: a bucket needs a size above 0")


def _check_elementwise(optimizer, device):
    """Probe that the optimizer steps 64 elements as it steps their two halves, one after the other, as engines do.

    Returns:
        Bytes of state per element and per tensor; what it is, as text.
    """
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise InputError(
            "optimizer is an optimizer, not a factory; give what builds one over the shards, such as "
            "functools.partial(torch.optim.AdamW, lr=3e-4)"
        )
    generator = torch.Generator().manual_seed(0)
    values, *gradients = torch.randn(4, 64, generator=generator).to(device)
    stepped, state_bytes = {}, {}
    for length in (64, 32):
        parts = [nn.Parameter(part.clone()) for part in values.split(length)]
        try:
            probe = optimizer(parts)
            for gradient in gradients:
                for part, piece in zip(parts, gradient.split(length), strict=True):
                    part.grad = piece.clone()
                    probe.step()
                    part.grad = None
        except Exception as error:
            raise InputError(_not_elementwise(f"it fails on a flat shard: {error}")) from error
        stepped[length] = torch.cat([part.detach() for part in parts])
        state_bytes[length] = storage_bytes(_tensors_of_state(probe)) // len(parts)
    if not host_value((stepped[64] == stepped[32]).all(), True):
        raise InputError(_not_elementwise(f"{type(probe).__name__} steps 64 elements otherwise than their two halves"))
    per_element = (state_bytes[64] - state_bytes[32]) // 32
    return (per_element, state_bytes[64] - 64 * per_element), f"{type(probe).__name__}{_plain(probe.defaults)}"


def _plain(options):
    """Those of an optimizer's options that have the same text in every process that has the same options."""
    options = {name: value.tolist() if torch.is_tensor(value) else value for name, value in options.items()}
    plain = (bool, int, float, str, tuple, list, type(None))
    return {name: value for name, value in options.items() if isinstance(value, plain) and name != "params"}


def _not_elementwise(why):
    return (
        f"the optimizer does not work element by element ({' '.join(why.split())}), so its step on a shard would "
        "depend on what other ranks hold; use AdamW, Adam, SGD, Adagrad or RMSprop"
    )


def _check_groups(model, param_groups):
    trainable = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise InputError("the model has no trainable parameter")
    groups = [{"params": list(trainable)}] if param_groups is None else param_groups
    if not all(isinstance(group, dict) and "params" in group for group in groups):
        raise InputError("param_groups is not a list of dicts that have 'params'; give what torch's optimizers take")
    groups = [{**group, "params": list(group["params"])} for group in groups]
    listed = Counter(parameter for group in groups for parameter in group["params"])
    for parameter, times in listed.items():
        if parameter not in trainable:
            raise InputError("param_groups lists a tensor that is no trainable parameter of the model")
        if times > 1:
            raise InputError(f"param_groups lists {trainable[parameter]!r} {times} times; list it once")
    for parameter, name in trainable.items():
        if parameter not in listed:
            raise InputError(f"param_groups leaves out {name!r}; list it, or freeze it by requires_grad_(False)")
    return groups


def _check_kept(model, keep_fp32):
    """The names of the parameters that `keep_fp32` keeps in fp32."""
    if keep_fp32 is None or isinstance(keep_fp32, (str, type)):
        keep_fp32 = () if keep_fp32 is None else (keep_fp32,)
    classes = tuple(kept for kept in keep_fp32 if isinstance(kept, type))
    names, kept = [entry for entry in keep_fp32 if not isinstance(entry, type)], set()
    for path, module in model.named_modules():
        if isinstance(module, classes):
            kept |= {f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for entry in names:
        named = {name for name in parameters if f".{entry}." in f".{name}."}
        if not named:
            raise InputError(f"keep_fp32 names {entry!r}, and no parameter's name has that between its dots")
        kept |= named
    tensors = {parameters[name] for name in kept}
    return {name for name, parameter in parameters.items() if parameter in tensors}  # under all names of tied ones


def _check_model(model, comm, init, param_groups, dtype):
    """Check this rank's model alone.

    Returns:
        What all ranks must agree on, for each parameter: (what it is, its fingerprint, how to mend a difference).
    """
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta and init is None:
            raise InputError(
                f"{name!r} is on the meta device; give init=, which fills it, or build the model on {comm.device}"
            )
        if not tensor.is_meta and tensor.device != comm.device:
            raise InputError(
                f"{name!r} is on {tensor.device}, the group works on {comm.device}; move the model there first"
            )
    for name, parameter in model.named_parameters():
        if id(parameter) in _engine_of:
            raise InputError(f"{name!r} has an engine already; delete that first, or build a model for each engine")
        if not parameter.is_meta and hollow(parameter):
            raise InputError(
                f"{name!r} has no values of its own, as if a stage-3 engine was deleted; build the model anew"
            )
        if parameter.requires_grad and parameter.dtype not in DTYPES.values():
            raise InputError(f"{name!r} is {parameter.dtype}; build the model in float32")
    built = {parameter.dtype for parameter in model.parameters()}
    if built.isdisjoint({torch.float32, dtype}):
        names = ", ".join(map(str, built))
        raise InputError(f"the model is built in {names}, but its inputs are cast to {dtype}; give its own precision=")
    for name, module in model.named_modules():
        if getattr(module, "sparse", False):
            raise InputError(f"{name!r} makes sparse gradients, which have no place in a bucket; set sparse=False")
    group_of = {parameter: index for index, group in enumerate(param_groups) for parameter in group["params"]}
    how = "build the same model with the same seed on every rank"
    return [
        (f"parameter {name!r}", (group_of.get(parameter), *([] if comm.simulated else _fingerprint(parameter))), how)
        for name, parameter in model.named_parameters()
    ]


def _check_agreement(found, comm, label="the check of the model"):
    """Raise what any rank found wrong on every rank, so that none waits for one that has left.

    Args:
        found: an InputError; or a list of (what it is, a value that ranks must have in common, how to mend it).
    """
    everyone = [found] if comm.simulated else comm.gather_objects(found, label)
    for theirs in everyone:
        if isinstance(theirs, InputError):
            raise theirs
    for rank, theirs in enumerate(everyone):
        pairs = itertools.zip_longest(found, theirs, fillvalue=None)
        first = next(((mine, other) for mine, other in pairs if mine != other), None)
        if first is not None:
            what, _, how = first[0] or first[1]
            values = [line[1] for line in first if line is not None and isinstance(line[1], str)]
            shown = f" ({' and '.join(values)})" if values else ""
            raise InputError(f"{what} differs between rank {comm.rank} and rank {rank}{shown}; {how}")


def _fingerprint(parameter):
    what = (tuple(parameter.shape), str(parameter.dtype), parameter.requires_grad)
    if parameter.is_meta:
        return what
    return (*what, _checksum(parameter))


def _checksum(tensor):
    values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().tobytes())
