"""Axes of parallelism beside the data-parallel one: tensor, pipeline and sequence, around any engine."""
