"""The code that engines share: the calls of a training loop, and the mechanics below them."""

from common.engine.backward_order import BackwardOrder
from common.engine.base import EngineBase
from common.engine.bucket import Bucket, Owned
from common.engine.mixed_precision import StepResult

__all__ = ["BackwardOrder", "Bucket", "EngineBase", "Owned", "StepResult"]
