"""What `lab.capacity` found, as a table."""

from common.measure.tables import Table, show_bytes

MORE = {  # columns, where some engine has it
    "host": "host_bytes",
    "disk": "disk_bytes",
    "bits as without limit": "bits_without_limit",
}


def table(results):
    """A row for each engine in each precision."""
    usable = min(row["usable_bytes"] for row in results["rows"])
    title = (
        f"Largest GPT of width {results['model']['width']} that trains, {results['world_size']} ranks of "
        f"{show_bytes(results['cap_bytes'])}, of which {show_bytes(usable)} or more are left for the model"
        f"\n{results['hardware']}"
    )
    more = {name: key for name, key in MORE.items() if any(found.get(key, 0) != 0 for found in results["rows"])}
    header = ("", "in", "measured", "predicted", "of that", "to stage 0", "ideal", *more)
    rows = []
    for found in results["rows"]:
        cells = (
            found["engine"],
            found["precision"],
            _millions(found["parameters"]) + (" or more" if found.get("or_more") else ""),
            "-" if found.get("or_more") else _millions(found["predicted_parameters"]),
            _percent(found["measured_over_predicted"]),
            _times(found["ratio_to_stage0"]),
            _times(found["ideal_ratio"]),
            *(_more(found.get(key)) for key in more.values()),
        )
        rows.append(cells)
    return Table(title, header, rows, words=(0, 1))


def _more(value):
    return value if isinstance(value, str) else show_bytes(value or None)


def _millions(count):
    return f"{count / 1e6:.1f} M" if count else "none fits"


def _percent(ratio):
    return "-" if ratio is None else f"{100 * ratio:.0f} %"


def _times(ratio):
    return "-" if ratio is None else f"{ratio:.2f}x"
