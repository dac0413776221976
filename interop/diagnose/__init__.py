"""Why a user's own training function ends with other weights than under plain data parallelism.

`recording` runs it in the ranks and records what it computes, `comparing` compares two recordings, `causes` says what a
difference looks like, `suspects` are engines with one fault each, to compare with, and `notes` tell what plain data
parallelism does as well.
"""
