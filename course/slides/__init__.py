"""`make slides`: what a lecturer projects for 90 minutes, in one HTML file.

- `deck.html`: the slides in their order, their words and the lecturer's notes: the file to edit
- `parts.html`: bars, tables and shards, made from numbers; both files are Jinja templates
- `numbers.py`: the source of these numbers: records, a recorded step
- `code.py`: lines of the minimal pages, taken by name and marked where they differ from the neighbour's
- `page.py`, `deck.css`, `deck.js`: the file, how it looks, and the keys
"""
