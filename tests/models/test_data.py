"""Text and batches: the same samples at every world size, and errors with their remedy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data import STANDARD_LIBRARY_BYTES, Batches, digest, load_text
from common.errors import InputError

TEXT = np.arange(1000, dtype=np.uint16).astype(np.uint8)


@settings(deadline=None)  # a busy machine must not fail it
@given(
    share=st.integers(1, 3),
    world_size=st.integers(1, 8),
    window=st.integers(1, 50),
    step=st.integers(0, 10**6),
    seed=st.integers(-5, 2**40),
)
def test_global_batches_are_the_same_at_every_world_size(share, world_size, window, step, seed):
    batches = Batches(TEXT, window, share * world_size, seed)
    whole = batches.of(step, 0, 1)
    parts = [batches.of(step, rank, world_size) for rank in range(world_size)]
    assert whole.shape == (share * world_size, window)
    assert whole.dtype == torch.uint8
    assert torch.equal(torch.cat(parts), whole)


def test_a_sample_depends_on_seed_step_and_index_alone():
    batches = Batches(TEXT, 16, 4, seed=3)
    first = batches.of(7, 0, 1)
    batches.of(8, 0, 1)
    assert torch.equal(batches.of(7, 0, 1), first)
    assert torch.equal(Batches(TEXT, 16, 8, seed=3).of(7, 0, 1)[:4], first)
    assert not torch.equal(batches.of(8, 0, 1), first)
    assert not torch.equal(Batches(TEXT, 16, 4, seed=4).of(7, 0, 1), first)


def test_samples_are_windows_of_the_text_and_reach_both_of_its_ends():
    text = np.arange(10, dtype=np.uint8)
    samples = Batches(text, 8, 100).of(0, 0, 1)
    assert torch.equal(samples.diff(dim=1), torch.ones(100, 7, dtype=torch.uint8))
    assert set(samples[:, 0].tolist()) == {0, 1, 2}


def test_without_a_path_the_text_is_pythons_own_source():
    text = load_text()
    assert text.dtype == np.uint8
    assert 100_000 < len(text) <= STANDARD_LIBRARY_BYTES
    assert b"\nimport " in text.tobytes()
    assert np.array_equal(load_text(), text)


def test_a_path_gives_that_files_bytes(tmp_path):
    (tmp_path / "text").write_bytes(bytes(range(256)))
    assert load_text(tmp_path / "text").tolist() == list(range(256))
    assert load_text(str(tmp_path / "text")).tolist() == list(range(256))


def test_a_text_of_one_window_is_long_enough_and_a_shorter_one_is_an_input_error():
    assert Batches(TEXT[:16], 16, 1).of(0, 0, 1).tolist() == [list(range(16))]
    with pytest.raises(InputError, match="has 15 bytes and one sample needs 16; give a longer text"):
        Batches(TEXT[:15], 16, 1)


def test_a_large_text_is_read_in_parts(tmp_path):
    path = tmp_path / "text"
    with open(path, "wb") as file:
        file.truncate(2**40)  # a hole: reading it all takes an hour
        file.seek(2**40 - 16)
        file.write(b"the last 16 byte")
    text = load_text(path)
    Batches(text, 16, 20_000_000).check(2)
    assert bytes(text[-16:]) == b"the last 16 byte"
    before = digest(text)
    with open(path, "r+b") as file:
        file.seek(2**40 - 1)
        file.write(b"s")
    assert digest(load_text(path)) != before


def test_a_text_is_told_from_another_by_every_byte():
    assert digest(TEXT) == digest(TEXT.copy())
    assert len({digest(text) for text in (TEXT, TEXT[:-1], TEXT[::-1].copy(), np.append(TEXT, TEXT[:1]))}) == 4
