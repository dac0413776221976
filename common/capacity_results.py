"""What `common.capacity` found, as tables."""

from common.measure import tables
from common.train import show_bytes

HEADER = ("", "precision", "measured", "predicted", "of that", "to stage 0", "ideal")
MORE = {  # columns, where some engine has it
    "host": "host_bytes",
    "disk": "disk_bytes",
    "bits as without limit": "bits_without_limit",
}


def header(results):
    """The names of the columns."""
    more = [name for name, key in MORE.items() if any(found.get(key, 0) != 0 for found in results["rows"])]
    return (*HEADER, *more)


def cells(results):
    """The table's rows of strings, without the header."""
    for found in results["rows"]:
        yield (
            found["engine"],
            found["precision"],
            _millions(found["parameters"]) + (" or more" if found.get("or_more") else ""),
            "-" if found.get("or_more") else _millions(found["predicted_parameters"]),
            _percent(found["measured_over_predicted"]),
            _times(found["ratio_to_stage0"]),
            _times(found["ideal_ratio"]),
            *(_more(found.get(MORE[name])) for name in header(results)[len(HEADER) :]),
        )


def _more(value):
    return value if isinstance(value, str) else show_bytes(value or None)


def _millions(count):
    return f"{count / 1e6:.1f} M" if count else "none fits"


def _percent(ratio):
    return "-" if ratio is None else f"{100 * ratio:.0f} %"


def _times(ratio):
    return "-" if ratio is None else f"{ratio:.2f}x"


def _title(results):
    usable = min(row["usable_bytes"] for row in results["rows"])
    return (
        f"Largest GPT of width {results['model']['width']} that trains, {results['world_size']} ranks of "
        f"{show_bytes(results['cap_bytes'])}, of which {show_bytes(usable)} or more are left for the model"
        f"\n{results['hardware']}"
    )


def as_table(results):
    """The results as a table for the terminal."""
    return tables.table(_title(results), header(results), cells(results), left=2)


def as_markdown(results):
    """The results as a Markdown table."""
    return tables.markdown(_title(results), header(results), cells(results), left=2)
