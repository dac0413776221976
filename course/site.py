"""`python -m course.site`: the explorer and the lesson pages in one folder, with a page that leads to them.

The folder needs no server of ours: open its index.html, or put it on any static host as it is.
"""

from pathlib import Path

from common.outputs import one_line_errors, parser_of, try_folder, written
from course.explorer.page import TITLE, explorer
from course.lessons import recording
from course.lessons.page import INCREMENTS, described, write
from course.lessons.templates import render


def main(arguments=None):
    """Parse the arguments, record, write the pages and name them."""
    parser = parser_of("course.site", __doc__)
    parser.add_argument("--out", metavar="FOLDER", default="results/local/site", help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    with one_line_errors():
        out = Path(options.out)
        with written(out):
            (out / "lessons").mkdir(parents=True, exist_ok=True)
            try_folder(out)
        lessons = dict.fromkeys(name for pair in INCREMENTS for name in pair)
        recorded = recording.record_all([*lessons, "zeropp.hybrid"])  # whose step the explorer shows, too
        about = described(recorded)
        (out / "explorer.html").write_text(explorer(recorded, about))
        (out / "index.html").write_text(render("site.html", about=about, explorer=TITLE))
        for path in (out / "index.html", out / "explorer.html", *write(out / "lessons", INCREMENTS, recorded)):
            print(path)


if __name__ == "__main__":
    main()
