"""Axes of parallelism beside the data-parallel one: tensor, pipeline and sequence, around any engine."""

import zero_stages  # noqa: F401  before all others
