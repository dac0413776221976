"""What a training command shows of a run: each count beside its prediction."""

MOVED = {  # beside what is sent
    "internode_bytes_per_step": "sent to other nodes by {}",
    "bus_bytes_per_step": "{} the bus",
    "disk_bytes_per_step": "disk {}",
}


def lines_of(row, precision):
    """The lines of the table, (what, measured, predicted), from a row of `common.train.train`."""
    lines = [
        (f"{state}, bytes per rank", str(measured), str(row["predicted_model_state_bytes"][state]))
        for state, measured in row["model_state_bytes"].items()
    ]
    sent, predicted = row["wire_bytes_per_step"], row["predicted_wire_bytes_per_step"]
    for collective in sorted({*sent, *predicted}):
        bytes_sent = (str(count.get(collective, 0)) for count in (sent, predicted))
        lines.append((f"{collective}, bytes sent per step", *bytes_sent))
    per_parameter = (
        f"{sum(row[states].values()) / row['parameters']:.2f}"
        for states in ("model_state_bytes", "predicted_model_state_bytes")
    )
    lines.append(("model states, bytes per parameter", *per_parameter))
    for where, name in (("on the host", "host_state_bytes"), ("on disk", "disk_state_bytes")):
        for state, held in row.get(name, {}).items():
            if held or row[f"predicted_{name}"][state]:
                lines.append((f"{state} {where}, bytes per rank", str(held), str(row[f"predicted_{name}"][state])))
    for name, said in MOVED.items():
        for way, predicted in row.get(f"predicted_{name}", {}).items():
            lines.append((f"{said.format(way)}, bytes per step", str(row[name].get(way, 0)), str(predicted)))
    lines.append(("peak of live bytes", str(row["peak_bytes"]), "-"))
    speed = row["tokens_per_second"]
    lines.append(("tokens per second", f"{speed:.0f}" if speed else "- (too few steps)", "-"))
    if precision == "fp16":
        lines.append(("steps skipped, as a gradient overflowed", str(row["skipped_steps"]), "-"))
    lines.append(("loss, first and last step", f"{row['losses'][0]:.4f}  {row['losses'][-1]:.4f}", "-"))
    return lines
