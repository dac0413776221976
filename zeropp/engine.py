"""ZeRO++: stage 3 that sends less between nodes: parameters in 8 bits, gradients in 4, and each node keeps a copy.

Each switch changes how a unit's parameters are gathered or its gradients are reduced, and nothing else. With
all of them off this is stage 3, bit for bit.

Phases of a step, over N ranks in nodes of P, and Ψ parameters of 16 bits, M = 2 Ψ bytes; what a node sends to others:

    1. gather            forward     before a unit runs: all-gather its parameters           M, stage 3
       prefetch          forward     and begin with those of the unit after it               M/2, `quantize_weights`
    2. free              forward     when the next unit begins: free its parameters
    3. gather, prefetch  backward    the same, in the order of backward                      M, stage 3
                                                                                             0, `hierarchical`
    4. gradient_ready    backward    a gradient moves into its unit's buffer; the first allocates it
    5. reduce, free      backward    after a unit's backward: reduce-scatter to the mean     M, stage 3
                                                                                             M/4, `quantize_gradients`
    6. finish_backward   backward    reduce what is missing, wait for all
    7. update            step        every rank steps its shard, Ψ/N parameters; the nodes' copies are out of date

qwZ, `quantize_weights`, gathers shards as int8 with a scale for each block of them. hpZ, `hierarchical`, keeps a
secondary shard on each rank, of the node's own copy of the parameters: the first gather after an update fills it, and
the others stay inside the node. qgZ, `quantize_gradients`, reduces in two hops, inside the node and across, as int4.
Each of them is a strategy in `transports.py`; the engine calls `bucket.gather_with` and `bucket.reduce_with`.

The unit that ends the forward begins the backward, so it stays gathered in between, as does the last unit inside it,
and needs no second gather. `keep_last=False` frees them too, as in the paper.

Source: ZeRO++, arXiv 2306.10209. Model states with Adam: 16/N Ψ bytes, 2/P Ψ more with `hierarchical`, and with
`error_feedback` 2 Ψ and 2/P Ψ more, in 16-bit.
"""

import stage3_param
from common.engine import units
from common.errors import InputError
from common.ranks import nodes
from zeropp.transports import OwnedBesides, QuantizedAccounting, RoutedBucket, Strategies


class Engine(stage3_param.Engine):
    """Stage 3 with quantized weights, a copy of them in each node, and quantized gradients.

    Takes what stage 3 takes.

    Args:
        quantize_weights: qwZ: parameters are sent as int8.
        hierarchical: hpZ: all gathers between two updates except the first stay inside the node.
        quantize_gradients: qgZ: gradients are sent as int4, inside the node and then across.
        error_feedback: the rounding error of a gradient is added to the next one.
        block: elements that share a scale, an even number.
        ranks_per_node: how many consecutive ranks share a node; None for torchrun's LOCAL_WORLD_SIZE, or all ranks.

    Raises:
        InputError: `block` is odd or below 2, `error_feedback` lacks `quantize_gradients`, `ranks_per_node` does not
            divide the world size, or None is given and nodes have unequal numbers of ranks.
    """

    exact, quantizes = False, True  # by default: its losses are compared, not its bits
    bucket_class, accounting_class = RoutedBucket, QuantizedAccounting
    switches = ("quantize_weights", "hierarchical", "quantize_gradients", "error_feedback", "block")
    holds_experts = False
    own_options = (*switches, "ranks_per_node", *stage3_param.Engine.own_options)

    def __init__(
        self,
        model,
        optimizer,
        *,
        quantize_weights=True,
        hierarchical=True,
        quantize_gradients=True,
        error_feedback=False,
        block=256,
        ranks_per_node=None,
        **options,
    ):
        self.quantize_weights, self.hierarchical = quantize_weights, hierarchical
        self.quantize_gradients, self.error_feedback = quantize_gradients, error_feedback
        self.block, self.ranks_per_node = block, ranks_per_node
        self.matches_stage0 = not (quantize_weights or quantize_gradients)
        super().__init__(model, optimizer, **options)

    def owned(self, bucket):
        """The ownership table: what stage 3 keeps, the node's secondary shard, and rounding errors of gradients."""
        secondary = bucket.gather_with.secondary(bucket)
        residuals = bucket.reduce_with.residuals(bucket) if bucket.kind.trainable else ()
        return OwnedBesides(**vars(super().owned(bucket)), secondary=secondary, residuals=residuals)

    def sends(self, bucket, reductions):
        """The traffic table: stage 3's collectives over a bucket, as the strategies run them."""
        times = super().sends(bucket, reductions)
        gathers, reductions = times["all_gather"], times["reduce_scatter"]
        return {**bucket.gather_with.sends(bucket, gathers), **bucket.reduce_with.sends(bucket, reductions)}

    def partition(self):
        """Before training: choose the strategies by the switches, and cut the model as stage 3 does."""
        nodes.check_even(self.comm, self.ranks_per_node)
        self.strategies = Strategies(self.comm, **{switch: getattr(self, switch) for switch in self.switches})
        super().partition()

    def make_units(self):
        """Cut the model into units as stage 3 does. What is quantized has buckets of its own, of whole blocks."""
        options = self.param_groups, self.dtype_of, self.world_size, self.bucket_class
        return units.make_units(self._module, *options, block_of=self.block_of)

    def block_of(self, name, parameter):
        """The elements of a parameter that share a scale; 1 if it is sent unquantized.

        That is what `keep_fp32` names, what has another dtype than the engine's, vectors, and matrices shorter than a
        block.
        """
        small = max(parameter.shape, default=1) == parameter.numel() or parameter.numel() < self.block
        exact = self.matches_stage0 or small or name in self._kept_fp32
        return 1 if exact or self.dtype_of(name, parameter) != self.dtype else self.block

    def allocate(self, bucket):
        """What a bucket keeps depends on its strategies."""
        bucket.gather_with, bucket.reduce_with = self.strategies.of(bucket)
        super().allocate(bucket)

    # ---- parameters come, gradients go ------------------------------------------------------------------------

    def all_gather(self, bucket):
        """Phase 1, by qwZ and hpZ; exact if the unit is pinned, because its values are read."""
        strategy = self.strategies.exact if bucket.unit.pins else bucket.gather_with
        return strategy.gather(bucket)

    def reduce_scatter(self, bucket):
        """Phase 5, by qgZ."""
        return bucket.reduce_with.reduce(bucket, self._scale)

    def pin(self, unit):
        """Gather a unit unrounded and keep it gathered until `unpin` has been called as often."""
        if unit.pins == 0:
            unit.whole_before, unit.shown_before = unit.whole, unit.shown
            self.free(unit)
        unit.pins += 1
        self.unshard(unit, units.PrefetchOrder())

    def unpin(self, unit):
        """Undo a `pin`. A unit that was gathered before is gathered as it was: a backward may wait for it."""
        super().unpin(unit)
        if unit.whole_before and unit.pins == 0:
            self.free(unit)
            self.gather(unit)
            if unit.shown_before:
                self.unshard(unit, units.PrefetchOrder())

    # ---- step -------------------------------------------------------------------------------------------------

    def begin_step(self):
        super().begin_step()
        self.strategies.begin_step()

    def update(self):
        """Phase 7. Each rank steps its shards. The nodes' copies of the parameters are out of date."""
        self.free_all()
        for bucket in self.buckets:
            bucket.gather_with.outdate(bucket)
            bucket.reduce_with.mark_used(bucket)
            self.step_shard(bucket.optimizer_shard)

    def begin_load(self):
        """Before the parameters are read from a file: the rounding errors belong to earlier gradients."""
        super().begin_load()
        for bucket in self.buckets:
            for residual in bucket.residuals:
                residual.zero_()

    def check_optimizer(self, optimizer):
        """Validate the options and nodes, and refuse an optimizer that does not work element by element."""
        check_options(self.block, self.error_feedback, self.quantize_gradients)
        if self.ranks_per_node is not None:
            self.comm.ranks_per_node = nodes.check_ranks_per_node(self.ranks_per_node, self.world_size)
        return super().check_optimizer(optimizer)


def check_options(block, error_feedback, quantize_gradients):
    """Validate the options.

    Raises:
        InputError: `block` is odd or below 2, or `error_feedback` lacks `quantize_gradients`.
    """
    if block < 2 or block % 2:
        raise InputError(f"block {block!r}: give an even number of elements that share a scale, 256 for instance")
    if error_feedback and not quantize_gradients:
        raise InputError("error_feedback: only gradients that are quantized leave a residual; add quantize_gradients")
