"""Checkpoints in other libraries' formats."""
