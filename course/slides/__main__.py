"""`python -m course.slides`: write the deck for a lecture of 90 minutes into one HTML file."""

from common.outputs import check_clone, check_output, one_line_errors, parser_of, write_text
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
        check_output("--out", options.out)
        write_text(options.out, document(slides(recording.record_all(STAGES))))
        print(options.out)


if __name__ == "__main__":
    main()
