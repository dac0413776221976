"""What a user should know of the function, whoever trains it: read off the run under plain DDP."""

from interop.diagnose.comparing import ranks_part


def notes(plain, rows):
    """All that is to be said, [sentence], of a recording under plain DDP, whose ranks step alike, and of rows."""
    steps = [[rank["steps"][step] for rank in plain] for step in range(1, len(plain[0]["steps"]))]  # [step][rank]
    found = (_unused, _compiled, _parting, _scheduled, _data, _drawn, _sizes)
    return [*(note for find in found if (note := find(plain, steps))), *_not_taken(rows)]


def _unused(plain, steps):
    found = [set(step) for rank in plain for step in rank["unused"]]
    unused = sorted(set().union(*found))
    if unused:
        names = ", ".join(unused[:3]) + (f" and {len(unused) - 3} more" if unused[3:] else "")
        when = "" if all(step == set(unused) for step in found) else " in some steps or on some ranks"
        return (
            f"{names} had no gradient{when}. torch's DDP needs find_unused_parameters=True, which it had here. Here a "
            "zero gradient steps them, so that momentum and weight decay go on; torch's optimizers pass by what has "
            "None. requires_grad_(False) freezes them everywhere"
        )


def _compiled(plain, steps):
    if plain[0]["compiled"]:
        return (
            "the model is compiled, and what is fused otherwise rounds otherwise. Compile before the engine is built; "
            "TORCH_COMPILE_DISABLE=1 tells rounding from a fault"
        )


def _parting(plain, steps):
    """Ranks that step otherwise, by other options of the optimizer or for another reason."""
    for number, ranks in enumerate(steps, 1):
        for group, options in enumerate(zip(*(rank["options"][-1] for rank in ranks), strict=False)):
            for name in options[0]:
                values = [each.get(name) for each in options]
                if len(set(values)) > 1:
                    told = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                    return (
                        f"at the step() of step {number}, {name} of parameter group {group} is {told}. So the ranks of "
                        "plain DDP part, and each shard is stepped otherwise. Set it by what all ranks share"
                    )
    if (parted := ranks_part(plain)) is not None:
        step, name, rank = parted
        return (
            f"under plain DDP {name} of rank {rank} is not rank 0's after step {step}: the ranks write weights or "
            ".grad, or build their optimizers, each in its own way"
        )


def _scheduled(plain, steps):
    for number, ranks in enumerate(steps, 1):
        for rank, step in enumerate(ranks):
            for group, options in enumerate(zip(*step["options"], strict=False)):
                rates = [each.get("lr") for each in options]
                if len(set(rates)) > 1:
                    return (
                        f"within step {number} lr of parameter group {group} is {rates[0]} in the first backward and "
                        f"{rates[-1]} in step(), on rank {rank}: a scheduler steps once for each step(), after it"
                    )


def _data(plain, steps):
    size = len(plain)
    if size > 1 and all(rank["losses"] == step[0]["losses"] for step in steps for rank in step):
        return f"all {size} ranks have the same losses. Do they read the same data? Give each its part, by its rank"


def _drawn(plain, steps):
    drawn = [[rank["drawn"] for rank in step] for step in steps]
    if len(plain) > 1 and any(ranks[0] and ranks.count(ranks[0]) == len(ranks) for ranks in drawn):
        return (
            "all ranks draw the same random numbers in a forward, by which dropout drops the same units. Call "
            "torch.manual_seed(seed + rank) once the engine is built, unless it is a choice that they share"
        )


def _sizes(plain, steps):
    """Micro-batches that a mean over backwards or ranks does not weigh by what is in them."""
    for number, ranks in enumerate(steps, 1):
        backwards = [len(rank["losses"]) for rank in ranks]
        sizes = sorted({size for rank in ranks for size in rank["sizes"]})
        found = None
        if len(set(backwards)) > 1:
            found = f"ranks have {min(backwards)} to {max(backwards)} backwards"
        elif len(sizes) > 1 and backwards == [len(rank["sizes"]) for rank in ranks]:  # a forward for each
            found = f"inputs have {sizes[0]} to {sizes[-1]} elements"
        if found:
            return (
                f"in step {number} {found}. A mean of mean losses counts a small micro-batch like a large one; where "
                "each sample is to count alike, see common.loss.TokenMean"
            )


def _not_taken(rows):
    for option in sorted({option for row in rows for option in row.get("not_taken", ())}):
        without = [row["engine"] for row in rows if option in row.get("not_taken", ())]
        yield f"{option}= is no option of {', '.join(without)}, and was left out there"
