"""jdynoff: train networks larger than the device's memory by decorating the train step."""

from jdynoff.errors import (
    BudgetError,
    ConfigurationError,
    JdynoffError,
    SpillSpaceError,
    TransferError,
    TransformError,
)
from jdynoff.loops.while_loop import while_loop
from jdynoff.managed import Managed, managed
from jdynoff.planning.plan import Plan, PlannedSite
from jdynoff.runtime.stats import StepStats
from jdynoff.runtime.tiers import Disk

__all__ = [
    "BudgetError",
    "ConfigurationError",
    "Disk",
    "JdynoffError",
    "Managed",
    "Plan",
    "PlannedSite",
    "SpillSpaceError",
    "StepStats",
    "TransferError",
    "TransformError",
    "managed",
    "while_loop",
]
