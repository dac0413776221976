"""How gradients come to an engine: its own backward, or one that another runs, such as a pipeline's schedule."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor

from common.calls import entered, entering
from common.engine.mixed_precision import running_backward
from common.engine.reentrant import mark_gradients_in_parts
from common.errors import InputError
from common.tensors import graph_nodes_made


class Backward:
    nodes_used = 0  # the count of graph nodes when the last one ended

    @entered("backward()")
    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Backpropagate a scalar loss and, unless under `no_sync`, reduce the gradients to their mean.

        Several backwards before a step add up, in fp32. The sum is not divided by their number (DeepSpeed's is): scale
        the loss yourself.
        After an exception the gradients since the last step are dropped.

        Args:
            loss: a scalar tensor.
            retain_graph: keep the graph for another backward, of this loss or of one that shares a part of it.

        Raises:
            InputError: the loss has more than one element.
        """
        if loss.numel() != 1:
            raise InputError(f"the loss has shape {tuple(loss.shape)}; reduce it to a scalar, by mean() for instance")
        with self.receiving_gradients([loss], retain_graph):
            self.scaled(loss).backward(retain_graph=retain_graph)

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def scaled(self, loss: Tensor) -> Tensor:
        """A loss times the loss scale, in fp16: what is to be backpropagated."""
        return loss if self.loss_scaler is None else loss.float() * self._scale

    @contextlib.contextmanager
    def receiving_gradients(self, outputs: Iterable[Tensor], retain_graph: bool = False) -> Iterator[None]:
        """A context for one backward of `outputs`, tensors, that the caller runs: all that `backward` does but that.

        In fp16 it begins from a loss that is `scaled`.
        """
        state = self.state
        with entering(self, "receiving_gradients()"):
            self.comm.traffic.phase = "backward"
            state.failed, state.unfinished, state.retains_graph = True, state.syncs, retain_graph
            self._forget_reported()
            for output in outputs:
                mark_gradients_in_parts(output)
            self.begin_backward()
            state.reduces = state.syncs
            before, running_backward.loss_scale = running_backward.loss_scale, self._scale
            try:
                with state.running("a backward"):
                    yield
                if state.syncs:
                    self.finish_backward()
            except RuntimeError as error:
                self.guards.name_freed(error)
                raise
            finally:
                # Later gradients come from another engine's backward: ranks may disagree on it, so they wait.
                state.reduces = state.retains_graph = False
                running_backward.loss_scale = before
            self.accounting.backwards += 1
            self.accounting.reductions += state.syncs
            state.failed, state.unfinished, self.nodes_used = False, None, graph_nodes_made()
        self.in_checkpoints.clear()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank: backwards in this context do not communicate."""
        before, self.state.syncs = self.state.syncs, False
        try:
            yield
        finally:
            self.state.syncs = before

    def _report_gradient(self, bucket, name, parameter):
        """A parameter's hook: its gradient has come. `bucket` is a weak reference: a hook keeps nothing alive."""
        bucket = bucket()
        if parameter.grad is None:
            return  # as from a reentrant checkpoint of a constant
        if running_backward.loss_scale is None:
            parameter.grad, self.state.failed, self.state.unfinished = None, True, False
            raise RuntimeError(f"{name!r} got a gradient outside of engine.backward(): write that, not loss.backward()")
        if bucket.values is not None and bucket.are_freed:
            parameter.grad = None
            raise RuntimeError(
                f"{name!r} was read outside the forward of {bucket.unit.name or 'the model'!r}, and is freed by now: "
                "call that module, or hold it by gathered() until backward ends"
            )
        self.gradient_ready(bucket, name, parameter)
        if self.comm.device.type == "cuda":  # the bucket's collective waits for this stream too
            self.comm.lane.wait_for_caller()
