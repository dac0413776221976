"""Models of the zoo or a user's own, and functions by name."""

import importlib
import inspect
import tomllib
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import fake_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from common import models
from common.errors import InputError
from common.models.gpt import GPT, GPTConfig
from common.models.llama import Llama, LlamaConfig

PRESETS = tomllib.loads((Path(__file__).parents[1] / "plan/models.toml").read_text())  # shapes that people train
LENGTH = 1024  # of a sample of a user's own model
_GPTS = tomllib.loads((Path(__file__).parents[1] / "plan/gpts.toml").read_text())
LANDMARKS = {name: partial(GPT, GPTConfig(**shape)) for name, shape in _GPTS.items()}


def _llama(layers, hidden, vocabulary, heads, kv_heads=None, ffn=None, sequence=2048, **others):
    """A preset as the zoo's Llama; an InputError if it has experts, other heads or a tied head."""
    if any(others.values()):
        raise InputError(f"the zoo has no model with {', '.join(others)}; lab.plan knows its shape")
    shape = {"layers": layers, "width": hidden, "heads": heads, "kv_heads": kv_heads or heads, "hidden": ffn}
    return Llama(LlamaConfig(**shape, sequence=sequence, vocabulary=vocabulary))


class Foreign(nn.Module):
    """A user's model, with the surface of the zoo's: called with a tensor, a tuple of arguments or a dict of them.

    `make_inputs` makes those of (samples, length); without it they are token numbers, int64 [samples, length].
    """

    def __init__(self, model, make_inputs=None):
        super().__init__()
        self.model = model
        self.make_inputs = make_inputs or (lambda samples, length: torch.zeros(samples, length, dtype=torch.int64))

    def forward(self, inputs):
        if isinstance(inputs, dict):
            return self.model(**inputs)
        return self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)


def loss_of(outputs, targets):
    """What a step trains: the zoo's loss; a foreign model's own `loss`, or one of its logits or its output."""
    if hasattr(outputs, "loss") and outputs.loss is not None:
        return outputs.loss
    outputs = getattr(outputs, "logits", outputs)
    if torch.is_tensor(targets) and not targets.is_floating_point() and outputs.shape[:-1] == targets.shape:
        return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())
    return outputs.float().mean()


def model_of(name, checkpoint_activations=None):
    """A model of the zoo, of LANDMARKS, of PRESETS, or what a function `package.module:make_model` returns.

    Such a function returns a module, or a pair of it and what makes its inputs: see `Foreign`. In place of a name a
    function may be given that returns a module with the zoo's surface.

    Raises:
        InputError: no model has this name.
    """
    if callable(name):
        with torch.device("meta"):
            made = name()
        made.checkpoint_activations = checkpoint_activations
        return made
    if ":" not in name:
        known = models.SIZES | LANDMARKS | {name: partial(_llama, **shape) for name, shape in PRESETS.items()}
        return models.build(name, checkpoint_activations=checkpoint_activations, known=known)
    if checkpoint_activations is not None:
        raise InputError(f"--checkpoint-activations: {name} is not in the zoo; build its checkpoints into the model")
    make = function_of("--model", name)
    hook = register_module_parameter_registration_hook(lambda module, name, parameter: _drop_values(parameter))
    try:
        with fake_tensor.unset_fake_temporarily():  # values that __init__ reads are real
            made = called(f"--model {name}", make)
            parts = made if isinstance(made, tuple) else (made,)
            if len(parts) > 2 or not isinstance(parts[0], nn.Module):
                pair = "a pair of it and what makes its inputs"
                raise InputError(f"--model {name}: return the model, or {pair}, not {made!r:.80}")
            for tensor in (*parts[0].parameters(), *parts[0].buffers()):
                _drop_values(tensor)
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        raise InputError(f"--model {name}: {error}; __init__ may read any value but a parameter's") from error
    finally:
        hook.remove()
    return Foreign(*parts)


def called(what, function, *args):
    """What a user's own function returns; one line for what it raises, unless torch says that a value is missing."""
    try:
        return function(*args)
    except Exception as error:
        if "meta tensor" in str(error):
            raise
        at = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(at.filename).name}:{at.lineno}"
        raise InputError(f"{what}: {type(error).__name__} in {place}: {error}") from error


def _drop_values(tensor):
    """Move a tensor to the meta device, itself, as it may be tied: so a model in the making is never held whole."""
    if not tensor.is_meta:
        empty = tensor.detach().to("meta")
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, empty)


def function_of(option, name, *given):
    """The function `package.module:function` that an option names; an InputError if it cannot be called with these."""
    path, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(path or name), attribute)
        inspect.signature(found).bind(*given)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise InputError(
            f"{option} {name}: {error}; name package.module:function; the module lies in "
            "this folder or along PYTHONPATH"
        ) from error
    except TypeError as error:
        needed = f"is called with {', '.join(given)}" if given else "is called without arguments"
        raise InputError(f"{option} {name}: it {needed}: {error}") from error
    return found


def batch_of(model, samples, length=None):
    """(inputs, targets) of so many samples for a model of `model_of`; an InputError for a length it does not take."""
    if isinstance(model, Foreign):
        inputs = called("the function that makes inputs", model.make_inputs, samples, length or LENGTH)
        return inputs, inputs
    if length is not None and not getattr(model, "predicts_text", False):
        raise InputError(f"--seq {length}: the model reads no text; leave it out")
    if length is not None and length >= model.window:
        raise InputError(f"--seq {length}: the model takes samples of {model.window - 1} at most")
    window = model.window if length is None else length + 1
    return model.inputs_and_targets(torch.zeros(samples, window, dtype=torch.uint8))


def tokens_of(model, length=None):
    """How many tokens a sample has; a sample that is no text counts as one."""
    if isinstance(model, Foreign):
        return length or LENGTH
    if not getattr(model, "predicts_text", False):
        return 1
    return length or model.window - 1
