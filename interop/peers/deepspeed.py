"""DeepSpeed's ZeRO stages 1, 2 and 3 behind an engine's API. Installed with the extra `peers`."""

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from common import models
from common.engine import StepResult
from common.ranks.collectives import Collectives
from common.tensors import map_tensors, tensors_of_state
from interop.peers.base import Peer, blocks, regroup


class DeepSpeed1(Peer):
    """DeepSpeed with ZeRO stage 1.

    Its optimizer steps a flat shard, a master copy of the parameters in fp32, in fp32 training too. In bf16 gradients
    are reduced in bf16, DeepSpeed's default. A meta-device model is filled whole before DeepSpeed shards it. Buffers
    are each rank's own after the first broadcast. Takes what `EngineBase` takes; `deterministic` has no meaning here.

    Raises:
        NotImplementedError: DeepSpeed is not installed, `process_group` is not the default one, `precision` is "fp16",
            `norm_type` is not 2, or (stages 1 and 2) the model leaves parameters unused.

    Source: Rajbhandari et al., arXiv 1910.02054, and https://www.deepspeed.ai/docs/config-json/
    """

    name, follows = "deepspeed1", "stage1_os"
    settings = "zero_optimization: stage 1, buckets of bucket_mb, otherwise DeepSpeed's defaults"
    precisions = ("fp32", "bf16")
    stage = 1
    sets, zero = {}, {}  # further settings of DeepSpeed's configuration, and of its "zero_optimization"

    def __init__(
        self,
        model,
        optimizer,
        *,
        param_groups=None,
        precision="fp32",
        clip_norm=None,
        norm_type=2.0,
        bucket_mb=25.0,
        process_group=None,
        init=None,
        deterministic=False,
    ):
        self.check_precision(precision, "its loss scaling in fp16 is untried here")
        if process_group not in (None, dist.group.WORLD):
            raise NotImplementedError("DeepSpeed makes its data-parallel group itself, of all ranks")
        if norm_type != 2:
            raise NotImplementedError("DeepSpeed clips by the 2-norm alone")
        device = Collectives(process_group).device
        self._deepspeed = _import_deepspeed(device)
        self._dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        names = {parameter: name for name, parameter in model.named_parameters()}
        if any(tensor.is_meta for tensor in model.parameters()):
            models.materialize(model, init, device)
        if not getattr(model, "uses_every_parameter", True):
            self._expect_unused_parameters(model)
        self.module, self.clip_norm = model, clip_norm
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        elements = max(1, int(bucket_mb * 2**20) // 8) * 2  # DeepSpeed asks for an even number
        self._engine, self._zero, _, _ = self._deepspeed.initialize(
            model=model,
            optimizer=optimizer(regroup(param_groups, names, model) or trainable),
            config=self._config(precision, elements),
        )
        self.optimizer = self._engine.basic_optimizer  # torch's own, over flat shards
        self._last = True  # the next backward is the last before a step
        self._reduced = self._added = False  # since the last step: the last backward, one before it

    def _expect_unused_parameters(self, model):
        raise NotImplementedError(
            "DeepSpeed's stages 1 and 2 put only gradients that are there into a bucket: ranks that use different "
            "parameters send buckets of different sizes, and gloo aborts them"
        )

    def _config(self, precision, bucket_elements):
        return {
            "train_micro_batch_size_per_gpu": 1,  # a label: it scales nothing
            "gradient_accumulation_steps": 1,  # so that backward() divides by nothing
            "gradient_clipping": self.clip_norm or 0.0,
            "bf16": {"enabled": precision == "bf16"},
            "zero_allow_untested_optimizer": True,
            **self.sets,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": bucket_elements,
                "allgather_bucket_size": bucket_elements,
                **self.zero,
            },
        }

    @classmethod
    def versions(cls):
        """The libraries behind it: {name: version}."""
        return {**super().versions(), "deepspeed": importlib.metadata.version("deepspeed")}

    def __call__(self, *args, **kwargs):
        """The module's own forward; floating inputs are cast to the precision, which DeepSpeed leaves to its user."""
        return self._engine(*map_tensors(self._cast, args), **map_tensors(self._cast, kwargs))

    def _cast(self, tensor):
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def backward(self, loss):
        """Backpropagate; DeepSpeed averages gradients meanwhile, and divides by its accumulation steps: by 1.

        Raises:
            NotImplementedError: in stages 1 and 2 a second backward precedes a step, outside `no_sync`.
        """
        if self._reduced and self.stage < 3:
            raise NotImplementedError(
                "in DeepSpeed's stages 1 and 2 a second backward replaces the gradient of the first, unless it was "
                "told that more follow: put all but the last under no_sync()"
            )
        self._engine.set_gradient_accumulation_boundary(self._last)
        self._engine.backward(loss)
        self._reduced, self._added = self._last, self._added or not self._last
        if not self._last:
            self._engine.step()  # DeepSpeed counts micro-batches there; it updates nothing before the last

    def step(self):
        """Clip, step, drop the gradients."""
        self.note_states(self._parameters(), self._gradients())
        self._engine.step()
        self._reduced = self._added = False
        norm = None if self.clip_norm is None else float(self._engine.get_global_grad_norm())
        return StepResult(norm, skipped=False)

    def zero_grad(self):
        """Drop the gradients; in stage 2 a NotImplementedError if some were accumulated under `no_sync`."""
        if self._added and self.stage == 2:
            raise NotImplementedError("DeepSpeed's stage 2 does not drop gradients that no_sync() accumulated")
        self._zero.zero_grad()
        self._reduced = self._added = False

    @contextlib.contextmanager
    def no_sync(self):
        """Accumulate gradients: DeepSpeed still reduces every backward, and adds up the results."""
        self._last = False
        try:
            yield
        finally:
            self._last = True

    def train(self, mode=True):
        """Set the module's training mode."""
        self._engine.train(mode)
        return self

    def full_state_dict(self):
        """The whole model on every rank, a collective: full fp32 tensors on the CPU; buffers are this rank's."""
        state = self.module.state_dict(keep_vars=True)
        master = self._deepspeed.utils.safe_get_full_fp32_param
        masters = {tensor: master(tensor) for tensor in state.values() if tensor.requires_grad}
        with self.gathered():  # what is frozen has no master
            return {name: masters.get(tensor, tensor).detach().cpu().clone() for name, tensor in state.items()}

    def optimizer_tensors(self):
        """The states of this rank's flat shards, and the fp32 masters."""
        return [*self._masters(), *tensors_of_state(self.optimizer)]

    # DeepSpeed has no public way to its flat buffers.

    def _parameters(self):
        return [*self._zero.bit16_groups_flat, *self.module.parameters()]

    def _masters(self):
        return self._zero.single_partition_of_fp32_groups

    def _gradients(self):
        parts = chain.from_iterable(part for part in self._zero.averaged_gradients.values() if part is not None)
        parameters = list(self.module.parameters())
        return [*parts, *(p.grad for p in parameters), *(getattr(p, "grad_accum", None) for p in parameters)]


class DeepSpeed2(DeepSpeed1):
    """DeepSpeed with ZeRO stage 2: gradients are sharded as well."""

    name, follows = "deepspeed2", "stage2_grad"
    settings = "zero_optimization: stage 2, buckets of bucket_mb, otherwise DeepSpeed's defaults"
    stage = 2


class DeepSpeedOffload(DeepSpeed2):
    """DeepSpeed's ZeRO-Offload: stage 2 with the optimizer on the CPU, stepped by its own DeepSpeedCPUAdam.

    It is compiled at first use, which takes a C++ compiler and some minutes.
    """

    name, follows, zero = "deepspeed_offload", "offload", {"offload_optimizer": {"device": "cpu"}}
    settings = (
        "zero_optimization: stage 2, offload_optimizer: cpu, DeepSpeedCPUAdam, buckets of bucket_mb, otherwise "
        "DeepSpeed's defaults"
    )

    def __init__(self, model, optimizer, **options):
        super().__init__(model, partial(_cpu_adam, optimizer), **options)


def _cpu_adam(optimizer, parameters):
    """DeepSpeedCPUAdam with the settings of a torch AdamW."""
    made = optimizer(parameters)
    if type(made) is not torch.optim.AdamW:
        raise NotImplementedError("DeepSpeed offloads its own Adam; others it steps slowly, and warns of that")
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: PLC0415  it compiles itself

    kept = ("params", "lr", "betas", "eps", "weight_decay")
    return DeepSpeedCPUAdam([{name: group[name] for name in kept} for group in made.param_groups], adamw_mode=True)


class DeepSpeed3(DeepSpeed1):
    """DeepSpeed with ZeRO stage 3: parameters are sharded as well, small ones too."""

    name, follows = "deepspeed3", "stage3_param"
    settings = (
        "zero_optimization: stage 3, stage3_param_persistence_threshold 0 (by default parameters below 100,000 "
        "elements stay whole), buckets of bucket_mb, otherwise DeepSpeed's defaults"
    )
    stage, zero = 3, {"stage3_param_persistence_threshold": 0}

    def _expect_unused_parameters(self, model):
        # A leaf is gathered and reduced as a whole: DeepSpeed's own remedy for mixtures of experts.
        for block in blocks(model):
            self._deepspeed.utils.set_z3_leaf_module(block, True)

    @contextlib.contextmanager
    def gathered(self, *modules):
        """A context in which the weights of `modules` (all, if none is named) are gathered, in the precision."""
        wanted = dict.fromkeys(p for module in modules or [self.module] for p in module.parameters())
        with self._deepspeed.zero.GatheredParameters(list(wanted)):
            yield

    def _parameters(self):
        return [*(p.ds_tensor for p in self.module.parameters()), *self.module.parameters()]

    def _masters(self):
        return self._zero.fp32_partitioned_groups_flat

    def _gradients(self):
        return [*super()._gradients(), self._zero.grad_partitions_flat_buffer]


def _import_deepspeed(device):
    if importlib.util.find_spec("deepspeed") is None:
        raise NotImplementedError("DeepSpeed is not installed; install the extra: pip install 'zero-stages[peers]'")
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    local = dist.get_rank() if device.index is None else device.index
    os.environ.setdefault("LOCAL_RANK", str(local))  # DeepSpeed's own launcher would set it
    import deepspeed  # noqa: PLC0415  seconds, and only where it is used

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it reports every setting
    return deepspeed
