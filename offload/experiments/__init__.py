"""What was measured of ZeRO-Offload and ZeRO-Infinity: `python -m offload.experiments.delay --help`, for instance."""
