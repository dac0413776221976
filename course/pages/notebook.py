"""Ranks for a notebook: processes that run functions of its cells and show their lines as they print them; figures.

A cell defines `hello(world)`, another one runs it on every rank: `Ranks(2).run(hello)` returns what the two return, and
beneath the cell stand their lines, each rank's in its colour.
"""

import re
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import cloudpickle
import matplotlib.pyplot as plt
from IPython import get_ipython
from IPython.display import HTML, display
from jinja2 import Template

from common.ranks.world import LocalWorld, RankFailed
from course.pages import ranks as far_side
from course.pages.ranks import PROGRESS

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#3a9bd4", "#c98500", "#8a7d00", "#777777")
SHOWN = 200  # lines beneath a cell; of more the last
PAGE = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"), autoescape=True)

# In a tree made for students: a stage whose exercise is not solved, or a page that is to be written.
UNSOLVED = re.compile(
    r'/(stage\d)_\w+/engine\.py", .*\n.*\n\w*Error: (part .* open)|Error: (stage(\d)\w+/minimal\.py): (.* open)'
)


class Ranks:
    """So many ranks on this machine, started by the first `run` and kept until `close`; they share its CPUs.

    A call may take `timeout` seconds, after which all ranks are ended.
    """

    def __init__(self, size, *, timeout=120.0):
        self.size, self.timeout = size, timeout
        self._world = None

    def run(self, function, *args):
        """Call `function(world, *args)` on every rank; return the results in rank order.

        The function may be one of a cell, as its arguments and results may. `world` has `rank`, `size` and `device`.

        Raises:
            RankFailed: a rank raised or died, or gave no answer in time. The next `run` starts new ranks.
        """
        if self._world is None or not self._world.alive:
            self._world = LocalWorld(self.size, oversubscribe=True, preload=("course.pages.ranks",))
        # A cell's definitions have no module that a rank could import, so they are pickled by value.
        pickled = cloudpickle.dumps((function, args))
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as pool:
            answers = pool.submit(self._world.run, far_side.call, pickled, folder, timeout=self.timeout)
            lines = Lines(self.size, folder)
            try:
                while not answers.done():
                    wait([answers], timeout=0.2)
                    lines.show()
            except KeyboardInterrupt:  # the notebook's stop button
                self._world.close(kill=True)
                raise
            lines.show()
            return [cloudpickle.loads(answer) for answer in answers.result()]

    def close(self):
        """End the ranks."""
        if self._world is not None:
            self._world.close()


def name_exercise(shell, kind, error, trace, tb_offset=None):
    """Show an error; of what is still to be written only its name, in one line."""
    unsolved = UNSOLVED.search("".join(traceback.format_exception(error)))
    if unsolved is None:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset, running_compiled_code=True)
        return
    stage, part, page, number, name = unsolved.groups()
    first = f"notebooks/exercises/{stage}.py is solved" if stage else f"{page} has what notebook 0{number} builds"
    print(f"This page goes on from here once {first}: {part or name}.")


if shell := get_ipython():
    shell.set_custom_exc((NotImplementedError, RankFailed), name_exercise)


def show(alt):
    """Draw the current figure beneath its cell. `alt` describes it for readers who cannot see it."""
    figure = plt.gcf()
    display(figure, metadata={"image/png": {"alt": alt}})
    plt.close(figure)


class Lines:
    """The lines of so many ranks, beneath the cell that runs them: in `folder` each has a file, named by its number."""

    def __init__(self, size, folder):
        self._files = [Path(folder, str(rank)) for rank in range(size)]
        self._read = [0] * size  # bytes of each file
        self._lines, self._progress = [], {}
        self._shown = None

    def show(self):
        """Read what is new, and draw everything again."""
        before = len(self._lines), dict(self._progress)
        for rank, file in enumerate(self._files):
            self._take(rank, file)
        if before == (len(self._lines), self._progress):
            return
        shown = {"bars": sorted(self._progress.items()), "before": max(0, len(self._lines) - SHOWN)}
        page = HTML(PAGE.render(**shown, lines=self._lines[-SHOWN:], colours=COLOURS))
        if self._shown is None:
            self._shown = display(page, display_id=True)
        else:
            self._shown.update(page)

    def _take(self, rank, file):
        if not file.exists():  # this rank has not begun
            return
        text = file.read_bytes()[self._read[rank] :]
        whole = text[: text.rfind(b"\n") + 1]  # a line may be half written
        self._read[rank] += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(PROGRESS):
                self._progress[rank] = tuple(map(int, line[1:].split()))
            else:
                self._lines.append((rank, line))
