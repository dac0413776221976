"""What students are given, and what grades them: `make student`.

`__main__.py` writes the tree and the bundle, `gradescope.py` is the bundle's grader. `students.md` is the page that the
tree opens with; `setup.sh` and `run_autograder` are what Gradescope calls.
"""
