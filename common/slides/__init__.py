"""`make slides`: what a lecturer projects for 90 minutes, in one HTML file.

- `deck.py`: the slides, with their words and notes: what one edits
- `code.py`: lines of the minimal pages, taken by name and marked where they differ from the neighbour's
- `pictures.py`: bars, tables and shards, from recorded numbers
- `deck.css`, `deck.js`: how it looks, and the keys
"""
