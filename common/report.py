"""The table that a training command shows: each count beside its prediction."""

MOVED = {  # besides the collectives
    "internode_bytes_per_step": "sent to other nodes by {}",
    "bus_bytes_per_step": "{} over the bus",
    "disk_bytes_per_step": "disk {}",
    "tensor_bytes_per_step": "tensor axis, {} sent",
    "pipeline_bytes_per_step": "pipeline axis, {} sent",
}


def counts_of(row):
    """The table's counts of bytes, lines (what, measured, predicted); "-" if nothing is predicted."""
    held, sent = row["model_state_bytes"], row["wire_bytes_per_step"]
    foreseen, to_send = (row.get(f"predicted_{name}") for name in ("model_state_bytes", "wire_bytes_per_step"))
    lines = [(f"{state}, bytes per rank", str(held[state]), _of(foreseen, state)) for state in held]
    for collective in sorted({*sent, *(to_send or ())}):
        lines.append((f"{collective}, bytes sent per step", str(sent.get(collective, 0)), _of(to_send, collective)))
    each = ("-" if states is None else f"{sum(states.values()) / row['parameters']:.2f}" for states in (held, foreseen))
    lines.append(("model states, bytes per parameter", *each))
    for where, name in (("on the host", "host_state_bytes"), ("on disk", "disk_state_bytes")):
        for state, held in row.get(name, {}).items():
            if held or row[f"predicted_{name}"][state]:
                lines.append((f"{state} {where}, bytes per rank", str(held), str(row[f"predicted_{name}"][state])))
    for name, said in MOVED.items():
        for way, predicted in row.get(f"predicted_{name}", {}).items():
            lines.append((f"{said.format(way)}, bytes per step", str(row[name].get(way, 0)), str(predicted)))
    if "padding" in row:
        lines.append(("shards of whole matrices, over their size", f"{row['padding']:.3f}", "-"))
    lines.append(("peak of live bytes", str(row["peak_bytes"]), "-"))
    return lines


def _of(predicted, name):
    return "-" if predicted is None else str(predicted.get(name, 0))


def lines_of(row, precision):
    """All lines of the table, from a row of `common.train.train`."""
    lines, speed = counts_of(row), row["tokens_per_second"]
    lines.append(("tokens per second", f"{speed:.0f}" if speed else "- (too few steps)", "-"))
    if precision == "fp16":
        lines.append(("steps skipped, as a gradient overflowed", str(row["skipped_steps"]), "-"))
    lines.append(("loss, first and last step", f"{row['losses'][0]:.4f}  {row['losses'][-1]:.4f}", "-"))
    return lines
