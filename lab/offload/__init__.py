"""Measurements of ZeRO-Offload and ZeRO-Infinity: `python -m lab.offload.delay --help`, for instance."""
