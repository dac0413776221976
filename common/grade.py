"""Grade a submission of an exercise: which promises hold, the smallest case that shows what does not, and a hint.

    python -m common.grade notebooks/exercises/stage2.py            the first hint: the idea
    python -m common.grade notebooks/exercises/stage2.py --hint 2   where it lives; 3: nearly how it is done
    python -m common.grade notebooks/exercises/stage2.py --json report.json

It trains on two and three ranks of this machine, some seconds long, and beside each training the stage's own engine: a
submission may take ten times as long as that does. The engines themselves can be graded: stage2_grad/engine.py.
Exit status 0 says that all promises hold, 1 that one fails, 2 that nothing was graded, which is not the submission's
fault: one line says why.
"""

import argparse
import os
import re
import sys
from pathlib import Path

from rich.console import Console

from common.course.graded import graded
from common.errors import InputError
from common.outputs import check_outputs, one_line_errors, write_json
from common.train import STAGES


def main(argv=None):
    """Grade a file, print the answer, and end with its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a submission, with the stage's number in its name or its folder's")
    parser.add_argument("--hint", type=int, choices=(1, 2, 3), default=1, help="how much to say (default: 1)")
    parser.add_argument("--json", metavar="FILE", help="write a report here")
    options = parser.parse_args(argv)
    with one_line_errors():
        check_outputs(options)
        stage = stage_of(options.file)
        report = graded(options.file, stage)
        if options.json:
            write_json(options.json, report)
    show(report, options)
    sys.exit(0 if report["passed"] else 1)


def stage_of(file):
    """The package of the stage that a file is a submission of.

    Raises:
        InputError: there is no such file, or no stage is named.
    """
    if not os.path.isfile(file):  # which a name too long for a file is not, either
        raise InputError(f"{file}: there is no such file")
    numbers = re.findall(r"stage([1-3])", str(file))
    if not numbers:
        raise InputError(f"{file}: which stage? Name the file stage1.py, stage2.py or stage3.py")
    return STAGES[int(numbers[-1])]


def show(report, options):
    """Print a report."""
    console = Console(highlight=False, soft_wrap=True)
    signs = {True: "[green]holds [/]", False: "[bold red]fails [/]", None: "[dim]      [/]"}
    for promise in report["promises"]:
        dim = "dim" if promise["holds"] is None else "default"
        console.print(f"{signs[promise['holds']]} {promise['points']}/{promise['of']} [{dim}]{promise['promise']}[/]")
    console.print(f"{report['points']} of {report['of']} points")
    finding = report["finding"]
    if finding is None:
        console.print(f"\nAll of it holds: this is {report['stage']}, bit for bit and byte for byte.")
        return
    console.print(f"\n[bold]{finding['where']}[/]", markup=True)
    if not finding["idea"].startswith(("syntax", "import", "solution", "open ")):
        console.print(f"The case: {finding['model']}.")
    if report["printed"]:
        console.print("\nPrinted last:")
        console.print(report["printed"], markup=False)
    console.print(f"\nHint {options.hint} of 3. {finding['hints'][options.hint - 1]}")
    if options.hint < 3:
        console.print(f"[dim]More: python -m common.grade {report['file']} --hint {options.hint + 1}[/]")


if __name__ == "__main__":
    main()
