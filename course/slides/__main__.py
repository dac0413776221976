"""`python -m course.slides`: write the deck for a lecture of 90 minutes into one HTML file."""

from pathlib import Path

from common.errors import InputError
from common.outputs import check_clone, one_line_errors, parser_of
from course.lessons import recording
from course.slides.numbers import STAGES
from course.slides.page import document, slides


def main(arguments=None):
    """Parse the arguments, record a step of stages 0 to 3, write the deck and name it."""
    parser = parser_of("course.slides", __doc__)
    parser.add_argument("--out", default="results/local/slides.html", help="the file (default: %(default)s)")
    options = parser.parse_args(arguments)
    with one_line_errors():
        check_clone("results/scores")
        out = opened(options.out)
        out.write_text(document(slides(recording.record_all(STAGES))))
        print(out)


def opened(out):
    """The path of the file for the deck; its folder is made if it is missing.

    Raises:
        InputError: the file cannot be made.
    """
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).open("a").close()
        return Path(out)
    except OSError as error:
        raise InputError(f"--out {out}: no deck can be written there: {error.strerror}; give a file") from error


if __name__ == "__main__":
    main()
