"""Flat intervals as boxes: what an engine keeps of a tensor, in the terms of those who cut tensors into rectangles."""

import math


def boxes(shape, start, stop):
    """Cut elements [start, stop) of a tensor, counted row by row, into boxes.

    The rows that lie in the interval whole are one box; what it has of the row before them and of the row behind them
    is cut in the same way, as tensors of a dimension less:

        shape (4, 5), elements 3 to 16        . . . a a
                                              b b b b b      a: offsets (0, 3), sizes (1, 2)
                                              b b b b b      b: offsets (1, 0), sizes (2, 5)
                                              c . . . .      c: offsets (3, 0), sizes (1, 1)

    Returns:
        [(offsets, sizes)], in the order of their elements, each box a run of them: 2n - 1 at most for n dimensions.
    """
    if start == stop:
        return []
    if not shape:
        return [((), ())]
    row = math.prod(shape[1:])

    def in_row(number, start, stop):
        return [((number, *offsets), (1, *sizes)) for offsets, sizes in boxes(shape[1:], start, stop)]

    first, last = -(-start // row), stop // row  # the whole rows are [first, last)
    if first > last:
        return in_row(last, start - last * row, stop - last * row)
    head = in_row(first - 1, start - (first - 1) * row, row) if start < first * row else []
    whole = [((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))] if first < last else []
    return head + whole + in_row(last, 0, stop - last * row)
