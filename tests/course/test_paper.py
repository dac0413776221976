"""Pencil and paper: a sheet is solved from its own data, by this file's formulas; typical mistakes get their hints."""

import math
import random
import re
import tomllib
from pathlib import Path

import pytest
from commands import refused
from places import ROOT

from course import paper

SEEDS = (0, 16)
SHEET = ROOT / "notebooks" / "exercises" / "paper.toml"


def number(pattern, text):
    return float(re.search(pattern, text)[1].replace(",", ""))


def numbers(text, *patterns):
    return [number(pattern, text) for pattern in patterns]


def attention(told):
    return number(r"counts as ([\d.e+]+) parameters more", told)


def bytes_by_hand(told):
    """Model states and activations as the papers count them, from the sheet's data."""
    stage, ranks = numbers(told, r"Stage (\d)", r"on (\d+) ranks")
    tokens = number(r"(\d+) samples", told) * number(r"of (\d+) tokens", told)
    layers, width, psi = numbers(told, r"(\d+) blocks", r"width (\d+)", r"([\d,]+) parameters")
    size, masters = (2, 4) if "in bf16" in told else (4, 0)
    shares = [1 / ranks if stage >= sharded else 1 for sharded in (3, 2, 1)]
    built = psi * (size * shares[0] + size * shares[1] + masters * shares[2])
    in_a_block = 1 if "input alone" in told else 16
    return {
        "after_building": built,
        "activations": tokens * (size * (layers * in_a_block + 2) * width + 4 * 256),
        "before_the_step": built,
        "after_the_step": built + 8 * psi * shares[2],
    }


def links_by_hand(told):
    """Bytes over the slowest link's bandwidth, and operations over a GPU's sustained rate."""
    psi, kept, tokens = numbers(told, r"of ([\d.e+]+) param", r"([\d.e+]+) of its", r"of ([\d,]+) tok")
    ranks = math.prod(numbers(told, r"(\d+) nodes", r"of (\d+) GPUs"))
    rate = math.prod(numbers(told, r"peak is ([\d.]+)", r"reaches ([\d.]+)"))
    sent = 2 * (3 * psi - kept if "by stage 3" in told else 2 * psi) * (ranks - 1) / ranks
    sending = sent / (number(r"together send ([\d.]+)", told) * 1e9)
    of_a_token = (8 if " with activation" in told else 6) * (psi + attention(told)) / (rate * 1e10)
    return {
        "sent": sent,
        "collectives_seconds": sending,
        "computation_seconds": tokens * of_a_token,
        "bound": "collectives" if sending > tokens * of_a_token else "computation",
        "tokens": sending / of_a_token,
    }


def machine_by_hand(told):
    """The fastest strategy that fits, of all on every offer. ZeRO++ sends 1/4 over slow links, Offload 2 of 3 parts."""
    ranks, holds, psi = numbers(told, r"(\d+) GPUs", r"with ([\d.]+) GB", r"of ([\d.e+]+) param")
    rate = number(r"reaches ([\d.]+)", told) * 1e12
    computing = 8 * (psi + attention(told)) * number(r"has ([\d,]+) tokens", told) / rate
    amounts = r"It sends ([\d.]+) GB .* moves ([\d.]+) GB .* where it has ([\d.]+) GB, .* and ([\d.]+) GB"
    inside, bus, host, disk = (1e9 * float(amount) for amount in re.search(amounts, told).groups())
    offers = re.findall(r"([ABC])  nodes of (\d+), .* ([\d.]+) GB", told)
    weights = 1 if "gathers in int8" in told else 2
    second, reduced = "a secondary shard" in told, 0.5 if "in int4" in told else 2
    room = {title: 1e9 * float(gb) for title, gb in re.findall(r"^    (\S.*?)  +([\d.]+) GB$", told, re.MULTILINE)}
    two, three = (2 * times * psi * (ranks - 1) / ranks for times in (2, 3))
    part = psi / ranks
    fitting, first = {}, None
    for offer, p, between in ((offer, int(p), 1e9 * float(rate)) for offer, p, rate in offers):
        slowest = between if ranks > p else inside
        second_hop = 1 - p / ranks if reduced < 1 else 1
        across = (weights * (2 - second) + reduced * second_hop) * psi
        within = (weights + (2 if second else weights) + reduced) * psi
        ways = {  # bytes of model states on a GPU, on the host; seconds of collectives, bus and disk
            "stage 0, data parallelism": (16 * psi, 0, two / slowest),
            "stage 1": (4 * psi + 12 * part, 0, two / slowest),
            "stage 2": (2 * psi + 14 * part, 0, two / slowest),
            "stage 3": (16 * part, 0, three / slowest),
            "stage 3, optimizer on the host": (4 * part, 12 * part, max(three / slowest, 4 * part / bus)),
            "ZeRO-Offload": (2 * psi, 14 * part, max(two / slowest, 4 * part / bus)),
            "ZeRO-Infinity, host": (0, 16 * part, max(three / slowest, three / ranks / bus)),
            "ZeRO-Infinity, disk": (0, 0, max(three / slowest, three / ranks / bus, 34 * part / disk)),
            "ZeRO++": (16 * part + 2 * psi / p * second, 0, max(across / slowest, within / inside)),
        }
        fits = [way for way, (device, _, _) in ways.items() if device + room[way] <= 0.9e9 * holds]
        fits = [way for way in fits if ways[way][1] <= 0.9 * host]
        first = first or fits[0]
        fitting |= {(offer, way): max(computing, ways[way][2]) for way in fits}
    least = min(fitting.values())
    offer, fastest = next(key for key, takes in fitting.items() if takes < 1.04 * least)
    return {"lowest": first, "offer": offer, "fastest": fastest}


def by_hand(seed):
    solvers = {"bytes": bytes_by_hand, "links": links_by_hand, "machine": machine_by_hand}
    return {group: solvers[group](told) for group, (told, _) in paper.groups(seed).items()}


def answered(seed, answers):
    """A sheet with answers {group: {name: answer}}."""
    text = paper.sheet(seed, "sheet.toml")
    for of_group in answers.values():
        for name, answer in of_group.items():
            shown = f'"{answer}"' if isinstance(answer, str) else repr(answer)
            text = text.replace(f'\n{name} = "?"', f"\n{name} = {shown}")
    return text


def run(path):
    with pytest.raises(SystemExit) as ended:
        paper.main([str(path)])
    return ended.value.code


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sheet_is_solved_by_what_it_tells(seed, tmp_path, capsys):
    path = tmp_path / "sheet.toml"
    path.write_text(answered(seed, by_hand(seed)))
    assert run(path) == 0, capsys.readouterr().out


def test_the_best_split_is_found_by_hand_whatever_zeropp_switches_off():
    drawn = set()
    for seed in range(16):
        told, questions = paper.machine(random.Random(seed))
        assert machine_by_hand(told) == {question.name: question.right for question in questions}, seed
        drawn |= {told.partition("(zeropp/README.md)")[2].partition(". A step")[0]}
    assert len(drawn) == 4


def test_the_sheet_of_the_course_is_as_it_is_drawn_and_open(capsys):
    assert SHEET.read_text() == paper.sheet(SEEDS[0], SHEET.relative_to(ROOT))
    assert run(SHEET) == 1
    assert "0 of 12 right" in capsys.readouterr().out


MISTAKES = tomllib.loads(Path(__file__).with_name("paper_mistakes.toml").read_text())


@pytest.mark.parametrize(
    ("group", "name", "wrong"),
    [(group, name, wrong) for group, of in MISTAKES.items() for name in of for wrong in of[name]],
)
def test_a_typical_mistake_gets_its_hint_and_the_others_are_checked(group, name, wrong, tmp_path):
    answers = by_hand(SEEDS[0])
    answers[group][name] = eval(wrong, dict(answers[group])) if wrong else "taken out"
    path = tmp_path / "sheet.toml"
    path.write_text(answered(SEEDS[0], answers).replace(f'{name} = "taken out"\n', ""))
    verdicts = paper.check(path)
    assert MISTAKES[group][name][wrong] in verdicts.pop(f"{group}.{name}")
    assert set(verdicts.values()) == {"right"}


def test_a_sheet_with_answers_is_not_written_over(tmp_path, capsys):
    path = tmp_path / "sheet.toml"
    path.write_text("mine")
    assert "name another file" in refused(capsys, paper.main, [str(path), "--seed", "7"])
    assert path.read_text() == "mine"
