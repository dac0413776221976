"""Exact: every stage ends with the same bits."""

import pytest
from harness import STAGES, same_bits, train

MODELS = ("mlp", "gpt-tiny", "llama-tiny", "resnet-tiny", "moe-tiny")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_stages_end_with_the_same_bits(worlds, size, model):
    first, *others = [worlds(size).run(train, stage, model)[0] for stage in STAGES]
    for other in others:
        assert same_bits(first["weights"], other["weights"])
        assert first["losses"] == other["losses"]
