"""The survey of peaks: what it counts, and that the batch it names is the largest whose peak fits."""

from commands import results_of

from common.measure.memory import CLASSES
from lab import activations

ENGINES = ("stage0_ddp", "stage3_param")


def peaks(rows):
    return {
        (row["engine"], row["checkpoint_activations"], row["batch_per_rank"]): sum(row["peak_bytes"].values())
        for row in rows
    }


def test_peaks_are_counted_for_every_stage_and_the_largest_batches_fit_under_stage_0s_own(tmp_path):
    options = ("--nproc", 2, "--oversubscribe", "--model", "gpt-tiny", "--batches", 1, 2, "--cap-batch", 2)
    survey = results_of(activations.main, tmp_path, *options, "--engines", ",".join(ENGINES), drawn=True)
    assert "torch" in survey["hardware"]

    peak, kinds = peaks(survey["rows"]), (None, "non-reentrant")
    assert list(peak) == [(stage, kind, batch) for stage in ENGINES for kind in kinds for batch in (1, 2)]
    assert all(set(row["peak_bytes"]) == set(CLASSES) for row in survey["rows"])
    for stage in ENGINES:
        assert peak[stage, None, 1] < peak[stage, None, 2]
        assert peak[stage, "non-reentrant", 2] < peak[stage, None, 2]
    assert peak["stage3_param", None, 2] < peak["stage0_ddp", None, 2]

    largest = {row[:2]: (row[2], peak) for row, peak in peaks(survey["largest_under_cap"]).items()}
    assert largest["stage0_ddp", None] == (2, survey["cap_bytes"])
    assert all(peak <= survey["cap_bytes"] for _, peak in largest.values())
    assert largest["stage0_ddp", None][0] < largest["stage3_param", "non-reentrant"][0]
