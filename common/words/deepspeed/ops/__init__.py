"""`deepspeed.ops`: its Adams. The rest is not here."""

from common.words.deepspeed.ops import adam

__all__ = ["adam"]
