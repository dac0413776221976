"""The survey of peaks: what it counts, and that the batch it names is the largest whose peak fits."""

import json

import pytest

from common.measure.memory import CLASSES
from lab import activations

ENGINES = ("stage0_ddp", "stage3_param")


@pytest.fixture(scope="module")
def survey(tmp_path_factory):
    path = tmp_path_factory.mktemp("survey") / "peaks.json"
    options = ["--nproc", "2", "--oversubscribe", "--model", "gpt-tiny", "--batches", "1", "2", "--cap-batch", "2"]
    activations.main([*options, "--engines", ",".join(ENGINES), "--json", str(path)])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())


def peaks(rows):
    return {
        (row["engine"], row["checkpoint_activations"], row["batch_per_rank"]): sum(row["peak_bytes"].values())
        for row in rows
    }


def test_every_stage_is_measured_at_every_batch_with_and_without_checkpoints(survey):
    kinds = (None, "non-reentrant")
    assert list(peaks(survey["rows"])) == [(stage, kind, n) for stage in ENGINES for kind in kinds for n in (1, 2)]
    assert all(set(row["peak_bytes"]) == set(CLASSES) for row in survey["rows"])
    assert "torch" in survey["hardware"]


def test_peaks_grow_with_the_batch_and_shrink_with_checkpoints_and_stages(survey):
    peak = peaks(survey["rows"])
    for stage in ENGINES:
        assert peak[stage, None, 1] < peak[stage, None, 2]
        assert peak[stage, "non-reentrant", 2] < peak[stage, None, 2]
    assert peak["stage3_param", None, 2] < peak["stage0_ddp", None, 2]


def test_the_largest_batches_fit_under_the_cap_which_is_stage_0s_own_peak(survey):
    largest = {row[:2]: (row[2], peak) for row, peak in peaks(survey["largest_under_cap"]).items()}
    assert largest["stage0_ddp", None] == (2, survey["cap_bytes"])
    assert all(peak <= survey["cap_bytes"] for _, peak in largest.values())
    assert largest["stage0_ddp", None][0] < largest["stage3_param", "non-reentrant"][0]
