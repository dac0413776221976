"""`deepspeed.ops`: its Adams. The rest is not here."""

from interop.deepspeed.ops import adam
from interop.deepspeed.refusals import missing

__all__ = ["adam"]
__getattr__ = missing("ops")
