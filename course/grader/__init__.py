"""Grades exercises: promises, cases that show which one is broken, and hints."""
