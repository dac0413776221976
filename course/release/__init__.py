"""What students get, and what grades them: `make student`.

`__main__.py` writes the tree and the bundle, `gradescope.py` is the bundle's grader. `students.md` is the tree's
first page; Gradescope calls `setup.sh` and `run_autograder`.
"""
