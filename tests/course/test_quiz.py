"""A quiz explains every choice, folded in a page."""

import re
from math import sqrt

import pytest
from places import ROOT

from course import quiz


@pytest.mark.parametrize("name", quiz.known())
def test_a_quiz_is_whole_and_the_choices_of_a_question_are_of_about_one_length(name):
    questions = quiz.questions_of(name)
    assert 4 <= len(questions) <= 6
    for question in questions:
        choices = question["choice"]
        assert question["ask"] and len(choices) >= 2 and all(choice["say"] and choice["why"] for choice in choices)
        assert [choice.get("right", False) for choice in choices].count(True) == 1
        lengths = [len(choice["say"]) for choice in choices]
        assert max(lengths) <= 1.35 * min(lengths), question["ask"]
    assert (ROOT / "notebooks" / f"{name}.ipynb").exists()


CUES = {
    "longest": lambda place, said: len(said),
    "shortest": lambda place, said: -len(said),
    "first": lambda place, said: -place,
    "second": lambda place, said: place == 1,
    "last": lambda place, said: place,
}


@pytest.mark.parametrize("cue", CUES)
def test_neither_length_nor_place_tells_the_right_choice_more_often_than_chance(cue):
    hits, odds = [], []
    for question in (question for name in quiz.known() for question in quiz.questions_of(name)):
        scores = [CUES[cue](place, choice["say"]) for place, choice in enumerate(question["choice"])]
        right = next(place for place, choice in enumerate(question["choice"]) if choice.get("right"))
        hits.append((scores[right] == max(scores)) / scores.count(max(scores)))  # equals share the hit
        odds.append(1 / len(scores))
    assert abs(sum(hits) - sum(odds)) <= 2 * sqrt(sum(p * (1 - p) for p in odds))


def test_a_page_has_a_folded_choice_for_each_answer_and_no_script():
    questions = quiz.questions_of("02_gradients")
    page = quiz.quiz("02_gradients")._repr_html_()
    assert page.count("<details") == page.count("</details>") == sum(len(one["choice"]) for one in questions)
    assert page.count("<b>Right.</b>") == len(questions)
    assert not re.search(r"<details[^>]* open|<script|onclick|color", page)
    assert not any("Right" in part.split("</summary>")[0] for part in page.split("<summary")[1:])


def test_what_a_question_writes_is_shown_as_written():
    assert quiz.marked_up("a < b in `list[int]`") == "a &lt; b in <code>list[int]</code>"


@pytest.mark.parametrize(("options", "verdicts"), [([], 0), (["--answers"], len(quiz.questions_of("02_gradients")))])
def test_a_sheet_has_answers_where_they_are_asked_for(options, verdicts, capsys):
    quiz.main(["02_gradients", *options])
    printed = capsys.readouterr().out
    assert len(re.findall(r"^ +Right\.", printed, re.MULTILINE)) == verdicts
    assert all(" ".join(one["ask"].split()[:4]) in printed for one in quiz.questions_of("02_gradients"))
