"""What a plain loop does where an engine makes a call: every call of an engine, written out over whole weights."""

import contextlib
import copy
from pathlib import Path

import torch
from baseline import AverageAfterBackward


class LoopWithCalls(AverageAfterBackward):
    """The loop of `AverageAfterBackward`, with the rest of an engine's calls.

    Attributes:
        reduces_at_once: average in every backward, under `no_sync` too, as stages 2 and 3 do.
    """

    reduces_at_once = False

    @torch.inference_mode(False)
    def step(self):
        result = super().step()
        torch.autograd.graph.increment_version(list(self.masters))  # 16-bit ones are written through .data
        return result

    @contextlib.contextmanager
    def no_sync(self):
        before, self.sync_gradients = self.sync_gradients, self.reduces_at_once
        try:
            yield
        finally:
            self.sync_gradients = before

    @contextlib.contextmanager
    def receiving_gradients(self, outputs, retain_graph=False):
        yield
        self.collect()
        if self.sync_gradients:
            self.average()

    @contextlib.contextmanager
    def gathered(self, *modules, write=False):
        yield
        if write:
            self.keep_written()

    @torch.no_grad()
    def keep_written(self):
        """Masters follow the 16-bit weights that were written; the others keep their digits."""
        for parameter, master in self.masters.items():
            if master is not parameter:
                master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))

    @contextlib.contextmanager
    def gradients(self, *modules, write=False):
        self.collect()
        self.average()
        yield {name: self.total[p] for name, p in self.module.named_parameters() if p in self.total}

    def note_states(self, parameters, gradients):
        """Nothing is counted."""

    def state(self):
        masters = [master.detach().clone() for master in self.masters.values()]
        return masters, copy.deepcopy(self.module.state_dict()), copy.deepcopy(self.optimizer.state_dict())

    snapshot = state

    @torch.inference_mode(False)
    @torch.no_grad()
    def restore(self, state):
        self.zero_grad()
        masters, module, optimizer = copy.deepcopy(state)
        self.module.load_state_dict(module)
        for master, values in zip(self.masters.values(), masters, strict=True):
            master.copy_(values)
        self.optimizer.load_state_dict(optimizer)

    @torch.inference_mode(False)
    def continue_from(self, old):
        buffers = [buffer.clone() for buffer in self.module.buffers()]
        self.restore(old.state())
        for buffer, own in zip(self.module.buffers(), buffers, strict=True):
            buffer.copy_(own)

    def save(self, path, extra=None, wait=True):
        Path(path).mkdir(parents=True, exist_ok=True)
        super().save(path, extra)

    @torch.inference_mode(False)
    def load(self, path):
        return super().load(path)

    @torch.inference_mode(False)
    @torch.no_grad()
    def load_weights(self, values):
        self.zero_grad()
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            self.masters.get(tensor, tensor).copy_(values[name])
            tensor.copy_(values[name])
