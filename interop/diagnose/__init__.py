"""Why a user's own training function ends elsewhere than under plain data parallelism.

`grad_enabled` runs it in the ranks and notes what it computes, `comparing` holds two recordings against each other,
`causes` says what a difference looks like, `suspects` are engines that are wrong in one way each, to compare with, and
`notes` tell what plain data parallelism does as well.
"""
