"""Time on simulated streams: what an operation takes, what overlaps, and what is exposed."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from common.engines import find_engine
from common.loop import train_step
from common.measure.traffic import Traffic
from common.ranks.collectives import Collectives
from lab.simulate import __main__ as command
from lab.simulate.clock import Clock
from lab.simulate.hardware import PRESETS
from lab.simulate.world import Setting, simulate, simulated_world

ROUND = replace(PRESETS["a100-80g"], flops={4: 2e12, 2: 4e12}, fraction=0.5, memory=1e12, operation=0.0)
ROUND = replace(ROUND, inside=1e9, between=2e9, latency=0.0, bus=1e9)  # numbers for mental arithmetic


def timed(work, ranks_per_node=4, backend="nccl"):
    """The Clock after some work in a simulated world."""
    with simulated_world(8, 0, ranks_per_node, backend), Clock(ROUND, ranks_per_node, Traffic()) as clock:
        work()
    return clock


def test_arithmetic_or_memory_whichever_takes_longer():
    with simulated_world(1), Clock(ROUND, 1, Traffic()) as clock:
        torch.mm(*[torch.empty(1000, 1000)] * 2)
        assert clock.now["compute"] == pytest.approx(2e9 / 1e12)
        torch.mm(*[torch.empty(1000, 1000, dtype=torch.bfloat16)] * 2)
        assert clock.now["compute"] == pytest.approx(3e9 / 1e12)
        torch.empty(10**6).add_(torch.empty(10**6))
        assert clock.now["compute"] == pytest.approx(3e9 / 1e12 + 3 * 4e6 / 1e12)
        torch.empty(10**6).view(1000, 1000).t()
        assert clock.now["compute"] == pytest.approx(3e9 / 1e12 + 3 * 4e6 / 1e12)


M = 8 * 10**6  # bytes of a tensor on 8 ranks


@pytest.mark.parametrize(
    ("name", "ranks_per_node", "backend", "seconds"),
    [
        ("all_gather", 8, "nccl", 7 / 8 * M / 1e9),  # inside the node each rank sends 7 shards
        ("all_gather", 8, "gloo", 7 / 8 * M / 1e9),  # which takes as long point to point
        ("all_gather", 4, "nccl", 7 / 8 * M / 1e9),  # a ring crosses to the other node once, at twice the rate
        ("all_gather", 1, "nccl", 7 / 8 * M / 1e9),
        ("all_to_all", 4, "nccl", 4 * 4 / 8 * M / 2e9),  # a node's 4 ranks send half of it across
        ("all_reduce", 8, "nccl", 2 * 7 / 8 * M / 1e9),
    ],
)
def test_a_collective_takes_what_its_bytes_take_over_the_slowest_link(name, ranks_per_node, backend, seconds):
    def work():
        comm, whole = Collectives(), torch.empty(M // 4)
        arguments = {
            "all_gather": (whole[: M // 32], whole),
            "all_to_all": (whole, torch.empty(M // 4)),
            "all_reduce": (whole,),
        }
        getattr(comm, name)(*arguments[name]).wait()

    clock = timed(work, ranks_per_node, backend)
    assert clock.busy["collectives"] == pytest.approx(seconds, rel=0.01)  # plus a division
    assert clock.waited["collectives"] == pytest.approx(seconds, rel=0.01)


def test_what_overlaps_with_computation_is_not_exposed():
    """Computation of 10 ms hides 7 ms of an all-gather; 3 ms hide 3 of them."""

    def work(side):
        comm, whole, one = Collectives(), torch.empty(M // 4), torch.empty(side, 1000)
        handle = comm.all_gather(whole[: M // 32], whole)
        torch.mm(one, torch.empty(1000, 1000))
        handle.wait()

    clock = timed(lambda: work(5000))
    assert clock.now["compute"] == pytest.approx(10e-3)
    assert clock.waited["collectives"] == 0
    clock = timed(lambda: work(1500))
    assert clock.now["compute"] == pytest.approx(7e-3)
    assert clock.waited["collectives"] == pytest.approx(4e-3)


SLOW = replace(PRESETS["h100-80g"], inside=5e8, between=5e8)


@pytest.mark.parametrize("name", ["stage3_param", "zeropp", "offload", "offload.nvme"])
def test_a_slow_link_is_exposed_and_bounds_the_step(name):
    made = {}
    for link, hardware in (("fast", PRESETS["h100-80g"]), ("slow", SLOW)):
        how = {"precision": "bf16", "ranks_per_node": 4, "batch": 8, "hardware": hardware}
        row = simulate(Setting(find_engine(name), "gpt-micro", 8, **how), train_step)
        made[link] = row["time"]
        assert row["wire_bytes_per_step"] == row["predicted_wire_bytes_per_step"]  # of one step, though two are run
    assert made["slow"]["step_seconds"] > 2 * made["fast"]["step_seconds"]
    assert made["slow"]["exposed"]["collectives"] > made["fast"]["exposed"].get("collectives", 0)
    assert made["slow"]["bound"] == "collectives"
    assert made["slow"]["busy"]["compute"] == pytest.approx(made["fast"]["busy"]["compute"])
    assert made["fast"]["model_flops"] == pytest.approx(made["fast"]["flops"], rel=0.2)  # nothing is computed twice
    if name.startswith("offload"):
        assert {"bus", "host"} & set(made["fast"]["busy"])


def test_recomputation_counts_as_work_in_hfu_and_not_in_mfu():
    hardware, model = PRESETS["a100-80g"], "gpt-micro"
    setting = Setting(find_engine("stage0_ddp"), model, 1, checkpoint_activations="reentrant", hardware=hardware)
    time = simulate(setting, train_step)["time"]
    assert time["fraction"] == hardware.fraction
    assert time["hfu"] / time["mfu"] == pytest.approx(4 / 3, rel=0.1)  # but for the logits, which no block computes


def test_the_command_tells_the_time_and_draws_the_streams(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    options = ["--hardware", "v100-32g", "--world-size", "16", "--precision", "fp16", "--trace", str(trace)]
    command.main(["offload.nvme", "--with", "tiers=nvme", *options])
    said = capsys.readouterr().out
    assert "Time, on DGX-2, V100 32 GB" in said
    assert "bound by" in said
    assert "45% of the peak, the HFU of well-tuned trainings" in " ".join(said.split())
    events = json.loads(trace.read_text())["traceEvents"]
    rows = {event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"}
    assert set(rows) == {"compute", "collectives", "bus", "host", "disk"}
    for row in rows.values():  # what runs on a stream runs one after the other
        spans = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == row)
        assert all(begin + took <= after + 1e-3 for (begin, took), (after, _) in itertools.pairwise(spans))


def test_causal_attention_is_half_of_its_square_and_takes_its_own_fractions():
    query = torch.zeros(1, 1, 64, 8, requires_grad=True)
    hardware, counted, seconds = replace(ROUND, attention={"flash": [0.25, 0.125]}), {}, {}
    for causal in (False, True):
        with Clock(hardware, 1, Traffic()) as clock:
            torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=causal).sum().backward()
        counted[causal] = sum(clock.flops.values())
        seconds[causal] = {what: taken for _, what, _, taken in clock.events if "attention" in what}
    assert counted[False] == 2 * counted[True] == 14 * 64 * 64 * 8
    forward, backward = seconds[True].values()
    assert backward / forward == pytest.approx(5 / 2 * 0.25 / 0.125)
