"""`python -m course.explorer`: record a step of the engines on four ranks, and write the explorer, one HTML file."""

from pathlib import Path

from common.outputs import check_output, one_line_errors, parser_of
from course.explorer.page import explorer
from course.lessons import recording
from course.lessons.__main__ import INCREMENTS, described


def main(arguments=None):
    """Parse the arguments, record, write the page and name it."""
    parser = parser_of("course.explorer", __doc__)
    parser.add_argument("--out", metavar="FILE", default="results/local/explorer.html", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check_output("--out", options.out)
        recorded = recording.record_all(dict.fromkeys(name for pair in INCREMENTS for name in pair))
        Path(options.out).write_text(explorer(recorded, described(recorded)))
    print(options.out)


if __name__ == "__main__":
    main()
