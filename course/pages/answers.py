"""Answers: every check of a notebook's question goes through `asks`, which fixes its form, and `judge`."""

import functools
import inspect
import reprlib
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from pathlib import Path

MISTAKES = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Form:
    """The form of an answer."""

    told: str  # in words, and an example
    fits: Callable  # whether an answer has the form


def is_number(answer):
    return isinstance(answer, Real) and not isinstance(answer, bool) and abs(answer) <= sys.float_info.max


def numbers(count, example):
    """So many of them, in a tuple or a list."""
    return Form(
        f"a tuple of {count} numbers, such as {example}",
        lambda answer: isinstance(answer, tuple | list) and len(answer) == count and all(map(is_number, answer)),
    )


def by_name(names):
    """Answers by these names. The check judges the form of each, so that one bad form spoils no other answer."""
    told = f"a dictionary of answers to {', '.join(map(repr, names))}"
    return Form(told, lambda answer: isinstance(answer, dict) and answer.keys() <= set(names))


NUMBER = Form("a number, such as 1.5e9", is_number)
TRUTH = Form("True or False", lambda answer: isinstance(answer, bool))
NAME = Form("a name in quotes", lambda answer: isinstance(answer, str))


class Unfit(Exception):
    """An answer is open, or has another form."""


def asks(form, say=print):
    """Make a check take only answers of this form, or None for an open one; one line says which form it asks for.

    The check's parameter `answer` is one, or its `formula` is a function that returns one.

    Args:
        say: what the check does with a verdict; `str` returns it.
    """

    def of(check):
        signature = inspect.signature(check)

        @functools.wraps(check)
        def checked(*args, **options):
            call = signature.bind(*args, **options)
            try:
                for name, look_at in (("answer", _fit), ("formula", _fitting)):
                    if name in call.arguments:
                        call.arguments[name] = look_at(call.arguments[name], form)
                return check(*call.args, **call.kwargs)
            except Unfit as line:
                return say(str(line))

        checked.form = form
        return checked

    return of


def given(answer):
    """The answer, for a check that ends at an open one."""
    if answer is None:
        raise Unfit("not solved yet")
    return answer


def unfit(answer, form):
    """The verdict on an answer without this form; "" if it has the form, or is open."""
    return "" if answer is None or form.fits(answer) else f"not yet: {_shown(answer)} is not {form.told}"


def _fit(answer, form):
    """The answer itself, if it has this form."""
    if line := unfit(answer, form):
        raise Unfit(line)
    return given(answer or None) if isinstance(answer, dict) else answer


def _fitting(formula, form):
    """A student's function, whose answers are checked as it returns them."""
    if not callable(formula):
        raise Unfit(f"not yet: {_shown(formula)} is not a function that returns {form.told}")
    return lambda *args: _fit(formula(*args), form)


AGAIN = "count it again, part by part"  # the hint for a wrong answer without one of its own


def judged(question, answer, truth, within=1e-9, unit=None, otherwise=AGAIN, **known):
    """The verdict of `judge`, with a question's hints in mistakes.toml, by what its check knows."""
    hints = () if answer is None else hints_of(MISTAKES[question], answer=answer, truth=truth, **known)
    return judge(answer, truth, hints, within, unit, otherwise)


def hints_of(mistakes, **known):
    """[(a wrong answer, what to think of)] of {a formula of what is known: what to think of, as a format of it}."""
    return [(eval(formula, dict(known)), hint.format(**known)) for formula, hint in mistakes.items()]


def judge(answer, truth, hints=(), within=1e-9, unit=None, otherwise=AGAIN):
    """Whether an answer is right; else what a wrong one leaves out. One line.

    Args:
        answer: a number, a name or a tuple of those; None while it is open.
        truth: what was measured, or what the formula gives.
        hints: [(a wrong answer, what to think of)].
        within: relative difference that is left, for padding.
        unit: how large, and its name, where both numbers are to be shown in it.
        otherwise: what is said of a wrong answer without a hint, unless its number is shown.
    """
    if answer is None:
        return "not solved yet"
    if near(answer, truth, within):
        return "solved"
    hint = next((hint for wrong, hint in hints if near(answer, wrong, within)), None)
    if unit is None:
        return f"not yet: {hint or otherwise}"
    size, name = unit
    shown = f"{answer / size:.4g} {name} by your formula, {truth / size:.4g} measured"
    return f"not yet: {shown}; {hint}" if hint else f"not yet: {shown}"


def near(one, other, within):
    """Whether they are the same name, or numbers within this relative distance; of tuples, each."""
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    one, other = (value if isinstance(value, tuple | list) else (value,) for value in (one, other))
    return len(one) == len(other) and all(abs(a - b) <= within * abs(b) for a, b in zip(one, other, strict=True))


def _shown(answer):
    return " ".join(reprlib.repr(answer).split())
