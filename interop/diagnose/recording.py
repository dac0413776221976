"""In the ranks: run a user's function with an engine, and record what it computes, step by step."""

import contextlib
import functools
import gc
import hashlib
import importlib.util
import inspect
import io
import math
import os
import pickle
import random
import re
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from common.errors import InputError
from common.ranks.collectives import Collectives
from common.ranks.nodes import timeout_of
from common.tensors import tensors_in
from interop.peers.plain import AverageAfterBackward

MODULE = "diagnosed"  # what the user's file is called among Python's modules
FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$')


class Enough(BaseException):
    """Ends a function after the last step that is asked for. It is no Exception, so a function does not catch it."""


def record(world, target, made, steps, folder, *, reads=True, seeded=False, every_parameter=True):
    """Run the function of "train.py:train" with an engine's class for so many steps, on one rank.

    Args:
        folder: stores every tensor once, under its digest; shared by all runs.
        reads: read all weights after every step; else only after the last, as reading may update stale weights.
        seeded: seed all generators first.
        every_parameter: tells DDP that the model uses each of its parameters in every step.

    Returns:
        A dict: "steps", what each step computed, of which the first is the engine as it was built; and facts about the
        model and the engine.

    Raises:
        InputError: the file has no such function, or it does not train as it should.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # what one run compiled counts towards a limit
    if seeded:
        seed()
    recorder = Recorder(world, made, steps, Path(folder), reads, every_parameter)
    with the_script(world, target) as function:
        gc.freeze()  # what was there before need not be looked through
        try:
            function(recorder.make)
            recorder.end()
        except Enough:
            pass
        finally:
            recorder.engine = None
            gc.collect()  # what was made, an engine's buffers and files for instance
            gc.unfreeze()
    return recorder.found


def seed():
    """Seed every generator that a script may draw from."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def generators():
    """A digest of the state of every generator that a script may draw from."""
    states = [torch.get_rng_state().numpy().tobytes(), pickle.dumps(random.getstate())]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state().numpy().tobytes())
    if "numpy" in sys.modules:
        states.append(pickle.dumps(sys.modules["numpy"].random.get_state()))
    return [hashlib.sha256(state).hexdigest() for state in states]


@contextlib.contextmanager
def the_script(world, target):
    """The function, from its file run anew; the environment is torchrun's, and output is discarded.

    Raises:
        InputError: the file has no such function, or one that takes other arguments.
    """
    file, _, name = target.rpartition(":")
    torchrun = {"RANK": str(world.rank), "LOCAL_RANK": str(world.rank), "WORLD_SIZE": str(world.size)}
    path = [str(Path(file).resolve().parent), *sys.path]
    spec = importlib.util.spec_from_file_location(MODULE, file)
    module = sys.modules[MODULE] = importlib.util.module_from_spec(spec)
    try:
        given = mock.patch.dict(os.environ, torchrun), mock.patch.object(sys, "path", path)
        with given[0], given[1], contextlib.redirect_stdout(io.StringIO()):
            spec.loader.exec_module(module)
            yield checked(getattr(module, name, None), target)
    finally:
        del sys.modules[MODULE]


def checked(function, target):
    """The function, if it can be called with an engine's class alone."""
    name = target.rpartition(":")[2]
    if not callable(function):
        raise InputError(f"{target}: the file has no function {name}")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise InputError(
            f"{target}: {name}{inspect.signature(function)} cannot be called with one argument ({error}); write "
            f"def {name}(Engine), and build Engine(model, optimizer, ...) in it"
        ) from error
    return function


def taken(made, options):
    """Those of the options that an engine's class takes."""
    inits = [inspect.signature(kind.__init__).parameters for kind in made.__mro__ if "__init__" in vars(kind)][:-1]
    if inits and any(parameter.kind is parameter.VAR_KEYWORD for parameter in inits[-1].values()):
        return dict(options)
    return {name: value for name, value in options.items() if any(name in parameters for parameters in inits)}


def new_step():
    """What is noted while a step is computed."""
    return {name: [] for name in ("losses", "random", "sizes", "drawn", "options")}


class Recorder:
    """Gives the user's function an engine, and records what it does in `found`, which `record` returns."""

    def __init__(self, world, made, steps, folder, reads, every_parameter):
        self.world, self.made, self.steps, self.folder, self.reads = world, made, steps, folder, reads
        self.every_parameter, self.is_plain = every_parameter, issubclass(made, AverageAfterBackward)
        self.engine, self.used, self.at_first = None, set(), generators()
        self.step, self.found = new_step(), {"steps": [], "unused": []}

    def make(self, model, optimizer, **options):
        """The engine, as the user's function builds it. A norm is always computed; to clip to infinity changes no bit.

        Raises:
            InputError: the function builds a second engine.
        """
        if self.engine is not None:
            raise InputError("the function builds a second engine; diagnose compares functions that build one")
        model.uses_every_parameter = self.every_parameter  # for `interop.peers.TorchDDP`
        given = taken(self.made, options)
        self.found |= {
            "precision": options.get("precision", "fp32"),
            "compiled": any(is_compiled(module) for module in model.modules()),
            "not_taken": sorted(options.keys() - given.keys()),
            "quantizes": getattr(self.made, "quantizes", False),
        }
        clips = {} if given.get("clip_norm") is not None else {"clip_norm": math.inf}
        self.engine = watched(self.made, self)(model, optimizer, **{**given, **clips})
        trained = {name: p for name, p in self.engine.module.named_parameters() if p.requires_grad}
        self.found |= {"trained": list(trained), "buffers": [name for name, _ in self.engine.module.named_buffers()]}
        for name, parameter in trained.items() if self.is_plain else ():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self.used.add(name))
        self._note(None, reads=True)
        return self.engine

    @contextlib.contextmanager
    def running(self, inputs):
        """A forward."""
        if self.is_plain and self.found["buffers"]:
            self.meet("calls engine()")  # which sends them
        before = self._drawn()
        yield
        if torch.is_grad_enabled():
            self.step["sizes"].append(next((tensor.numel() for tensor in tensors_in(inputs)), 0))
            self.step["drawn"] += [now for now, was in zip(self._drawn(), before, strict=True) if now != was]

    def losing(self, loss):
        """Before a backward."""
        if self.is_plain and self.engine.sync_gradients:
            self.meet("calls backward()")
        self.step["losses"].append(loss.detach().double().item() if loss.numel() == 1 else math.nan)
        self.step["random"].append(self._drawn())
        self._note_options()

    def stepping(self):
        """Before a step."""
        self.meet("calls step()")
        self._note_options()

    def meet(self, call):
        """Before a call in which ranks wait for each other: an InputError unless all make the same call."""
        calls = beside().gather_objects(call, "what ranks call")
        other = next((rank for rank, theirs in enumerate(calls) if theirs != calls[0]), None)
        if other is not None:
            raise InputError(
                f"in step {len(self.found['steps'])} rank 0 {calls[0]}, and rank {other} {calls[other]}; give every "
                "rank as many batches, and have all call the engine alike"
            )

    def stepped(self, result):
        """After a step; the last raises Enough."""
        self._note(result, reads=self.reads or len(self.found["steps"]) == self.steps)
        if self.is_plain:
            self.found["unused"].append([name for name in self.found["trained"] if name not in self.used])
            self.used.clear()
        if len(self.found["steps"]) > self.steps:
            raise Enough

    def _note(self, result, reads):
        self.step["random"].append(self._drawn())
        told = {"norm": getattr(result, "norm", None), "skipped": getattr(result, "skipped", False)}
        self.found["steps"].append({**self.step, **told, "weights": self._weights() if reads else None})
        self.step = new_step()

    def _note_options(self):
        groups = self.engine.optimizer.param_groups if self.is_plain else ()
        told = [{name: f"{value}" for name, value in group.items() if name != "params"} for group in groups]
        self.step["options"].append(told)

    def _drawn(self):
        """The states of generators; None for an unused one, which differs between processes."""
        pairs = zip(generators(), self.at_first, strict=False)
        return [None if now == first else now for now, first in pairs]

    def _weights(self):
        """{name: digest} of all weights, and of the buffers as this rank has them, which full_state_dict() may send."""
        own = {name: buffer.detach().clone() for name, buffer in self.engine.module.named_buffers()}
        state = {name: value for name, value in self.engine.full_state_dict().items() if torch.is_tensor(value)}
        return {name: self._keep(own.get(name, tensor)) for name, tensor in state.items()}

    def _keep(self, tensor):
        """Write a tensor under its digest, unless it is there; return the digest."""
        whole = tensor.detach().cpu().contiguous()
        digest = hashlib.sha256(f"{whole.dtype} {list(whole.shape)}".encode())
        digest.update(whole.reshape(-1).view(torch.uint8).numpy())
        path = self.folder / digest.hexdigest()
        if not path.exists():
            half = path.with_suffix(f".{self.world.rank}")
            torch.save(whole.clone(), half)
            half.replace(path)  # another rank may write the same
        return path.name

    def end(self):
        """The function has returned.

        Raises:
            InputError: another rank still runs, and would wait for this one; or no step was made.
        """
        if len(self.found["steps"]) < 2:
            raise InputError(f"on rank {self.world.rank} the function ends without a step() of its engine")
        self.meet("returns")
        last = self.found["steps"][-1]
        last["weights"] = last["weights"] or self._weights()


@functools.cache
def beside():
    """Collectives of a group of its own, in which ranks tell each other what they call."""
    return Collectives(dist.new_group(backend="gloo", timeout=timeout_of(dist.group.WORLD)))


def watched(made, recorder):
    """A subclass of an engine's class, whose calls a recorder notes."""

    class Watched(made):
        def __call__(self, *args, **kwargs):
            with recorder.running((args, kwargs)):
                return super().__call__(*args, **kwargs)

        def backward(self, loss):
            recorder.losing(loss)
            return super().backward(loss)

        def step(self):
            recorder.stepping()
            result = super().step()
            recorder.stepped(result)
            return result

    Watched.__name__, Watched.__qualname__, Watched.__module__ = made.__name__, made.__qualname__, made.__module__
    return Watched


def is_compiled(module):
    """Whether a module is compiled, by torch.compile(module) or module.compile(). torch has no public way to ask."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def in_one_line(failure, file):
    """What a RankFailed says, in one line: the innermost frame in a file, and the error.

    If no frame is in the file, the call itself was wrong or a library failed at once: then the innermost frame of all.
    """
    lines = str(failure).splitlines()
    frames = [(number, match) for number, match in ((n, FRAME.match(line)) for n, line in enumerate(lines)) if match]
    if not frames:
        return " ".join(str(failure).split())
    own = Path(file).resolve()
    inside = [match for _, match in frames if Path(match["file"]).resolve() == own] or [frames[-1][1]]
    said = [line for line in lines[frames[-1][0] + 1 :] if line.strip() and not line.startswith(" ")]
    frame = inside[-1]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}: {' '.join(said[:1])}"
