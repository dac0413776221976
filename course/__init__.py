"""What teaches the engines: exercises and their grader, what notebooks show, lesson pages, the explorer and slides."""

import zero_stages

zero_stages.check("interop", "lab")
