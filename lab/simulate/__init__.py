"""One rank of a world of any size, on fake tensors: the engines themselves, with shapes and without values.

`world` makes the rank and its engine, `moments` follows its memory, `clock` its time on `hardware`. `python -m
lab.simulate` shows what they find.
"""
