"""How much memory a step may use when the user names no budget.

On a CPU the device's memory is the process's: what its memory cgroup leaves, or what the machine
has free. The trap: inside a container the machine's figure is larger than what the process may
use, and exceeding the cgroup's limit kills it without an exception.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from jdynoff.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class HostMemory:
    """Memory that this process may still use.

    Attributes:
        available_bytes: How much.
        source: Which limit that is, in words.
        limit_bytes: The memory cgroup's limit, or None if there is none.
    """

    available_bytes: int
    source: str
    limit_bytes: int | None


# (files of the limit, the usage and the statistics), by cgroup version.
_V2_FILES = ("memory.max", "memory.current", "memory.stat")
_V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
# Version 1 writes "no limit" as the largest multiple of a page.
_V1_UNLIMITED = 1 << 60


def _read_number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _reclaimable(statistics: Path) -> int:
    try:
        lines = statistics.read_text().splitlines()
    except OSError:
        return 0
    fields = dict(line.split()[:2] for line in lines if len(line.split()) >= 2)
    # Version 1 counts children only in the total_ fields.
    value = fields.get("total_inactive_file", fields.get("inactive_file", "0"))
    return int(value)


def _cgroup_directories(proc: Path, sys: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """Every memory cgroup that holds this process, innermost first."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            root, files = sys / "fs/cgroup/memory", _V1_FILES
        elif hierarchy == "0":
            root, files = sys / "fs/cgroup", _V2_FILES
        else:
            continue
        inner = root / path.lstrip("/")
        for directory in [inner, *inner.parents]:
            if directory == root or root in directory.parents:
                found.append((directory, files))
    return found


def host_memory(proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> HostMemory:
    """Find how much memory this process may still use.

    Args:
        proc: Where procfs is mounted.
        sys: Where sysfs is mounted.

    Returns:
        The tightest of the machine's available memory and what each enclosing memory cgroup
        (version 1 or 2) leaves. The page cache counts as free in both.
    """
    available, source = 0, "unknown"
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            available, source = int(line.split()[1]) * 1024, "available memory"
    limit_bytes = None
    for directory, (limit_name, usage_name, statistics_name) in _cgroup_directories(proc, sys):
        limit = _read_number(directory / limit_name)
        if limit is None or limit >= _V1_UNLIMITED:
            continue
        usage = _read_number(directory / usage_name) or 0
        left = max(limit - usage + _reclaimable(directory / statistics_name), 0)
        if limit_bytes is None or limit < limit_bytes:
            limit_bytes = limit
        if source == "unknown" or left < available:
            available, source = left, f"memory cgroup limit of {limit} bytes"
    return HostMemory(available, source, limit_bytes)


def available_memory(platform: str, arguments: Any) -> int:
    """Find the budget of a step whose user names none.

    Args:
        platform: Of the step's device.
        arguments: The step's arguments; those that are arrays already occupy a part of what the
            step may use.

    Returns:
        Bytes: what this process may still use and what the arguments occupy; on a device with a
        memory of its own, that memory.

    Raises:
        ConfigurationError: If the device is only described, or does not tell.
    """
    leaves = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "sharding")]
    if platform == "cpu":
        arrays = {id(leaf): leaf for leaf in leaves if isinstance(leaf, jax.Array)}
        return host_memory().available_bytes + sum(array.nbytes for array in arrays.values())
    device = next(
        (next(iter(leaf.sharding.device_set)) for leaf in leaves if leaf.sharding is not None),
        None,
    )
    try:
        limit = int((device or jax.devices(platform)[0]).memory_stats()["bytes_limit"])
    except (AttributeError, KeyError, TypeError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"the device of this step ({device or platform}) does not say how much memory it has; "
            'give jdynoff.managed a budget, e.g. budget="80GiB" or budget="min".'
        ) from error
    return limit
