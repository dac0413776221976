"""What students get, and what grades them: `make student`."""
