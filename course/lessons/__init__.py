"""Lesson pages: two neighbouring engines side by side, why each change is there, and a step of both to go through.

Nothing on a page is written by hand: the code is the engines' own, the reasons are the section "What changes" of an
engine's page, and every number and every event is recorded from the engines when `make site` writes the pages:
recording.py runs them, events.py records them, held.py tracks what a rank holds. The other modules read the engines'
files and put it in words; *.html are the templates that they fill, sentences.toml has the sentence of each event.
"""
