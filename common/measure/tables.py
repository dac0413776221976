"""Tables, for the terminal and for pages.

In the terminal, words stay whole and nothing is left out, within 80 columns if the words fit. A terminal that lacks
letters, or whose reader has gone, as with `| head`, does not end training: what it cannot show is dropped.
"""

import contextlib
import os
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import rich.table
from rich.box import SIMPLE_HEAVY
from rich.console import Console

GAP, TIGHT = 3, 1  # columns of the terminal between two of the table's; and if words do not fit otherwise


@dataclass(frozen=True)
class Table:
    """A command's results, in cells of text.

    Attributes:
        title: above the table; "" for none.
        header: a name for each column.
        rows: [rows][columns].
        words: the columns aligned left; the others are numbers, aligned right.
        caption, note: below the table, in the terminal and on a page.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Collection[int] = (0,)
    caption: str = ""
    note: str = ""

    def markdown(self):
        """The table as Markdown, its title in one line."""
        rule = ["---" if number in self.words else "---:" for number in range(len(self.header))]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, rule, *self.rows)]
        parts = (self.title.replace("\n", "; "), "\n".join(lines), self.note)
        return "\n\n".join(part for part in parts if part)


def show(table, console=None):
    """Print a table whose cells break between words only.

    If even that is wider than the terminal, the table keeps the width that it needs: rich would cut words.
    """
    console = console or Console()
    columns = list(zip(table.header, *table.rows, strict=True))
    gap = GAP if needed(fit(columns, 0)) <= console.width else TIGHT
    widths = fit(columns, console.width, gap)
    console.width = max(console.width, needed(widths, gap))
    made = rich.table.Table(title=table.title, caption=table.caption, title_justify="left", caption_justify="left")
    made.box, made.show_edge, made.pad_edge, made.padding = SIMPLE_HEAVY, False, False, (0, gap // 2)
    for number, (name, width) in enumerate(zip(table.header, widths, strict=True)):
        made.add_column(name, justify="left" if number in table.words else "right", width=width)
    for row in table.rows:
        made.add_row(*row)
    _print(console.print, made)


def say(text):
    """Print a line for people, at once."""
    _print(print, text, flush=True)


def _print(how, *what, **options):
    with contextlib.suppress(AttributeError):  # a notebook's stdout has every letter
        sys.stdout.reconfigure(errors="replace")
    try:
        how(*what, **options)
    except (OSError, SystemExit) as error:  # rich raises SystemExit if the reader has gone
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            sys.stderr.write(f"note: nothing more can be shown: {error.strerror}\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def fit(columns, room, gap=GAP):
    """The widths of columns, texts [columns][rows], that fit in `room`, but never less than the longest word."""
    widths = [max(len(line) for text in column for line in text.split("\n")) for column in columns]
    words = [
        re.sub(r"(\d) (?=[kMGT]?B\b|s\b)", r"\1_", " ".join(column)).split() for column in columns
    ]  # "39.8 GB" is one
    longest = [max(map(len, found), default=0) for found in words]
    while needed(widths, gap) > room and widths != longest:
        widest = max((width, number) for number, width in enumerate(widths) if width > longest[number])[1]
        widths[widest] -= 1
    return widths


def needed(widths, gap=GAP):
    """The width of a table of columns of such widths."""
    return sum(widths) + gap * (len(widths) - 1)


def show_bytes(count):
    """Bytes for people: 1 kB = 1000 B, as in the papers."""
    if count is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count} B"
