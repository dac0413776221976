"""The largest model under a hard limit: the limit holds, running out is told from a bug, predictions are linear."""

import json
import os

import pytest
import torch
from commands import results_of
from formulas import bytes_held
from places import RECORDS
from training import STAGES

from common.errors import InputError
from common.ranks.world import LocalWorld, RankFailed
from lab import capacity, figures
from lab.activations import largest_fitting
from stage0_ddp import Engine

MB = 10**6


@pytest.mark.parametrize(("text", "size"), [("1GB", 1e9), ("800MB", 8e8), ("1.5 gb", 1.5e9), ("0.5MB", 5e5)])
def test_a_size_is_read_as_the_papers_write_it(text, size):
    assert capacity.size_of(text) == size


def take(world, size, cap):
    """Fill a tensor of so many bytes under a cap on further memory."""
    with capacity.hard_limit(world.device, capacity.held(world.device) + cap):
        torch.ones(size, dtype=torch.uint8, device=world.device)
    return torch.ones(size, dtype=torch.uint8, device=world.device).sum().item()


def end(world):
    os.abort()


def divide(world):
    raise ZeroDivisionError


def failure(function, *args):
    with LocalWorld(1) as world, pytest.raises(RankFailed) as caught:
        world.run(function, *args)
    return caught.value


def test_the_limit_is_hard_and_ends_with_its_context():
    with LocalWorld(1) as world:
        assert world.run(take, 40 * MB, 60 * MB) == [40 * MB]
    assert capacity.ran_out_of_memory(failure(take, 80 * MB, 60 * MB))


def test_the_limit_of_a_gpu_ends_with_its_context_too(monkeypatch):
    limits = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * MB, 100 * MB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: limits.append(part))
    with pytest.raises(torch.OutOfMemoryError), capacity.hard_limit(torch.device("cuda", 0), 20 * MB):
        raise torch.OutOfMemoryError
    assert limits == [0.2, 1.0]


@pytest.mark.parametrize(
    "said",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "torch.AcceleratorError: CUDA error: out of memory",  # pinned memory, and the libraries' own
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "torch.distributed.DistBackendError: NCCL error: ncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nFailed to CUDA calloc async 608 bytes",
        "torch.distributed.DistBackendError: NCCL error\nLast error:\nCuda failure 2 'out of memory'",
    ],
)
def test_a_gpu_that_is_full_is_told_by_the_words_of_torch_and_nccl(said):
    """Their sources' words, untried."""
    assert capacity.ran_out_of_memory(RankFailed(f"rank 0 failed:\n\n{said}"))


def test_an_abort_is_a_lack_of_memory_and_another_error_is_not():
    assert capacity.ran_out_of_memory(failure(end))
    assert not capacity.ran_out_of_memory(failure(divide))
    assert not capacity.ran_out_of_memory(RankFailed("rank 0 died with exit code -9"))
    assert not capacity.ran_out_of_memory(RankFailed("ranks [0, 1] gave no answer in 600 s"))


class BrokenFromTwoLayersOn(Engine):
    def __init__(self, model, *args, **options):
        if len(model.blocks) > 1:
            raise RuntimeError("broken")
        super().__init__(model, *args, **options)


def test_a_bug_is_not_taken_for_a_lack_of_memory():
    with pytest.raises(RankFailed, match="broken"):
        capacity.attempt("test_capacity:BrokenFromTwoLayersOn", "fp32", 2, 10**9, world_size=1)


@pytest.mark.parametrize("near", [1, 2, 10, 64, 200])
@pytest.mark.parametrize("largest", [*range(13), 63, 64, 65, 150])
def test_the_boundary_is_found_from_wherever_the_search_begins(largest, near):
    tries = []
    assert largest_fitting(lambda number: tries.append(number) or number <= largest, near) == largest
    assert min(tries) > 0
    assert len(tries) == len(set(tries))


@pytest.fixture
def small_simulations(monkeypatch):
    """Smaller models make predictions faster."""
    monkeypatch.setattr(capacity, "SIMULATED", (4, 8))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_predictions_lie_on_a_line_and_cost_per_parameter_what_the_paper_says(precision, small_simulations):
    lines = {stage: capacity.predict(stage, precision, world_size=4) for stage in STAGES}
    for stage, line in lines.items():
        assert line.states_per_parameter == pytest.approx(bytes_held(stage, 4, precision), rel=1e-3)
        peak, _ = capacity.simulate(stage, precision, 6, world_size=4)
        assert line.fixed + 6 * line.per_layer == pytest.approx(peak, rel=1e-3)
    largest = [line.layers(10**9) for line in lines.values()]
    assert largest == sorted(largest)
    assert 0 < largest[0] < lines["stage0_ddp"].layers(2 * 10**9)
    assert lines["stage0_ddp"].layers(0) == 0


def test_two_stages_for_real(tmp_path, small_simulations):
    # Libraries and threads hold a share that depends on the build: 2.5 times as much per rank for CUDA as for CPU.
    held_before = capacity.attempt("stage3_param", "bf16", 1, 10**12, world_size=2).held_before
    options = ("--cap", f"{held_before // MB + 200}MB", "--nproc", 2, "--oversubscribe", "--precisions", "bf16")
    results = results_of(capacity.main, tmp_path, *options, "--engines", "stage0_ddp,stage3_param", drawn=True)
    assert "torch" in results["hardware"]
    replicated, sharded = results["rows"]
    for row in results["rows"]:
        assert row["tries"][str(row["layers"])] and not row["tries"][str(row["layers"] + 1)]
        assert row["measured_over_predicted"] == pytest.approx(1, abs=0.15)
    assert (replicated["ratio_to_stage0"], replicated["ideal_ratio"]) == (1, pytest.approx(1, rel=1e-3))
    assert sharded["ratio_to_stage0"] == pytest.approx(2, rel=0.2)
    assert capacity.table(results).markdown().count("\n|") == 4


@pytest.mark.parametrize("name", ["capacity_cpu", "infinity_capacity_1"])
def test_a_search_that_ended_at_its_bound_says_or_more_in_table_and_figure(name):
    results = json.loads((RECORDS / f"{name}.json").read_text())
    bounded = [row for row in results["rows"] if row["or_more"]]
    ratios = sorted(f"{row['ratio_to_stage0']:.2f}x or more" for row in bounded)
    cells = [cell for line in capacity.table(results).rows for cell in line if "x or more" in cell]
    labels = [text.get_text() for axes in figures.capacity(results).axes for text in axes.texts]
    drawn = [label.split("\n")[1] for label in labels if label.count("or more") == 2]
    assert bounded and sorted(cells) == sorted(drawn) == ratios
    assert len([label for label in labels if "or more" in label]) == len(bounded)


def test_a_model_that_does_not_fit_is_reported(monkeypatch, small_simulations):
    monkeypatch.setattr(capacity, "attempt", lambda *_: capacity.Attempt(fits=False, held_before=400 * MB))
    row = capacity.row("stage0_ddp", "fp32", 401 * MB, world_size=2)
    assert (row["layers"], row["parameters"], row["measured_over_predicted"]) == (0, 0, None)
    with pytest.raises(InputError, match="400 MB"):
        capacity.row("stage0_ddp", "fp32", 399 * MB, world_size=2)
