"""Other people's code: theirs behind our surface (`peers`), ours behind theirs (`deepspeed`, `fsdp`), and formats.

Engines and `common/` know nothing of this folder; it imports nothing of `lab/` and `course/`.
"""

import zero_stages  # noqa: F401  before all others
