"""What all engines share: the calls of a training loop, casts, the optimizer over shards.

A stage's own `engine.py` says what a rank keeps, when it communicates and when it frees. This file, and `backward.py`
beside it, call its phases by name:

    __init__   -> partition -> owned
    engine(x)  -> begin_forward, module, end_forward
    backward   -> begin_backward, (hooks) gradient_ready, reduce; finish_backward
    step       -> update

Checks, building and accounting have modules of their own beside this one, files and snapshots in `common.checkpoint`.
`common/README.md` lists them.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from common.calls import TrainingState, entered
from common.checkpoint.files import Files
from common.checkpoint.snapshots import continue_from, restore, snapshot
from common.engine import building, matrices, validation
from common.engine.accounting import Accounting
from common.engine.backward import Backward
from common.engine.bucket import Bucket
from common.engine.buffers import Buffers
from common.engine.gradients import gradients
from common.engine.guards import Guards, NoModule, engine_of
from common.engine.layout import Kind
from common.engine.master_weights import OptimizerShard
from common.engine.mixed_precision import LossScaler, StepResult, decide
from common.engine.validation import BATCH_NORMS
from common.engine.weight_writes import WeightWrites, gathered
from common.measure.memory import HOST
from common.probes import Options, check_elementwise, groups_of
from common.ranks import trace
from common.ranks.axes import ALONE, Axes
from common.ranks.collectives import Collectives
from common.tensors import Parts, map_tensors


class EngineBase(Backward, Files, NoModule):
    """What the engines share. See a stage's `Engine` for the phases.

    Args:
        model: an nn.Module on the group's device, or on the meta device together with `init`.
        optimizer: a factory, from parameters or param_groups to a torch.optim.Optimizer that works element by
            element (or whole parameter by parameter, see below), such as `functools.partial(torch.optim.AdamW, lr=3e-4,
            fused=True)`; it is called several times, on small probes too. Engines step shard by shard, and `step` sees
            each shard alone. So an optimizer's hooks are refused: to clamp weights, say, override `step`, in a subclass
            or in the factory. Settings that change belong in `param_groups`. None for a model without trainable
            parameters, such as a teacher.
        param_groups: torch's list of dicts over the model's trainable parameters; None is one group. A group with
            `"whole": True` has an optimizer that may look at whole parameters: each flat tensor that it steps has
            `whole`, whose `each` it calls; see `common.engine.matrices` and `common.optim.MuonAdamW`.
        precision: "fp32", "bf16" or "fp16": the dtype that parameters built in fp32 are kept and used in, and that
            floating inputs are cast to. Parameters built in bf16 or fp16 keep theirs; frozen parameters and
            buffers may have any dtype. 16-bit parameters are stepped by fp32 master weights.
        clip_norm: scale the gradient down to this global norm; None does not.
        skip_norm: skip a step, on all ranks, if the gradient's global norm is larger or not finite; `math.inf` skips
            only if it is not finite. None takes every step, except overflows in fp16.
        norm_type: which norm: 2.0, or `math.inf` for the largest element.
        bucket_mb: MiB of a gradient bucket, counted in fp32 in every precision.
        process_group: the data-parallel group; None is the default group.
        init: `init(qualified name, tensor)` fills a meta-device model in place; what it leaves, a file must set first.
        deterministic: sum gradients in rank order with NCCL too. gloo always does.
        keep_fp32: classes of modules, or names (of modules, of parameters, or parts of these between dots), whose
            parameters stay in fp32 in every precision; by default torch's batch norms. Those modules must accept
            inputs in the precision; see `_keep_in_fp32_modules` of your model, if it has it.
        broadcast_buffers: give every rank the buffers of rank 0 before each forward in training, as torch's DDP does.
        model_parallel: an `Axes`, if the model is one part of several on further axes, tensor or pipeline;
            `process_group` then has the ranks that hold the same part.
        reduce_dtype: torch.float32 has NCCL send and add 16-bit gradients in fp32; None, in the gradients' own dtype.
            gloo, and NCCL with `deterministic`, send 16 bits and add in fp32 in any case.

    Attributes:
        loss_scaler: in fp16 a `LossScaler`, which may be replaced by one with other settings; else None.

    Raises:
        InputError: an argument cannot be used; the message says why and how to fix it.
    """

    own_options = ()  # names of a stage's further options, set as attributes
    matches_stage0 = True  # with its options its losses and weights are those of stage 0
    holds_experts = True  # it can hold a part of the experts: a data group of their own shards them
    bucket_class, accounting_class = Bucket, Accounting
    watches = ()  # hooks of units, in stage 3 and after it

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[..., Optimizer] | None,
        *,
        param_groups: list[dict] | None = None,
        precision: str = "fp32",
        clip_norm: float | None = None,
        skip_norm: float | None = None,
        norm_type: float = 2.0,
        bucket_mb: float = 25.0,
        process_group: ProcessGroup | None = None,
        init: Callable[[str, Tensor], object] | None = None,
        deterministic: bool = False,
        keep_fp32: Iterable[str | type] | str | type | None = BATCH_NORMS,
        broadcast_buffers: bool = True,
        model_parallel: Axes | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.precision, self.clip_norm, self.skip_norm, self.norm_type = precision, clip_norm, skip_norm, norm_type
        self.bucket_mb, self.deterministic = bucket_mb, deterministic
        self.broadcast_buffers, self.reduce_dtype = broadcast_buffers, reduce_dtype
        self.comm = Collectives(process_group, deterministic=deterministic, reduce_dtype=reduce_dtype)
        self.rank, self.world_size = self.comm.rank, self.comm.size
        self.axes = model_parallel if isinstance(model_parallel, Axes) else ALONE
        self.loss_scaler = LossScaler() if precision == "fp16" else None
        self._module = model
        if optimizer is None and not any(parameter.requires_grad for parameter in model.parameters()):
            optimizer = partial(torch.optim.SGD, lr=0.0)  # a frozen model takes no step
        # Sets `dtype`, `param_groups` and `counts`, as checked.
        validation.agree(self, optimizer, param_groups, init, keep_fp32, model_parallel)
        self.comm.owner = trace.name_of(self, self.comm)

        self.replicas = self.comm.replicas(self.axes.replica_stride)  # the ranks that hold this rank's experts
        # Buckets of trainable and of frozen parameters, and those that hold gradients and have not been finalized.
        self.buckets, self.frozen, self.filling = [], [], set()
        # {parameter: bucket}; parameters seen in reentrant checkpoints; hooks on the model, removed with the engine.
        self.bucket_of, self.in_checkpoints, self.hooks = {}, set(), []
        weakref.finalize(self, lambda hooks: [hook.remove() for hook in hooks], self.hooks).atexit = False
        self.holders = weakref.WeakSet()  # objects that keep `tensors` on the host for it
        self.state = TrainingState()
        self.updates, self._factor = 0, None  # updates in all, kept in checkpoints; the factor on a step's gradients
        self._initial = building.InitialValues(model, self.param_groups, init, self.comm)
        self.axes.mark(model)
        with self.axes.share_errors():
            self.partition()
        self._initial.place_buffers()
        self._initial.check(self.axes)
        for bucket in self.buckets + self.frozen:
            bucket.note_storages()
        engine_of.update((id(parameter), self) for parameter in self.bucket_of)
        self.exchanges = matrices.exchanges(self.shard_comm, self.buckets)
        self.begin_backward()  # gradients may arrive in another engine's backward first
        self.parts = Parts(model)  # its modules and parameters, to see what a user adds or removes
        self.buffers = Buffers(self.parts, self.comm, broadcast_buffers)
        self.accounting = self.accounting_class(self)
        self.make_optimizer = optimizer
        self.optimizer = building.optimizer_over(self.buckets, optimizer, self.param_groups, param_groups is None)
        self._group_of = groups_of(self.optimizer)
        self.options = Options(self.optimizer, self.counts)  # of its groups: every shard of a step starts from the same
        self.weight_writes = WeightWrites(self.buckets + self.frozen)
        self.guards = Guards(self)

    # ---- the calls of a training loop -------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The model, with its parameters up to date; in stage 3 read them within `gathered()`."""
        self.synchronize()
        return self._module

    @entered("engine()", ordinary=False)  # it may run in torch.inference_mode()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with inputs moved to the engine's device, floating ones cast to the precision."""
        self.comm.traffic.phase = "forward" if torch.is_grad_enabled() else "evaluation"
        self._forget_reported()
        torch.clear_autocast_cache()  # it keeps casts of weights whose graph or values may be gone
        with self.state.running("a forward", records=torch.is_grad_enabled()):
            self.begin_forward()
            self.buffers.before_forward()
            out = self._module(*map_tensors(self._cast, args), **map_tensors(self._cast, kwargs))
            self.end_forward()
        return out

    def _forget_reported(self) -> None:  # of the last backward, which may have failed
        for bucket in self.buckets:
            bucket.reported.clear()

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.comm.device, self.dtype if tensor.is_floating_point() else None)

    @entered("step()")
    def step(self) -> StepResult:
        """Clip, update the parameters, release the gradients; return a `StepResult`.

        In fp16 all ranks skip the step if any has an overflow.

        Raises:
            RuntimeError: there was no backward since the last step; or a gradient has another loss scale than this
                engine's, from another engine's backward or because `loss_scaler` was replaced.
        """
        self.reduce_pending()
        self.comm.traffic.phase = "step"
        self.begin_step()
        self.guards.check_scales()
        result, self._factor = decide(self)
        if not result.skipped:
            self.accounting.before_update()
            self.options.begin()
            self.update()
            self.end_update()
            self.updates += 1
            self.weights_changed(self.buckets)
        self.drop_gradients()
        return result

    def end_update(self) -> None:
        """Once all shards are stepped: finish cut matrices, and compare options that changed, such as a count."""
        matrices.finish(self.exchanges, OptimizerShard.finish)
        shards = sum(len(bucket.optimizer_shards) for bucket in self.buckets)
        self.options.end(shards, [self.comm, *self.axes.by_name.values()])

    def weights_changed(self, buckets: list[Bucket] | None = None) -> None:
        """The engine itself has changed weights of these buckets, or all: accept it, gather anew what is held."""
        self.weight_writes.made(self.buckets + self.frozen if buckets is None else buckets)
        self.regather()
        self.weight_writes.renew()

    @property
    def takes_norm(self) -> bool:
        return self.clip_norm is not None or self.skip_norm is not None

    def reduce_pending(self) -> None:
        """Reduce what no backward has reduced: gradients of backwards under no_sync, or of other engines."""
        if any(bucket.pending for bucket in self.buckets):
            self.finish_backward()
            self.accounting.reductions += 1

    def step_shard(self, shard: OptimizerShard) -> None:
        """Step one `OptimizerShard`, with its gradient cast to fp32: the optimizer has no other for this one call."""
        self.state.failed = True  # until the gradients are dropped, which ends the step
        gradient, lender = shard.mean, shard.tier or self.comm  # which lends memory for a copy
        if gradient.dtype != torch.float32:
            gradient = lender.scratch(len(gradient), torch.float32).copy_(gradient)
        if self._factor is not None:
            gradient.mul_(self._factor)
        shard.master.grad = gradient
        try:
            shard.step(self.optimizer, shard.master, partial(self._step_alone, self._group_of[shard.master]))
        finally:
            shard.master.grad = None
            if shard.is_apart:  # after an exception too
                shard.stepped.copy_(shard.master.detach())

    def _step_alone(self, group: int, weights: Tensor) -> None:
        with self.options.alone(weights, group):
            self.call_optimizer()

    def call_optimizer(self) -> None:
        """Call `optimizer.step()`; with offload an empty one, for schedulers to count: shards step elsewhere."""
        self.state.steps_optimizer = True
        try:
            self.optimizer.step()
        finally:
            self.state.steps_optimizer = False

    @entered("zero_grad()")
    def zero_grad(self) -> None:
        """Drop the gradients since the last step, as `zero_grad` of the optimizer and of the whole module do."""
        self.drop_gradients()

    def drop_gradients(self) -> None:
        if self.state.failed:  # shards may have been stepped, all of them or a part
            self.weight_writes.accept_all()
        for bucket in self.buckets:
            bucket.drop()
        self.accounting.forget()
        self.state.failed = False

    def train(self, mode: bool = True) -> Self:
        self._module.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)

    # ---- methods that are functions of other modules -------------------------------------------------------------

    make_buckets, allocate, dtype_of = building.make_buckets, building.allocate, building.dtype_of
    initial_states = building.initial_states
    gathered, gradients = gathered, gradients
    snapshot, restore, continue_from = snapshot, restore, continue_from

    # ---- phases that only some stages have --------------------------------------------------------------------

    def check_optimizer(self, optimizer: Callable[..., Optimizer]) -> tuple:
        """Validate that it can step on the device of its states; see `probes.check_elementwise`."""
        return check_elementwise(optimizer, self.comm.device)

    def begin_forward(self) -> None:
        """Before the module runs."""

    def end_forward(self) -> None:
        """After the module ran."""

    def begin_backward(self) -> None:
        """Before autograd runs."""

    def regather(self) -> None:
        """Weights have changed while contexts hold them gathered."""

    def begin_step(self) -> None:
        """Before the step decides whether to update."""

    def synchronize(self) -> None:
        """Return when the module's parameters may be read."""

    def wait_in_flight(self) -> None:
        """Wait for what is in flight, and begin nothing."""
        self.synchronize()

    @property
    def shard_comm(self) -> Collectives:
        """The Collectives of the ranks whose shards make up one copy of everything: all ranks, or a node's."""
        return self.comm

    def comm_of(self, kind: Kind) -> Collectives:
        """The Collectives of the ranks whose shards make up one copy of a bucket."""
        return self.shard_comm if kind.replica_stride == 1 else self.replicas

    @contextlib.contextmanager
    def unsharded(self, buckets: list[Bucket]) -> Iterator[None]:
        """A context in which every rank has the full parameters of these buckets."""
        self.synchronize()
        yield

    # ---- accounting -------------------------------------------------------------------------------------------

    def model_state_bytes(self) -> dict[str, int] | None:
        """Bytes of model states on this rank, counted from live storages: parameters, gradients, optimizer.

        Parameters and gradients are counted just before the last update, the optimizer's states after it (torch
        creates them in the first step). None before the first step.
        """
        return self.accounting.held()

    def predicted_model_state_bytes(self) -> dict[str, int]:
        """The same bytes, computed from `owned`: per bucket the elements kept of each state, padding included.

        In 16-bit a step of several backwards also holds their sum: 4 bytes per element of the optimizer shard, in
        place of the 16-bit mean or, in stages 0 and 1, in addition to it. It assumes a step like the last one.
        """
        return self.accounting.predicted_held()

    def predicted_wire_bytes_per_step(self) -> dict[str, int]:
        """Bytes this rank sends in a step, by collective: summed from `sends`, padding included.

        The step has as many backwards as the last one, as many of them under `no_sync`, and forwards like its last one.
        Not predicted: a unit that is prefetched but does not run, because a forward takes another path than the one
        before, and further gathers of a unit that runs several times with others between.
        """
        return self.accounting.predicted_sent()

    def live(self) -> dict[str, list]:
        """The tensors that this rank holds now, by class: the model states, and those that live within a step."""
        live = self.accounting.live()
        for holder in filter(None, (*self.holders, self.saving)):
            live[HOST] = live.get(HOST, []) + list(holder.tensors)
        return live
