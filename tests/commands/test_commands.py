"""The commands, as a user types them: what they print and write, and the one-line message for bad input."""

import contextlib
import functools
import importlib
import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from commands import options_of_training, output_of, refused
from machine import linux, small_disk
from places import ROOT
from training import ALL, STAGES, batch, make_engine

from common import loop, outputs, train
from common.errors import InputError
from common.measure.hardware import commit
from common.ranks.world import RankFailed
from lab import compare


def written(path, *arguments):
    """A command's output, and the file that it writes to a path."""
    said = output_of("-m", *arguments, "--oversubscribe", "--json", path)
    return said, json.loads(path.read_text())


def test_training_shows_what_was_measured_and_writes_it(tmp_path):
    said, results = written(tmp_path / "run.json", "stage2_grad", "--nproc", 2, "--model", "gpt-tiny", "--steps", 4)
    assert "reduce_scatter, bytes sent per step" in said
    assert results["model_state_bytes"] == results["predicted_model_state_bytes"]
    assert len(results["losses"]) == 4
    assert "torch" in results["hardware"]
    assert results["commit"] == commit()


def test_compare_writes_json_markdown_and_a_picture(tmp_path):
    path, nodes = tmp_path / "all.json", ("--nproc", 4, "--ranks-per-node", 2)
    _, results = written(path, "lab.compare", *nodes, "--model", "gpt-tiny", "--steps", 4)
    assert [row["engine"] for row in results["rows"]] == [*ALL, "zeropp.hybrid"]
    for row in results["rows"]:
        assert row["bitwise_equal_to_stage0"] is (row["engine"] != "zeropp")
        assert row["relative_norm_diff_to_torch_ddp"] < 1e-2 or row["quantizes"]
        assert abs(row["relative_loss_diff_to_stage0"]) < 1e-2
        counted = [name.removeprefix("predicted_") for name in row if name.startswith("predicted_")]
        assert {"internode_bytes_per_step", "model_state_bytes", "wire_bytes_per_step"} <= set(counted)
        assert all(row[name] == row[f"predicted_{name}"] for name in counted)
        assert row["tokens_per_second"] > 0
    assert len({row["param_sha256"] for row in results["rows"]}) == 2
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "| stage3_param |" in path.with_suffix(".md").read_text().splitlines()[2]


def test_what_was_not_measured_is_null(tmp_path):
    options = ("--engines", "stage1_os", "--nproc", 1, "--model", "mlp", "--steps", 1)
    (row,) = written(tmp_path / "one.json", "lab.compare", *options)[1]["rows"]
    assert row["bitwise_equal_to_stage0"] is None
    assert row["tokens_per_second"] is None


@pytest.mark.parametrize("how", [("--precision", "bf16"), ("--precision", "fp16"), ("--no-sync",)])
def test_compare_cuts_a_step_into_micro_batches_and_recomputes(tmp_path, how):
    options = ("--nproc", 2, "--model", "gpt-tiny", "--steps", 2, "--engines", "stage0_ddp,stage2_grad")
    more = ("--checkpoint-activations", "--accumulate", 3, *how)
    said, results = written(tmp_path / "all.json", "lab.compare", *options, *more)
    assert "3 micro-batches" in said
    assert (results["checkpoint_activations"], results["accumulate"]) == ("non-reentrant", 3)
    for row in results["rows"]:
        assert row["bitwise_equal_to_stage0"] or "--no-sync" in how
        assert row["relative_norm_diff_to_torch_ddp"] < 1e-2
        assert row["model_state_bytes"] == row["predicted_model_state_bytes"]
        assert row["wire_bytes_per_step"] == row["predicted_wire_bytes_per_step"]


@pytest.mark.ranks(3)
def test_compare_promises_no_bits_where_nccl_adds_in_an_order_of_its_own(world):
    options = options_of_training("--model", "gpt-tiny", "--batch", 6, "--steps", 1)
    with mock.patch.object(compare, "Collectives", lambda **_: SimpleNamespace(ordered=False)):
        outcome = compare.compare(world, ["stage0_ddp", "stage1_os"], options)
    if world.rank:
        return
    results, _ = outcome
    for row in results["rows"]:
        row["bitwise_equal_to_stage0"] = False
        assert compare.holds(row)
        assert not compare.holds(row | {"relative_norm_diff_to_torch_ddp": 0.1})
    assert "add --deterministic" in compare.table(results).markdown()


@pytest.mark.parametrize("no_sync", [False, True])
def test_micro_batches_have_the_mean_loss_and_gradient_of_the_whole_batch(world, no_sync):
    """With plain SGD the step shows the gradient."""
    ends = []
    for micro_batches in (1, 4):
        engine = make_engine("stage1_os", "llama-tiny", functools.partial(torch.optim.SGD, lr=1.0))
        inputs, targets = batch(engine.module, world)
        parts = zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True)
        loss = loop.train_step(engine, list(parts), no_sync and micro_batches > 1)[0]
        ends.append((loss.item(), engine.full_state_dict()))
    (loss, weights), (cut_loss, cut_weights) = ends
    assert cut_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(cut_weights, weights, rtol=0, atol=1e-5)


@linux
def test_a_result_is_tried_where_the_disk_is_full_and_leaves_nothing(tmp_path):
    with small_disk(tmp_path / "disk", 2 * 4096):
        full, there = tmp_path / "disk" / "full", tmp_path / "disk" / "there"
        there.write_text("of yesterday")
        outputs.check_output("--json", there)
        with contextlib.suppress(OSError):
            full.write_bytes(bytes(4 * 4096))
        for path in (there, tmp_path / "disk" / "new"):
            with pytest.raises(InputError, match=r"--json .* cannot be written .No space left on device"):
                outputs.check_output("--json", path)
        assert there.read_text() == "of yesterday"
        assert sorted(os.listdir(tmp_path / "disk")) == ["full", "there"]
    outputs.check_output("--json", os.devnull)


PROGRAM = """
import sys
from common.measure.hardware import commit
from common.measure import tables
tables.say("\u03a8 parameters")
tables.show(tables.Table("\u03a8", ("\u03a8",), [("\u03a8",)]))
sys.stderr.write("the training goes on")
"""


@pytest.mark.parametrize("reader", ["has few letters", "has gone", "has no room"])
def test_output_that_nobody_can_read_ends_no_training(reader):
    reads, writes = os.pipe()
    if reader == "has gone":
        os.close(reads)
    if reader == "has no room":
        writes = os.open("/dev/full", os.O_WRONLY)
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, stdout=writes, stderr=subprocess.PIPE, check=False
    )
    note = "note: nothing more can be shown: No space left on device\n" if reader == "has no room" else ""
    assert (said.returncode, said.stderr.decode()) == (0, note + "the training goes on")


@pytest.mark.parametrize(
    ("error", "shown", "status"),
    [
        (InputError("give another"), "error: give another\n", 2),
        (RankFailed("rank 0:\n\nNotImplementedError: part 1 is still open\n"), "error: part 1 is still open\n", 2),
        (KeyboardInterrupt(), "", 130),
    ],
)
def test_an_error_is_shown_whatever_rank_the_environment_claims(monkeypatch, capsys, error, shown, status):
    monkeypatch.setenv("RANK", "1")  # as if under torchrun
    with pytest.raises(SystemExit) as end, outputs.one_line_errors():
        raise error
    assert (capsys.readouterr().err, end.value.code) == (shown, status)


BAD_INPUT = Path(__file__).with_name("bad_input.toml").read_text()
BAD_INPUT = tomllib.loads(BAD_INPUT.replace("{ROOT}", str(ROOT)).replace("{long}", 300 * "x"))
SEEN_BY_RANKS = ("--model moe-tiny --checkpoint-activations reentrant", "--path /proc")


@pytest.mark.parametrize(
    ("module", "options"), [(module, given) for module, rows in BAD_INPUT.items() for given in rows]
)
def test_bad_input_gets_one_line_and_exit_status_2(module, options, capfd, monkeypatch):
    if options not in SEEN_BY_RANKS:
        monkeypatch.setattr("multiprocessing.get_context", lambda *_: pytest.fail("it starts ranks"))
    of_a_stage = module in (*STAGES, "offload", "zeropp")
    own = {"add_own": importlib.import_module(f"{module}.__main__").add_own} if module in ("offload", "zeropp") else {}
    command = functools.partial(train.main, module, **own) if of_a_stage else importlib.import_module(module).main
    assert BAD_INPUT[module][options] in refused(capfd, command, shlex.split(options))


UNKNOWN = dict.fromkeys(("lab.readme", "course.exercises"), "--nope")
MISSPELT = "--presicion=bf16; did you mean --precision?"
UNKNOWN |= dict.fromkeys(("lab.plan.__main__", "lab.simulate.__main__", "lab.compare"), MISSPELT)


@pytest.mark.parametrize("module", UNKNOWN)
def test_an_unknown_argument_writes_nothing_and_a_misspelt_one_gets_the_nearest_name(module, capsys, monkeypatch):
    monkeypatch.setattr("pathlib.Path.write_text", lambda *_: pytest.fail("it writes"))
    with pytest.raises(SystemExit) as exit:
        importlib.import_module(module).main(UNKNOWN[module].split(";")[:1])
    assert exit.value.code == 2
    assert f"unrecognized arguments: {UNKNOWN[module]}" in capsys.readouterr().err
