"""What engines share: the calls of a training loop, and the mechanics below them."""

from common.engine.base import EngineBase
from common.engine.bucket import Bucket, Owned
from common.engine.mixed_precision import StepResult
from common.engine.turns import Turns

__all__ = ["Bucket", "EngineBase", "Owned", "StepResult", "Turns"]
