"""`make slides`: what a lecturer projects for 90 minutes, in one HTML file.

- `deck.html`: the slides in their order, their words and the lecturer's notes, which is what one edits
- `numbers.py`: what it has in braces: recorded numbers, and bars, tables and shards made of them
- `code.py`: lines of the minimal pages, taken by name and marked where they differ from the neighbour's
- `page.py`, `deck.css`, `deck.js`: the file, how it looks, and the keys
"""
