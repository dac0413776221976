"""`deepspeed.ops`: its Adams. The rest is not here."""

from interop.deepspeed.ops import adam

__all__ = ["adam"]
