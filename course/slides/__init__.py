"""`make slides`: what a lecturer projects for 90 minutes, in one HTML file.

- `deck.html`: the slides in their order, their words and the lecturer's notes, which is what one edits
- `parts.html`: bars, tables and shards, which it makes of numbers; both in the words of Jinja
- `numbers.py`: what it has these numbers from: records, the planner, a recorded step
- `code.py`: lines of the minimal pages, taken by name and marked where they differ from the neighbour's
- `page.py`, `deck.css`, `deck.js`: the file, how it looks, and the keys
"""
