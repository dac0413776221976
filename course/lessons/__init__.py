"""Lesson pages: two neighbouring engines side by side, why each change is there, and a step of both to go through.

    python -m course.lessons     write results/local/lessons/index.html and a page for each increment

Nothing on a page is written by hand: the code is the engines' own, the reasons are the section "What changes" of an
engine's page, and every number and every event is recorded from the engines when the pages are made.

    sources.py       an engine's file: its methods, its table of phases, the reasons for its changes
    diff.py          two files side by side, unchanged stretches folded
    events.py        what an engine does in one step, event by event
    sentences.py     the same in words, by sentences.toml; and which events of two engines belong together
    held.py          what a rank holds meanwhile, on the device, the host and the disk
    recording.py     ranks that train the engines and record them
    notes.py         a note for each changed method: why, what it saves, sends and moves; the table of a page
    chart.py         the memory timelines
    page.py          all of it in one HTML file by lesson.html, a template
    templates.py     how templates are filled
"""
