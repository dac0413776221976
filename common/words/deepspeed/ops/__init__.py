"""`deepspeed.ops`: its Adams. The rest is not here."""

from common.words.deepspeed.ops import adam
from common.words.deepspeed.refusals import missing

__all__ = ["adam"]
__getattr__ = missing("ops")
