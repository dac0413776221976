"""Counting: bytes held, bytes sent, and pictures of both."""
