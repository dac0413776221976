"""Other people's code: theirs behind our API (`peers`), ours behind theirs (`deepspeed`, `fsdp`), and formats.

Engines and `common/` do not import this folder; it imports neither `lab/` nor `course/`.
"""

import zero_stages  # noqa: F401  before all others
