"""The form of an answer: every check of a notebook's question goes through `asks`, and takes no other form."""

import functools
import inspect
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real


@dataclass(frozen=True)
class Form:
    """What an answer has to be.

    Attributes:
        told: in words, and an example.
        fits: whether an answer is that.
    """

    told: str
    fits: Callable


def is_number(answer):
    return isinstance(answer, Real) and not isinstance(answer, bool) and abs(answer) <= sys.float_info.max


def numbers(count, example):
    """So many of them, in a tuple or a list."""

    def fits(answer):
        return isinstance(answer, tuple | list) and len(answer) == count and all(map(is_number, answer))

    return Form(f"a tuple of {count} numbers, such as {example}", fits)


def by_name(names):
    """Answers by these names. What form each has, the check says, so that the others are checked beside it."""
    told = f"a dictionary of answers to {', '.join(names)}"
    return Form(told, lambda answer: isinstance(answer, dict) and answer.keys() <= set(names))


NUMBER = Form("a number, such as 1.5e9", is_number)
TRUTH = Form("True or False", lambda answer: isinstance(answer, bool))
NAME = Form("a name in quotes", lambda answer: isinstance(answer, str))


class Unfit(Exception):
    """An answer has another form."""


def asks(form, say=print):
    """Make a check take answers of this form only, or None where it is open; it says in one line what form it asks for.

    The check's parameter `answer` is one, or its `formula` is a function that returns one.

    Args:
        say: what the check does with a verdict; `str` where it returns it.
    """

    def of(check):
        signature = inspect.signature(check)

        @functools.wraps(check)
        def checked(*args, **options):
            call = signature.bind(*args, **options)
            if "answer" in call.arguments and (line := unfit(call.arguments["answer"], form)):
                return say(line)
            try:
                if "formula" in call.arguments:
                    call.arguments["formula"] = _fitting(call.arguments["formula"], form)
                return check(*call.args, **call.kwargs)
            except Unfit as line:
                return say(str(line))

        checked.form = form
        return checked

    return of


def unfit(answer, form):
    """What there is to say of an answer that has not this form; "" where it has, and where it is open."""
    return "" if answer is None or form.fits(answer) else f"not yet: {_shown(answer)} is not {form.told}"


def _fitting(formula, form):
    """A student's function, whose answers are looked at as they come."""
    if not callable(formula):
        raise Unfit(f"not yet: {_shown(formula)} is not a function that returns {form.told}")

    def fitting(*args):
        answer = formula(*args)
        if line := unfit(answer, form):
            raise Unfit(line)
        return answer

    return fitting


def _shown(answer):
    return " ".join(reprlib.repr(answer).split())
