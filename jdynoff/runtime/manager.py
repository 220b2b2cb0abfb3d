"""The process's managers: one for each configuration of tiers, kept until the process ends.

A manager owns threads, memory that it never gives back, and a file; steps with the same tiers
share one. The trap: a forked child has none of the threads, so a manager refuses to work there.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterable

from jdynoff import _native
from jdynoff.errors import ConfigurationError
from jdynoff.runtime.tiers import Disk, check_disk, default_tiers

_lock = threading.Lock()
_managers: dict[tuple[tuple[Disk, ...], bool], _native.Manager] = {}


def check_tiers(tiers: Iterable[Disk]) -> tuple[Disk, ...]:
    """Check the kind and number of tiers; directories are looked at only when they are used.

    Args:
        tiers: What the user gave.

    Returns:
        The same as a tuple.

    Raises:
        ConfigurationError: If there is anything but at most one `Disk`.
    """
    chosen = tuple(tiers)
    for tier in chosen:
        if not isinstance(tier, Disk):
            raise ConfigurationError(
                f"tiers must hold jdynoff.Disk objects, not {tier!r} of type "
                f"{type(tier).__name__}; write tiers=[jdynoff.Disk(path)]."
            )
    if len(chosen) > 1:
        raise ConfigurationError(
            f"{len(chosen)} disks were given, and one is supported; combine them in the operating "
            "system (RAID, LVM) and name the resulting directory."
        )
    return chosen


def manager_for(tiers: Iterable[Disk] | None = None, *, verify: bool = False) -> _native.Manager:
    """Return the process's manager for these tiers, and make it if there is none yet.

    Args:
        tiers: Where tensors may go beyond the pool; None chooses a disk (see `default_tiers`),
            and an empty sequence means memory only.
        verify: Whether to check a checksum of everything that comes back from a disk.

    Returns:
        The manager.

    Raises:
        ConfigurationError: If the tiers cannot be used.
    """
    chosen = default_tiers() if tiers is None else check_tiers(tiers)
    key = (chosen, verify)
    with _lock:
        manager = _managers.get(key)
        if manager is None:
            for disk in chosen:
                check_disk(disk)
            manager = _native.Manager(
                chosen[0].directory if chosen else None,
                disk_limit_bytes=chosen[0].limit_bytes if chosen else None,
                disk_bytes_per_second=chosen[0].bytes_per_second if chosen else None,
                verify=verify,
            )
            _managers[key] = manager
    return manager


# Registered when JAX has been imported, hence run before JAX waits for steps in flight: their
# waiting operations fail at once instead of waiting for threads that are about to end.
atexit.register(_native.shutdown_all)
