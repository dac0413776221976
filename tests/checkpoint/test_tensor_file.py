"""safetensors files written and read one tensor at a time, compatible with the library."""

import hashlib

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES, save_file

from common.checkpoint import tensor_file

SHAPES = {"matrix": (3, 5), "scalar": (), "nothing": (0, 4), "vector": (7,)}


def every_dtype():
    """A tensor of each shape in each dtype that torch and the library share: {name: tensor}, of random bytes."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for code, dtype in {**_TYPES, "F8_E8M0": torch.float8_e8m0fnu}.items():
        for name, shape in SHAPES.items():
            bits = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
            tensors[f"{name} of {code}"] = bits.view(dtype).view(shape)
    return tensors


def same_bits(one, other):
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def write(file, tensors):
    told = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    return tensor_file.write(file, told, tensors.get, {"who": "Ψ"})


def test_the_library_reads_what_is_written_in_every_dtype(tmp_path):
    tensors = every_dtype()
    checksum = write(tmp_path / "ours", tensors)
    assert checksum == hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest()
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"who": "Ψ"}
        assert set(file.keys()) == tensors.keys()
        assert all(same_bits(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_what_the_library_writes_is_read_in_every_dtype(tmp_path):
    tensors = every_dtype()
    save_file(tensors, tmp_path / "theirs")
    with tensor_file.Source(tmp_path / "theirs") as file:
        assert file.tensors == {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
        assert all(same_bits(file.get_tensor(name), tensor) for name, tensor in tensors.items())


def test_a_part_of_a_tensor_is_read_and_cast(tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK", 4096)  # several blocks
    values = torch.randn(100, 200)
    write(tmp_path / "file", {"first": torch.ones(3), "values": values, "strided": values.t()})
    with tensor_file.Source(tmp_path / "file") as file:
        for dtype in (torch.float32, torch.bfloat16):
            part = torch.empty(9000, dtype=dtype)
            file.read("values", 17, part)
            assert torch.equal(part, values.view(-1)[17:9017].to(dtype))
        assert torch.equal(file.get_tensor("strided"), values.t())


def test_a_value_that_is_already_infinite_is_no_overflow(tmp_path, monkeypatch):
    values = torch.tensor([65519.0] * 20 + [torch.inf, -torch.inf, torch.nan] + [-65520.0])
    write(tmp_path / "file", {"values": values, "double": values.double() * 1e300})
    monkeypatch.setattr(tensor_file, "BLOCK", 64)  # several blocks
    with tensor_file.Source(tmp_path / "file") as file:
        assert file.overflows("values", 0, 24, torch.float16)
        assert not file.overflows("values", 0, 23, torch.float16)
        assert not file.overflows("values", 0, 24, torch.bfloat16)
        assert file.overflows("double", 0, 1, torch.float32)
        assert not file.overflows("double", 20, 23, torch.float32)
