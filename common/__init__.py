"""What does not change between stages: mechanics, never policy."""
