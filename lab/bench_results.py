"""Results of `lab.bench`: ratios of times with their intervals, in JSON, tables and Markdown."""

import numpy as np

from common import models
from common.engines import ENGINES
from common.measure.tables import Table, show_bytes
from interop import peers
from lab.figures import described

# Relative differences of losses that another order of additions and other rounding explain.
SAME_LOSS = {"fp32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
REFERENCE = peers.TorchDDP.name
ALONE = peers.BareLoop.name  # a peer of every stage, at world size 1
HEADER = ("", "ms per step", "to torch DDP", "to its peers", "peak memory", "tokens/s")


def row(contestant, contestants, reference, case):
    """The result of a contestant's rounds; null if it does not take part or does not compute the same."""
    result = {"engine": contestant.name, **case.label(), "note": contestant.refusal, "loss_difference": None}
    result |= dict.fromkeys(("median_seconds", "tokens_per_second", "ratio_to_torch_ddp", "ratio_interval"))
    result |= {"ratios_to_peers": {}, "peak_bytes": contestant.peak_bytes, "seconds": []}
    result["sent_bytes"] = contestant.sent
    if contestant.refusal is not None:
        return result
    alone = case.world_size > 1 and contestant.name.startswith(ALONE)  # each rank trains a model of its own
    result["loss_difference"] = None if alone else loss_difference(contestant.losses, reference.losses)
    if not (alone or result["loss_difference"] <= SAME_LOSS[case.precision]):
        result["note"] = f"its losses differ from {REFERENCE}'s by {result['loss_difference']:.1e}: no time"
        return result
    result["seconds"] = contestant.timed.tolist()
    result["median_seconds"] = float(np.median(contestant.timed))
    result["tokens_per_second"] = case.tokens / result["median_seconds"]
    if reference in contestants:
        result["ratio_to_torch_ddp"], result["ratio_interval"] = paired_ratio(contestant, reference)
    for other in contestants:
        compared = other.follows == contestant.name or (other.name == ALONE and contestant.name in ENGINES)
        compared &= other.name != ALONE or case.world_size == 1
        if other is not contestant and compared and other.refusal is None:
            ratio, interval = paired_ratio(contestant, other)
            result["ratios_to_peers"][other.name] = {"ratio": ratio, "interval": interval}
        if hasattr(other, "with_bytes") and not alone and contestant.sent is not None:
            ratio, interval = paired_ratio(contestant, other.with_bytes(contestant.sent))
            result["ratios_to_peers"]["the bound"] = {"ratio": ratio, "interval": interval}
    return result


def loss_difference(losses, reference):
    """The largest relative difference of two runs' losses; infinite if one is NaN."""
    differences = np.abs(np.subtract(losses, reference)) / np.abs(reference)
    return float(np.nan_to_num(differences, nan=np.inf).max())


def paired_ratio(one, other):
    """The median of one's time over the other's within a round, and its 95 % interval: worlds are drawn, then rounds.

    Source: Davison and Hinkley, "Bootstrap Methods and their Application", 1997, sec. 3.8, for two levels.
    """
    ratios, generator = one.timed / other.timed, np.random.default_rng(0)
    worlds, rounds = ratios.shape
    drawn_worlds = generator.integers(worlds, size=(10_000, worlds, 1))
    drawn_rounds = generator.integers(rounds, size=(10_000, worlds, rounds))
    medians = np.median(ratios[drawn_worlds, drawn_rounds], axis=(1, 2))
    return float(np.median(ratios)), np.quantile(medians, (0.025, 0.975)).tolist()


def by_case(results):
    """{title: rows} of all cases."""
    cases = {}
    for found in results["rows"]:
        cases.setdefault(described(found), []).append(found)
    return cases


def _cells(found):
    if found["median_seconds"] is None:
        return (found["engine"], found["note"], "", "", "", "")
    return (
        found["engine"],
        f"{1000 * found['median_seconds']:.0f}",
        "" if found["ratio_interval"] is None else show_ratio(found["ratio_to_torch_ddp"], found["ratio_interval"]),
        "; ".join(f"{name} {show_ratio(**told)}" for name, told in found["ratios_to_peers"].items()),
        show_bytes(found["peak_bytes"]),
        f"{found['tokens_per_second']:,.0f}",
    )


def show_ratio(ratio, interval):
    """A ratio with its interval."""
    return f"{ratio:.2f} ({interval[0]:.2f}-{interval[1]:.2f})"


def tables(results):
    """A table of each case for the terminal: ratios to peers on lines of their own, refusals in the caption."""
    for title, rows in by_case(results).items():
        lines = []
        for found in rows:
            if found["median_seconds"] is not None:
                name, time, ratio, _, *rest = _cells(found)
                lines.append((name, time, ratio, *rest))
                for peer, told in found["ratios_to_peers"].items():
                    lines.append((f"to {peer}", "", show_ratio(**told), "", ""))
        notes = [f"{found['engine']}: {found['note']}" for found in rows if found["median_seconds"] is None]
        yield Table(title, (*HEADER[:3], *HEADER[4:]), lines, caption="\n".join(notes))


def as_markdown(results):
    """All cases as Markdown tables."""
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    spans = f"{results['worlds']} worlds of {results['rounds_per_world']} rounds of {results['steps_per_round']} steps"
    found = [Table(f"{title}:", HEADER, [*map(_cells, rows)], words=(0, 3)) for title, rows in by_case(results).items()]
    return "\n\n".join([f"{results['hardware']}; {versions}; {spans}", *(table.markdown() for table in found)])


def alone_as_markdown(*records):
    """What an engine costs over a bare loop at world size 1, for each batch and model, as Markdown."""
    lines = []
    for results in records:
        rows = [found for found in results["rows"] if ALONE in found["ratios_to_peers"]]
        tokens = results["batch_per_rank"] * (models.build(rows[0]["model"]).window - 1)
        for model in dict.fromkeys(found["model"] for found in rows):
            ratios = [found["ratios_to_peers"][ALONE] for found in rows if found["model"] == model]
            lines.append((model, f"{tokens:,}", *(show_ratio(**told) for told in ratios)))
    engines = dict.fromkeys(found["engine"] for found in rows)
    return Table(records[0]["hardware"], ("over a bare loop", "tokens a step", *engines), lines).markdown()
