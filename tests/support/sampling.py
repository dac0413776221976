"""Which of a test's many similar cases `make test` runs."""

import zlib


def sample(cases, n):
    """One in n of a test's cases, rounded up, with each value of each parameter at least once, if that many suffice.

    Args:
        cases: pytest's items of one test, in any order.
    """
    left, chosen, seen = sorted(cases, key=lambda case: zlib.crc32(case.nodeid.encode())), [], set()
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in left}
    while len(chosen) < -(-len(cases) // n):
        best = max(left, key=lambda case: len(values[case] - seen))  # the first of equals
        left.remove(best)
        chosen.append(best)
        seen |= values[best]
    return chosen
