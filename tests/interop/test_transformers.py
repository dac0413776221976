"""transformers' Trainer with every engine, compared with the stock one under DDP, if the library is installed."""

import copy
import functools
import itertools

import hugging_face as hf
import pytest
import torch
from training import SEVEN, same_bits

from common.engines import find_engine
from common.errors import InputError

pytestmark = hf.needs("transformers", "accelerate", "peft")
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
CASES = {  # what a script asks for
    "plain": {},
    "a scheduler, and evaluation": {**EVALUATED, "warmup_steps": 2, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
    "clipped": {"max_grad_norm": 0.5},
    "accumulated": {"gradient_accumulation_steps": 2},
    "accumulated, tokens of a rank": {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "autocast": {"bf16": True, **EVALUATED},
    "checkpointed activations": {"activation_checkpointing": True},
    "fused": {"optim": "adamw_torch_fused"},
    "SGD": {"optim": "sgd"},
}
SENDS_ONCE = ("stage0_ddp", "stage1_os")  # the sum of micro-batches, like DDP; others send each one


def trained(world, folder, engine, arguments):
    """What a Trainer logged, and its model."""
    with hf.as_by_torchrun(world):
        made = hf.trainer(engine, folder, exact=True, **arguments)
        made.train()
        return hf.logged(made, "loss", "grad_norm", "eval_loss", "learning_rate"), hf.weights_of(made)


@pytest.fixture(scope="module")
def stock(worlds, tmp_path_factory):
    """The stock Trainer's result in a case, run once."""
    return functools.cache(
        lambda what, ranks: worlds(ranks).run(trained, tmp_path_factory.mktemp("stock"), None, CASES[what])[0]
    )


@pytest.mark.parametrize(
    ("what", "ranks"), [*((what, 2) for what in CASES), *itertools.product(list(CASES)[:4], (1, 3))]
)
@pytest.mark.parametrize("name", SEVEN)
def test_a_trainer_by_an_engine_is_the_stock_one_under_ddp(stock, worlds, tmp_path, name, what, ranks):
    told, weights = stock(what, ranks)
    ours, other = worlds(ranks).run(trained, tmp_path, name, CASES[what])[0]
    assert told["learning_rate"] == ours["learning_rate"]
    exact = name in SENDS_ONCE or not what.startswith("accumulated") or ranks == 1
    hf.check_alike((ours["loss"], other), (told["loss"], weights), exact)
    assert not exact or told["eval_loss"] == ours["eval_loss"]
    assert ours["grad_norm"] == pytest.approx(told["grad_norm"], rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"precision": "bf16"}], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SEVEN)
def test_a_run_goes_on_from_a_checkpoint_as_if_nothing_had_been(world, tmp_path, name, options):
    found = []
    with hf.as_by_torchrun(world):
        for path in (None, str(tmp_path / "checkpoint-3")):
            saves = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "warmup_steps": 4, "max_grad_norm": 0.5}
            made = hf.trainer(name, tmp_path, engine_options=options, **saves)
            made.train(resume_from_checkpoint=path)
            found.append((hf.logged(made, "loss", "learning_rate"), hf.weights_of(made)))
    (whole, weights), (cut, other) = found
    assert cut["loss"][-3:] == whole["loss"][-3:]
    assert cut["learning_rate"][-3:] == whole["learning_rate"][-3:]
    assert same_bits(weights, other)


def saved(world, folder, name, options, tied):
    """Files of a stock Trainer and of one by an engine."""
    with hf.as_by_torchrun(world):
        for path, engine in (("stock", None), ("ours", name)):
            made = hf.trainer(engine, folder / path, hf.llama(tied), options if engine else None)
            made.train()
            made.save_model()
        return hf.weights_of(made)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    ("name", "options"), [("stage0_ddp", {}), ("stage3_param", {}), ("stage3_param", {"precision": "bf16"})]
)
def test_from_pretrained_reads_what_a_trainer_saves(worlds, tmp_path, name, options, tied):
    from safetensors.torch import load_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    weights = worlds(2).run(saved, tmp_path, name, options, tied)[0]
    read, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert {path.name for path in (tmp_path / "stock").iterdir()} == {
        path.name for path in (tmp_path / "ours").iterdir()
    }
    files = [load_file(tmp_path / path / "model.safetensors") for path in ("stock", "ours")]
    assert files[0].keys() == files[1].keys()
    assert same_bits(read.state_dict(), weights)
    if not options:
        assert same_bits(*files)


@pytest.mark.parametrize("saved", [None, ["lm_head"]], ids=["", "modules_to_save"])
@pytest.mark.parametrize("name", SEVEN)
def test_adapters_train_save_load_and_resume(world, tmp_path, name, saved):
    from peft import LoraConfig, PeftModel, get_peft_model  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    found, whole = {}, {"task_type": "CAUSAL_LM", "modules_to_save": saved}
    with hf.as_by_torchrun(world):
        for engine, path in ((None, None), (name, None), (name, "checkpoint-2")):
            torch.manual_seed(0)
            config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, **whole)
            model = get_peft_model(hf.llama(), config)
            into = tmp_path / str(engine)
            made = hf.trainer(engine, into, model, save_strategy="steps", save_steps=2)
            made.train(resume_from_checkpoint=path and str(into / path))
            made.save_model()
            found[engine, path] = hf.logged(made, "loss")["loss"], hf.weights_of(made)
        read = PeftModel.from_pretrained(hf.llama(), str(into)).state_dict()
    (losses, weights), (ours, other), (again, resumed) = found.values()
    assert (losses, again[-2:]) == (ours, ours[-2:])
    assert same_bits(weights, other)
    assert same_bits(other, resumed)
    assert same_bits(read, other)
    assert same_bits(*(load_file(tmp_path / path / "adapter_model.safetensors") for path in ("None", name)))


@pytest.mark.parametrize("name", SEVEN)
def test_metrics_predictions_and_the_best_model(world, tmp_path, name):
    def right(found):
        return {"right": float((found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]).mean())}

    told = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            keeps = {"load_best_model_at_end": True, "metric_for_best_model": "right", "save_strategy": "steps"}
            into = tmp_path / str(engine)
            made = hf.trainer(engine, into, compute_metrics=right, save_steps=2, max_steps=6, **keeps, **EVALUATED)
            made.train()
            best = hf.weights_of(made)
            found = made.predict(hf.Windows(6, 50_000))
            told.append((hf.logged(made, "eval_right"), best, found.predictions, made.evaluate()["eval_right"]))
        engine, made.args.max_steps = made.engine, 2
        made.train()
        assert made.engine is engine
    (metrics, best, predictions, last), (ours, our_best, our_predictions, our_last) = told
    assert (metrics, last) == (ours, our_last)
    assert same_bits(best, our_best)
    assert (predictions == our_predictions).all()


def evaluated_first(world, folder, name):
    """The models of one run, and of another that evaluates before it trains."""
    found = []
    with hf.as_by_torchrun(world):
        for first in (False, True):
            made = hf.trainer(name, folder)
            if first:
                made.evaluate()
            made.train()
            found.append({key: weight.clone() for key, weight in hf.weights_of(made).items()})
    return found


@pytest.mark.parametrize("name", [None, *SEVEN])
def test_ranks_train_together_after_an_evaluation_but_for_the_stock_trainers(worlds, tmp_path, name):
    (one, other), (_, second) = worlds(2).run(evaluated_first, tmp_path, name)
    # transformers 5.24.0 with accelerate 1.15.0: a model that was evaluated is never wrapped in DDP.
    assert [same_bits(one, other), same_bits(other, second)] == [name is not None] * 2


@pytest.mark.parametrize("name", ["stage1_os", "stage3_param"])
def test_an_optimizer_and_a_scheduler_of_ones_own(world, tmp_path, name):
    found = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            model = hf.llama()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            constant = torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2)
            falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            rates = torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, falling], [2])
            made = hf.trainer(engine, tmp_path, model, optimizers=(optimizer, rates))
            made.train()
            found.append((hf.logged(made, "loss", "learning_rate"), hf.weights_of(made)))
        with pytest.raises((InputError, RuntimeError), match="engine"):
            optimizer.step()
    (stock, weights), (ours, other) = found
    assert stock == ours
    assert same_bits(weights, other)


@pytest.mark.parametrize("name", SEVEN)
def test_a_seq2seq_trainer_generates_while_it_evaluates(world, tmp_path, name):
    import transformers  # noqa: PLC0415

    from interop.transformers import Seq2SeqTrainer  # noqa: PLC0415

    found = []
    with hf.as_by_torchrun(world):
        for engine in (None, name):
            torch.manual_seed(0)
            sizes = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
            model = transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=256, decoder_start_token_id=0, **sizes)
            )
            generates = {"predict_with_generate": True, "generation_max_length": 8}
            plan = {**hf.QUIET, **hf.USUAL, "max_steps": 4, **generates}
            arguments = transformers.Seq2SeqTrainingArguments(str(tmp_path), **plan)
            data = {"train_dataset": hf.Windows(64), "eval_dataset": hf.Windows(10, 100_000)}
            if engine is None:
                made = transformers.Seq2SeqTrainer(model, arguments, **data)
            else:
                made = Seq2SeqTrainer(model, arguments, engine=engine, **data)
            made.train()
            found.append((hf.logged(made, "loss"), made.predict(hf.Windows(6, 50_000)).predictions))
    (stock, generated), (ours, other) = found
    assert stock == ours
    assert (generated == other).all()


@pytest.mark.parametrize("name", SEVEN)
def test_a_model_built_anew_has_a_new_engine(world, tmp_path, name):
    with hf.as_by_torchrun(world):
        made = hf.trainer(name, tmp_path, model_init=lambda: hf.llama(tied=False))
        found = []
        for _ in range(2):
            made.train()
            found.append(hf.weights_of(made))
    assert same_bits(*found)


@pytest.mark.parametrize("name", SEVEN)
def test_what_the_page_says_of_an_engine_alone(world, tmp_path, name):
    """HUGGING_FACE.md's last table, row by row."""
    from accelerate import init_empty_weights  # noqa: PLC0415
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415
    from transformers import LlamaForCausalLM  # noqa: PLC0415

    make, adamw = find_engine(name), functools.partial(torch.optim.AdamW, lr=1e-2)
    config = hf.llama().config
    if world.rank == 0:
        hf.llama().save_pretrained(tmp_path / "base")
    torch.distributed.barrier()
    with init_empty_weights():
        model = LlamaForCausalLM(config)
    engine = make(model, adamw, init=lambda name, tensor: None)
    engine.load_weights(tmp_path / "base/model.safetensors")
    tokens = hf.Windows(1).text.to(world.device)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    state = engine.full_state_dict()
    if world.rank == 0:
        given = dict(state)
        model.save_pretrained(tmp_path / "tuned", state_dict=given)
        assert not given  # save_pretrained emptied it
    torch.distributed.barrier()
    assert same_bits(LlamaForCausalLM.from_pretrained(tmp_path / "tuned").state_dict(), state)
    with engine.gathered():
        plan = {"max_new_tokens": 2 + 3 * world.rank, "do_sample": False, "eos_token_id": None}
        assert model.generate(tokens, **plan).shape[1] == hf.WINDOW + 2 + 3 * world.rank

    tuned = get_peft_model(hf.llama(), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    engine = make(tuned, adamw)
    with engine.gathered():
        merged = copy.deepcopy(tuned).merge_and_unload()
        torch.testing.assert_close(merged(input_ids=tokens).logits, tuned(input_ids=tokens).logits)
    assert merged.state_dict().keys() == state.keys()
    with pytest.raises(InputError, match="gathered"), engine.gathered():
        tuned.merge_adapter()

    compiled = make(torch.compile(hf.llama(), backend="eager"), adamw).full_state_dict()
    model = hf.llama()
    model.compile(backend="eager")
    engine = make(model, adamw)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    assert compiled.keys() == {f"_orig_mod.{key}" for key in state}
    assert engine.full_state_dict().keys() == state.keys()


REFUSED = {
    "fsdp": ({"fsdp": "full_shard"}, "^fsdp="),
    "torch_compile": ({"torch_compile": True}, "^torch_compile=True: the Trainer here does not compile"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "^auto_find_batch_size"),
    "bf16_full_eval": ({"bf16_full_eval": True}, "^bf16_full_eval"),
    "an optimizer that looks at whole tensors": ({"optim": "adafactor"}, "does not work element by element"),
    "two precisions": ({"bf16": True, "engine_options": {"precision": "bf16"}}, "choose one"),
    "weights alone, and the best": (
        {"save_only_model": True, "load_best_model_at_end": True, "save_strategy": "steps", **EVALUATED},
        "^save_only_model",
    ),
    "two norms": ({"engine_options": {"clip_norm": 1.0}}, "max_grad_norm"),
    "an engine unknown": ({"engine": "stage4"}, "unknown engine 'stage4'"),
    "a checkpoint of a stock Trainer": ({"resume": True}, "holds no engine's checkpoint"),
}


def ask(folder, *, engine="stage2_grad", resume=None, **given):
    hf.trainer(engine, folder, **given).train(resume_from_checkpoint=resume and str(folder))


@pytest.mark.parametrize("what", REFUSED)
def test_what_an_engine_cannot_do_is_refused_by_name(world, tmp_path, what):
    given, words = REFUSED[what]
    hf.check_refused(world, words, lambda: ask(tmp_path, **given))
