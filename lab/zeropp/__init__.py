"""Measurements of ZeRO++: `python -m lab.zeropp.two_nodes --help`, for instance."""
