"""`make slides`: what a lecturer projects for 90 minutes, in one HTML file.

- `deck.py`: the order of the slides
- `stages.py`, `beyond.py`: their words and the lecturer's notes, which is what one edits
- `code.py`: lines of the minimal pages, taken by name and marked where they differ from the neighbour's
- `records.py`, `pictures.py`: recorded numbers; bars, tables and shards made of them
- `page.py`, `deck.css`, `deck.js`: the file, how it looks, and the keys
"""
