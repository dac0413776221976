"""Weights from elsewhere: read by name into any engine at any world size, bit for bit, or refused without a change."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from training import ENGINES, batch, same_bits, train_step, zoo_engine

from common import models
from common.errors import InputError

EVERY_ENGINE = (*ENGINES, "offloaded:Delayed", "offloaded:Spread", "zeropp", "quantized:Copies")


def plain(model="gpt-tiny"):
    """A module without an engine; all weights and buffers are random."""
    torch.manual_seed(5)
    module = models.build(model, device="cpu")
    for tensor in [*module.parameters(), *(b for b in module.buffers() if b.is_floating_point())]:
        nn.init.normal_(tensor)
    return module


def write(file, module, left_out=(), **changed):
    """Save as a program without engines does, with one tensor for each name of a tied weight."""
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()} | changed
    save_file({name: tensor for name, tensor in state.items() if name not in left_out}, file)


def load_weights(world, engine, file, model, precision):
    """Load into a trained engine. Return the weights, the module's values, and whether states stayed."""
    made = zoo_engine(world, engine, model, precision=precision)
    made(batch(made.module, world, 1)[0])  # the load makes what this gathers, or copies within a node, stale
    made.synchronize()
    before = made.updates, str(list(made.optimizer.state.values()))
    made.load_weights(file)
    stayed = before == (made.updates, str(list(made.optimizer.state.values())))
    weights = made.full_state_dict()
    with made.gathered():
        reads = {key: parameter.detach().cpu().clone() for key, parameter in made.module.named_parameters()}
    train_step(made, world, 2)
    return weights, reads, stayed


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", EVERY_ENGINE)
def test_a_plain_models_file_is_read_to_the_bit(worlds, tmp_path, name, precision):
    module = plain()
    write(tmp_path / "file", module)
    size = 4 if "quantized" in name else 3
    for weights, reads, stayed in worlds(size).run(load_weights, name, tmp_path / "file", "gpt-tiny", precision):
        assert same_bits(weights, module.state_dict())
        assert stayed
        if name != "zeropp":  # its module reads them rounded to 8 bits
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            assert same_bits(reads, {key: p.detach().to(dtype) for key, p in module.named_parameters()})


WHOLE = [("resnet-tiny", ()), ("lora-tiny", ()), ("gpt-tiny", ["head.weight"]), ("gpt-tiny", ["wte.weight"])]


@pytest.mark.parametrize(("model", "left_out"), WHOLE)
def test_buffers_and_frozen_weights_come_with_a_file_and_tied_ones_under_either_name(worlds, tmp_path, model, left_out):
    module = plain(model)
    assert module.state_dict().keys() >= set(left_out)
    write(tmp_path / "file", module, left_out)
    for weights, *_ in worlds(2).run(load_weights, "stage3_param", tmp_path / "file", model, "fp32"):
        assert same_bits(weights, module.state_dict())


def test_a_file_in_another_dtype_and_without_buffers_is_cast(worlds, tmp_path):
    module = plain("resnet-tiny")
    buffers = dict(module.named_buffers())
    halves = {name: parameter.detach().bfloat16() for name, parameter in module.named_parameters()}
    write(tmp_path / "file", module, left_out=buffers, **halves)
    for weights, *_ in worlds(2).run(load_weights, "stage2_grad", tmp_path / "file", "resnet-tiny", "fp32"):
        assert all(torch.equal(weights[name], half.float()) for name, half in halves.items())


def refused(world, engine, file, model="gpt-tiny", precision="fp32"):
    """Load, and return the complaint; the engine must be unchanged."""
    made = zoo_engine(world, engine, model, precision=precision)
    before = made.full_state_dict()
    with pytest.raises(InputError) as complaint:
        made.load_weights(file)
    assert same_bits(before, made.full_state_dict())
    train_step(made, world, 1)
    assert "\n" not in str(complaint.value)
    return str(complaint.value)


REFUSALS = {
    "'blocks.0.ln_1.weight' is missing": {"left_out": ["blocks.0.ln_1.weight"]},
    "'other.weight' is not in the model": {"other.weight": torch.zeros(2)},
    "'ln_f.weight' is floating, of shape [17] there and floating, of shape [16] here": {"ln_f.weight": torch.ones(17)},
    "'ln_f.weight' is torch.int8, of shape [16] there": {"ln_f.weight": torch.ones(16, dtype=torch.int8)},
    "'wte.weight' and 'head.weight' differ there": {"head.weight": torch.ones(256, 16)},
}


@pytest.mark.parametrize("complaint", REFUSALS)
@pytest.mark.parametrize("stage", ["stage1_os", "stage3_param"])
def test_the_first_difference_is_named_on_every_rank_and_nothing_changes(worlds, tmp_path, stage, complaint):
    write(tmp_path / "file", plain(), **REFUSALS[complaint])
    assert all(complaint in said for said in worlds(2).run(refused, stage, tmp_path / "file"))


def test_a_value_that_would_become_infinite_is_named_on_every_rank_and_nothing_changes(worlds, tmp_path, name):
    weight = torch.ones(16)
    weight[-1] = 65520.0  # the first that rounds to infinity in fp16
    write(tmp_path / "half", plain(), **{"ln_f.weight": weight})
    write(tmp_path / "double", plain(), **{"blocks.0.ln_1.bias": torch.full((16,), -1e39, dtype=torch.float64)})
    mean = torch.full((8,), 1e39, dtype=torch.float64)
    write(tmp_path / "buffer", plain("resnet-tiny"), **{"bn.running_mean": mean})
    for file, model, precision, there, dtype in (
        ("half", "gpt-tiny", "fp16", "ln_f.weight", torch.float16),
        ("double", "gpt-tiny", "fp32", "blocks.0.ln_1.bias", torch.float32),
        ("buffer", "resnet-tiny", "fp32", "bn.running_mean", torch.float32),
    ):
        for complaint in worlds(2).run(refused, name, tmp_path / file, model, precision):
            assert f"{there!r} has finite values that are infinite in {dtype}" in complaint


def test_a_file_that_is_not_safetensors_is_refused_by_what_is_read(worlds, tmp_path):
    (tmp_path / "text").write_text("no weights")
    write(tmp_path / "cut", plain())
    (tmp_path / "cut").write_bytes((tmp_path / "cut").read_bytes()[:-1])
    for name, zipped in (("weights.pt", True), ("pytorch_model.bin", False)):
        torch.save({"wte.weight": torch.ones(256, 16)}, tmp_path / name, _use_new_zipfile_serialization=zipped)
    for name in ("missing", "text", "cut", ".", "weights.pt", "pytorch_model.bin"):
        for complaint in worlds(2).run(refused, "stage2_grad", tmp_path / name):
            assert f"cannot load weights of '{tmp_path / name}'" in complaint
            assert "a safetensors file, the index of several (.json), or a state dict, such as torch.load" in complaint


def write_split(folder, module, parts=3):
    """Distribute the tensors of a model over several files, and write their index."""
    state = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    files = {name: f"model-{number % parts}.safetensors" for number, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in state.items() if files[name] == file}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return index, files


def test_a_model_cut_into_several_files_is_read_by_their_index(worlds, tmp_path, stage):
    index, _ = write_split(tmp_path, plain())
    for weights, *_ in worlds(2).run(load_weights, stage, index, "gpt-tiny", "bf16"):
        assert same_bits(weights, plain().state_dict())


def test_an_index_that_does_not_fit_its_files_is_refused(worlds, tmp_path):
    index, files = write_split(tmp_path, plain())
    name = "ln_f.weight"
    for said, text in {
        "that is JSON with a 'weight_map'": "[]",
        "from names to files": json.dumps({"weight_map": {name: 3}}),
        f"'{name}' is not in ": json.dumps({"weight_map": files | {name: files["ln_f.bias"]}}),
        "No such file": json.dumps({"weight_map": files | {name: "nowhere.safetensors"}}),
        f"'{name}' is missing": json.dumps({"weight_map": {key: files[key] for key in files.keys() - {name}}}),
    }.items():
        index.write_text(text)
        assert all(said in complaint for complaint in worlds(2).run(refused, "stage3_param", index)), said
