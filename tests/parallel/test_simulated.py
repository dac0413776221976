"""A simulated rank of several axes holds and sends what a real one does; published layouts fit their GPUs."""

from argparse import Namespace

import pytest
from training import SEVEN

from common.engines import find_engine
from common.errors import InputError
from common.loop import train_step
from lab.plan import shapes
from lab.plan.formulas import Job, Rank
from lab.simulate.hardware import preset
from lab.simulate.world import Setting, simulate
from parallel.train import train

LAYOUTS = [(1, 2, 2), (2, 2, 1), (2, 1, 2)]  # data x tensor x pipeline


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("one", ("stage1_os", "stage3_param"))
def test_a_simulated_rank_of_several_axes_counts_what_a_real_one_does(worlds, one, layout):
    data, tensor, pipeline = layout
    micro_batches = 2 if pipeline > 1 else 1
    axes = {"data": data, "tensor": tensor, "pipeline": pipeline, "micro_batches": micro_batches}
    how = {"precision": "bf16", "clip_norm": 1.0, "seed": 0, "steps": 2}
    how |= {"expert": 1, "checkpoint_activations": None, "partition_activations": False}
    options = Namespace(engine=one, model="gpt-tiny", batch=2 * data * micro_batches, **axes, **how)
    rows = worlds(4).run(train, options)[0]["rows"]
    for rank, row in enumerate(rows):
        setting = Setting(
            find_engine(one), "gpt-tiny", 4, rank, precision="bf16", clip_norm=1.0, bucket_mb=0.5, batch=2,
            accumulate=micro_batches, tensor=tensor, pipeline=pipeline, backend="gloo",
        )  # fmt: skip
        found = simulate(setting, train_step)
        assert found["model_state_bytes"] == row["model_state_bytes"]
        assert found["wire_bytes_per_step"] == row["wire_bytes_per_step"]["data"]
        for axis in row["wire_bytes_per_step"].keys() - {"data"}:
            assert found[f"{axis}_bytes_per_step"] == row["wire_bytes_per_step"][axis]
            assert found[f"predicted_{axis}_bytes_per_step"] == found[f"{axis}_bytes_per_step"]


@pytest.mark.parametrize("one", SEVEN[:6])
def test_every_engine_is_simulated_on_two_axes_of_a_large_world(one):
    found = simulate(Setting(find_engine(one), "gpt-nano", 128, 70, precision="bf16", tensor=2), train_step)
    assert found["wire_bytes_per_step"] == found["predicted_wire_bytes_per_step"]
    assert found["tensor_bytes_per_step"] == found["predicted_tensor_bytes_per_step"]
    assert found["model_state_bytes"] == found["predicted_model_state_bytes"]


def test_degrees_that_do_not_divide_are_refused_in_a_line():
    for degrees, message in (
        ({"tensor": 3}, "8 ranks cannot be divided so"),
        ({"pipeline": 2}, "1F1B needs a micro-batch"),
    ):
        with pytest.raises(InputError, match=message):
            simulate(Setting(find_engine("stage1_os"), "gpt-nano", 8, **degrees), train_step)


@pytest.mark.parametrize(("pipeline", "checkpoints"), [(1, None), (1, "non-reentrant"), (2, "non-reentrant")])
def test_the_planner_counts_the_sums_that_a_rank_sends(pipeline, checkpoints):
    """But for the loss, whose sums are small: within two percent."""
    axes = {"tensor": 2, "pipeline": pipeline, "accumulate": pipeline}
    found = simulate(
        Setting(find_engine("stage1_os"), "gpt-mini", 8, precision="bf16", checkpoint_activations=checkpoints, **axes),
        train_step,
    )
    job = Job(8, **axes, checkpoints=checkpoints is not None)
    planned = Rank(shapes.of_model("gpt-mini"), preset("h100-80g"), job).sent_in_sums
    assert planned == pytest.approx(found["tensor_bytes_per_step"]["all_reduce"], rel=0.02)
