"""The templates of course/, filled; and what fills them: Markdown within a line, coloured code."""

import re
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from pygments import highlight
from pygments.filter import simplefilter
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer
from pygments.token import Comment, Keyword, Name, Number, String, Token

from common.measure.tables import show_bytes
from course.lessons.sentences import listed
from lab.figures.style import HOST_COLOR, PALETTE

HERE = Path(__file__).parent
COLORED, HTML = (Comment, String, Keyword, Number, Name.Decorator, Name.Function), HtmlFormatter(nowrap=True)


def inline(text):
    """A line of Markdown as HTML: code and emphasis; links to other pages of the project lead nowhere here."""
    text = re.sub(r" \(\[[^\]]+\]\([^)]+\)\)", "", str(escape(text)))
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", text)
    return Markup(re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text))


@simplefilter
def _colored(self, lexer, stream, options):
    for kind, text in stream:
        yield next((family for family in COLORED if kind in family), Token), text


def highlighted(code):
    """The lines of a file as HTML, with a class for each kind of token."""
    return highlight("\n".join(code), PythonLexer(stripnl=False, filters=[_colored()]), HTML).split("\n")


def numbered(code):
    """The lines of a file, [(number, spaces at its beginning, HTML)]."""
    indents = [len(line) - len(line.lstrip()) for line in code]
    return list(zip(range(1, len(code) + 1), indents, map(Markup, highlighted(code)), strict=False))


def render(name, **fields):
    """A template, filled: HTML."""
    return Markup(TEMPLATES.get_template(name).render(fields))


TEMPLATES = Environment(loader=FileSystemLoader([HERE, HERE.parent]), autoescape=True, undefined=StrictUndefined)
TEMPLATES.trim_blocks = TEMPLATES.lstrip_blocks = True
TEMPLATES.filters |= {"inline": inline, "listed": listed, "bytes": show_bytes}
TEMPLATES.globals["numbered"] = numbered
TEMPLATES.globals["file"] = lambda name: Markup((HERE / name).read_text())
TEMPLATES.globals["colors"] = (*PALETTE, HOST_COLOR, HOST_COLOR)  # of the classes of memory; no page has the last two
TEMPLATES.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
PARTS = TEMPLATES.get_template("parts.html").module  # its macros, as functions
