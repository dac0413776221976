"""Small runs of transformers' Trainer on a rank, stock or with an engine, and helpers for other libraries' loops."""

import importlib.util
import re

import pytest
import torch
from baseline import sum_in_rank_order
from training import same_bits

from common.data import load_text
from common.errors import InputError
from lab.compare import relative_difference
from lab.recipes import as_by_torchrun, clip_exactly

WINDOW = 32  # tokens per sample
USUAL = {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "optim": "adamw_torch", "max_grad_norm": 0.0}
QUIET = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}


def needs(*libraries):
    """A mark for tests that need these libraries."""
    absent = [library for library in libraries if importlib.util.find_spec(library) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {absent}")


class Windows(torch.utils.data.Dataset):
    """Windows of Python's own source as byte tokens; the first few of each, a varying number, are not targets."""

    def __init__(self, count, start=0):
        self.text = torch.tensor(load_text()[start : start + count * WINDOW].copy()).long().view(count, WINDOW)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, index):
        labels = self.text[index].clone()
        labels[: index * 7 % 20] = -100
        return {"input_ids": self.text[index], "labels": labels}


def llama(tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 - only if installed

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=64, tie_word_embeddings=tied, **sizes)
    return LlamaForCausalLM(config)


def trainer(engine, folder, model=None, engine_options=None, exact=False, **arguments):
    """A Trainer, stock if `engine` is None. A stock one's DDP adds in rank order; `exact` norms are in float64."""
    import transformers  # noqa: PLC0415

    from interop.transformers import Trainer  # noqa: PLC0415

    transformers.logging.set_verbosity_error()
    given = {name: arguments.pop(name) for name in ("compute_metrics", "optimizers", "model_init") if name in arguments}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), **{**QUIET, **USUAL, "max_steps": 4, **arguments}
    )
    data = {"train_dataset": Windows(64), "eval_dataset": Windows(10, 100_000), **given}
    model = None if "model_init" in given else llama() if model is None else model
    if engine is not None:
        made = Trainer(model, arguments, engine=engine, engine_options=engine_options, **data)
    else:
        made = transformers.Trainer(model, arguments, **data)
        made.add_callback(in_rank_order(made))
        if exact:
            made.accelerator.clip_grad_norm_ = clip_exactly
    made.remove_callback(transformers.PrinterCallback)
    return made


def in_rank_order(of):
    from transformers import TrainerCallback  # noqa: PLC0415

    class InRankOrder(TrainerCallback):
        def on_train_begin(self, *_, **__):
            if hasattr(of.model_wrapped, "register_comm_hook"):
                of.model_wrapped.register_comm_hook(None, sum_in_rank_order)

    return InRankOrder()


def weights_of(made):
    """The full weights, from a stock Trainer or an engine's."""
    engine = getattr(made, "engine", None)
    return made.model.state_dict() if engine is None else engine.full_state_dict()


def logged(made, *names):
    """The values that a Trainer logged: {name: [value]}."""
    return {name: [entry[name] for entry in made.state.log_history if name in entry] for name in names}


def check_alike(ours, stock, exact):
    """Assert that (losses, weights) are those of a stock run, to the bit or but for the order of sums."""
    (found, other), (losses, weights) = ours, stock
    if exact:
        assert found == losses
        assert same_bits(other, weights)
    else:
        assert found == pytest.approx(losses, rel=1e-5)
        assert relative_difference(other, weights) < 1e-5


def check_refused(world, words, call):
    """Assert that a call is refused on this rank, in one line that contains the words."""
    with as_by_torchrun(world), pytest.raises((InputError, ValueError, RuntimeError)) as error:
        call()
    (line,) = str(error.value).splitlines()
    assert re.search(words, line), line
