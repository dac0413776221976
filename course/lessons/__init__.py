"""Lesson pages: two neighbouring engines side by side, why each change is there, and a step of both."""
