"""The Python face of the C++ manager: tiers, the process's managers, statistics of a step."""

from jdynoff.runtime.device_memory import HostMemory, host_memory
from jdynoff.runtime.manager import manager_for
from jdynoff.runtime.stats import StepStats
from jdynoff.runtime.tiers import Disk, default_tiers

__all__ = ["Disk", "HostMemory", "StepStats", "default_tiers", "host_memory", "manager_for"]
