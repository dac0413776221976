"""What a user should know of the function under any engine, from the run under plain DDP."""

import tomllib
from pathlib import Path

from interop.diagnose.comparing import ranks_part

SAID = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def notes(plain, rows):
    """All notes, [sentence], on a recording under plain DDP, whose ranks step alike, and on rows."""
    steps = [[rank["steps"][step] for rank in plain] for step in range(1, len(plain[0]["steps"]))]  # [step][rank]
    found = (_unused, _compiled, _parting, _scheduled, _data, _drawn, _sizes)
    return [*(note for find in found if (note := find(plain, steps))), *_not_taken(rows)]


def _unused(plain, steps):
    found = [set(step) for rank in plain for step in rank["unused"]]
    unused = sorted(set().union(*found))
    if unused:
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if unused[3:] else "")
        when = "" if all(step == set(unused) for step in found) else " in some steps or on some ranks"
        return SAID["unused"].format(names=names, when=when)


def _compiled(plain, steps):
    return SAID["compiled"] if plain[0]["compiled"] else None


def _parting(plain, steps):
    """Ranks that step differently, because of other options of the optimizer or for another reason."""
    for number, ranks in enumerate(steps, 1):
        for group, options in enumerate(zip(*(rank["options"][-1] for rank in ranks), strict=False)):
            for name in options[0]:
                values = [each.get(name) for each in options]
                if len(set(values)) > 1:
                    told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                    return SAID["options_by_rank"].format(step=number, option=name, group=group, told=told)
    if (parted := ranks_part(plain)) is not None:
        step, name, rank = parted
        return SAID["parting"].format(name=name, rank=rank, step=step)


def _scheduled(plain, steps):
    for number, ranks in enumerate(steps, 1):
        for rank, step in enumerate(ranks):
            for group, options in enumerate(zip(*step["options"], strict=False)):
                rates = [each.get("lr") for each in options]
                if len(set(rates)) > 1:
                    where = {"step": number, "group": group, "rank": rank}
                    return SAID["scheduled"].format(first=rates[0], last=rates[-1], **where)


def _data(plain, steps):
    size = len(plain)
    if size > 1 and all(rank["losses"] == step[0]["losses"] for step in steps for rank in step):
        return SAID["same_data"].format(ranks=size)


def _drawn(plain, steps):
    drawn = [[rank["drawn"] for rank in step] for step in steps]
    if len(plain) > 1 and any(ranks[0] and ranks.count(ranks[0]) == len(ranks) for ranks in drawn):
        return SAID["drawn_alike"]


def _sizes(plain, steps):
    """Micro-batches that a mean over backwards or ranks does not weight by their size."""
    for number, ranks in enumerate(steps, 1):
        backwards = [len(rank["losses"]) for rank in ranks]
        sizes = sorted({size for rank in ranks for size in rank["sizes"]})
        found = None
        if len(set(backwards)) > 1:
            found = f"ranks have {min(backwards)} to {max(backwards)} backwards"
        elif len(sizes) > 1 and backwards == [len(rank["sizes"]) for rank in ranks]:  # a forward for each
            found = f"inputs have {sizes[0]} to {sizes[-1]} elements"
        if found:
            return SAID["sizes"].format(step=number, found=found)


def _not_taken(rows):
    for option in sorted({option for row in rows for option in row.get("not_taken", ())}):
        without = [row["engine"] for row in rows if option in row.get("not_taken", ())]
        yield SAID["not_taken"].format(option=option, engines=", ".join(without))
