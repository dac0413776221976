"""Reading a safetensors file part by part: the bits that the library has written, of every dtype that it knows."""

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from common.engine.tensor_file import BUFFER, DTYPES, TensorFile


def test_tensors_of_every_dtype_come_back(tmp_path):
    raw = torch.arange(240, dtype=torch.uint8)
    raw = {
        str(dtype): (raw % 2 if dtype == torch.bool else raw).view(dtype).view(3, -1).clone()
        for dtype in DTYPES.values()
    }
    raw |= {"none": torch.zeros(0, 3), "one": torch.tensor(7.0)}
    save_file(raw, tmp_path / "file", {"a": "b"})
    with TensorFile(tmp_path / "file") as file:
        assert file.metadata == {"a": "b"}
        for name, tensor in raw.items():
            read = file.get_tensor(name)
            assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(read.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_larger_than_the_buffer_is_read_into_any_dtype(tmp_path, dtype):
    values = torch.randn(BUFFER)
    save_file({"before": torch.ones(5), "values": values}, tmp_path / "file")
    target = torch.zeros(BUFFER // 2 + 3, dtype=dtype)
    with TensorFile(tmp_path / "file") as file:
        file.fill(target, "values", 11)
    assert torch.equal(target, values[11 : 11 + len(target)].to(dtype))


def test_a_file_that_ends_early_is_told(tmp_path):
    save_file({"values": torch.ones(1000)}, tmp_path / "file")
    with open(tmp_path / "file", "r+b") as file:
        file.truncate(2000)
    with TensorFile(tmp_path / "file") as file, pytest.raises(SafetensorError, match="ends within values"):
        file.get_tensor("values")
