"""What was measured of ZeRO++: `python -m zeropp.experiments.two_nodes --help`, for instance."""
