"""A notebook's quiz: beneath its last cell, and as a sheet for lecturers.

    python -m course.quiz 02_gradients                 a sheet; of all notebooks if none is named
    python -m course.quiz 02_gradients --answers       the same with answers

The questions are in notebooks/quizzes/, a file for each notebook. Every choice says why it is right, or what is
wrong with it: a wrong answer teaches as much as a right one.
"""

import html
import random
import re
import tomllib
from pathlib import Path

from IPython.display import HTML
from jinja2 import Template
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding

from common.errors import InputError
from common.outputs import ROOT, one_line_errors, parser_of

FOLDER = ROOT / "notebooks" / "quizzes"
VERDICTS = {True: "Right.", False: "Not yet."}


def main(arguments=None):
    """Print a sheet."""
    parser = parser_of("course.quiz", __doc__)
    parser.add_argument("notebook", nargs="?", help="such as 02_gradients (default: all)")
    parser.add_argument("--answers", action="store_true", help="with answers")
    options = parser.parse_args(arguments)
    with one_line_errors():
        quizzes = {name: questions_of(name) for name in ([options.notebook] if options.notebook else known())}
    console = Console(highlight=False)
    for name, questions in quizzes.items():
        console.print(f"[bold]{name}[/bold]\n")
        for number, question in enumerate(questions, start=1):
            show_question(console, number, question, options.answers)


def known():
    """The notebooks that have a quiz."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def questions_of(name):
    """The questions of a notebook: [{"ask", "choice": [{"say", "why", and of one of them "right"}]}].

    The order of choices is drawn, with the question as the seed: the same in every process.

    Raises:
        InputError: there is no such quiz.
    """
    if name not in known():
        raise InputError(f"there is no quiz {name!r}; there are {', '.join(known())}")
    questions = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))["question"]
    for question in questions:
        random.Random(question["ask"]).shuffle(question["choice"])
    return questions


# ---- in a notebook ----------------------------------------------------------------------------------------------


def quiz(name):
    """A notebook's quiz, which Jupyter shows beneath the cell that ends with it.

    Raises:
        InputError: see `questions_of`.
    """
    return HTML(page(questions_of(name)))


def page(questions):
    """The quiz in HTML: each choice folded, its answer inside. Without a script, and in the page's own colours."""
    template = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return template.render(questions=questions, marked_up=marked_up, verdicts=VERDICTS)


def marked_up(text):
    """Text for a page; what stands in `backticks` is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text.strip()))


# ---- on a sheet -------------------------------------------------------------------------------------------------


def show_question(console, number, question, answers):
    console.print(f"[bold]{number}.[/bold] {escape(question['ask'].strip())}")
    for place, choice in enumerate(question["choice"], start=1):
        console.print(Padding(escape(f"{place}  {choice['say'].strip()}"), (0, 0, 0, 3)))
        if answers:
            right = choice.get("right", False)
            text = f"[{'green' if right else 'yellow'}]{VERDICTS[right]}[/] {escape(choice['why'].strip())}"
            console.print(Padding(text, (0, 0, 1, 6)))
    console.print()


if __name__ == "__main__":
    main()
