"""Tables, for the terminal and for pages.

In the terminal words stay whole and nothing is left out, in 80 columns where the words have room. A terminal that lacks
letters, or whose reader has gone, as of `| head`, ends no training: what it cannot show is not shown.
"""

import contextlib
import os
import sys

from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table

GAP = 3  # columns of the terminal between two of the table's


def table(title, header, rows, left=1, caption=None):
    """A table whose first `left` columns are words; the others are numbers, set to the right."""
    made = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    made.box, made.show_edge, made.pad_edge = SIMPLE_HEAVY, False, False
    for number, name in enumerate(header):
        made.add_column(name, justify="left" if number < left else "right")
    for row in rows:
        made.add_row(*row)
    return made


def markdown(title, header, rows, left=1):
    """The same table as Markdown, below its title in one line."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)]
    return "\n".join([title.replace("\n", "; "), "", *lines])


def show(made, console=None):
    """Print a table, lines of cells broken between words only.

    Where even that takes more than the terminal has, the table is as wide as it must be: rich would cut words.
    """
    console = console or Console()
    widths = fit([[column.header, *column.cells] for column in made.columns], console.width)
    for column, width in zip(made.columns, widths, strict=True):
        column.width = width
    console.width = max(console.width, needed(widths))
    _print(console.print, made)


def say(text):
    """Print a line for people, at once."""
    _print(print, text, flush=True)


def _print(how, *what, **options):
    with contextlib.suppress(AttributeError):  # a notebook's stdout has every letter
        sys.stdout.reconfigure(errors="replace")
    try:
        how(*what, **options)
    except (OSError, SystemExit) as error:  # by SystemExit rich leaves, where the reader has gone
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"note: nothing more can be shown: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fit(columns, room):
    """The widths of a table's columns: of their texts, or less where that is too much, but of their longest words.

    Args:
        columns: their texts, [columns][rows].
        room: what the table may take.
    """
    widths = [max(len(line) for text in column for line in text.split("\n")) for column in columns]
    longest = [max(map(len, " ".join(column).split()), default=0) for column in columns]
    while needed(widths) > room and widths != longest:
        widest = max((width, number) for number, width in enumerate(widths) if width > longest[number])[1]
        widths[widest] -= 1
    return widths


def needed(widths):
    """What a table of columns of such widths takes."""
    return sum(widths) + GAP * (len(widths) - 1)
