"""What does not change between stages: mechanics, never policy."""

__version__ = "0.1.0"  # the one place that says so
