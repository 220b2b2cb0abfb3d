"""Where tensors go that do not fit the budget.

The trap: a directory in RAM (tmpfs) frees nothing. It is never chosen silently.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from jdynoff.errors import ConfigurationError
from jdynoff.planning.budget import parse_bytes
from jdynoff.runtime.device_memory import host_memory
from jdynoff.runtime.filesystems import filesystem_of

_LEAST_RATE = 1_000_000
SPILL_DIR_VARIABLE = "JDYNOFF_SPILL_DIR"


@dataclasses.dataclass(frozen=True)
class Disk:
    """A directory on a disk.

    The manager makes one file there that has no name: it never outlives the process and is seen
    only as used space.

    Attributes:
        path: The directory. It must exist and be writable.
        limit: The most that the file may take, in bytes or as text such as ``"100GiB"``; None for
            whatever the filesystem has.
        rate: The most that is written to it, and read from it, in a second: bytes, or text such
            as ``"500MB"``; None for as fast as it is. For a disk that others use as well.
    """

    path: str | os.PathLike[str]
    limit: int | str | None = None
    rate: int | str | None = None

    @property
    def limit_bytes(self) -> int | None:
        """The limit in bytes."""
        return None if self.limit is None else parse_bytes(self.limit)

    @property
    def bytes_per_second(self) -> int | None:
        """The rate in bytes a second.

        Raises:
            ConfigurationError: If it is below 1 MB: a transfer would take minutes.
        """
        if self.rate is None:
            return None
        rate = parse_bytes(self.rate)
        if rate < _LEAST_RATE:
            raise ConfigurationError(
                f"rate={self.rate!r} allows {rate} bytes a second, and a disk must be allowed "
                f"{_LEAST_RATE} at least; write it as 500000000 or '500MB'."
            )
        return rate

    @property
    def directory(self) -> str:
        """The path with ``~`` expanded."""
        return os.path.expanduser(os.fspath(self.path))


def _candidates(environment: Mapping[str, str]) -> list[str]:
    named = [environment[name] for name in ("TMPDIR",) if environment.get(name)]
    cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return [*named, "/var/tmp", tempfile.gettempdir(), cache]


def _usable(directory: str) -> bool:
    return os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)


def default_tiers(environment: Mapping[str, str] | None = None) -> tuple[Disk, ...]:
    """Choose the tiers for a step whose user names none.

    Args:
        environment: Environment variables; the process's if None.

    Returns:
        ``$JDYNOFF_SPILL_DIR`` if it is set, else the first writable temporary directory that is
        on a real disk.

    Raises:
        ConfigurationError: If every candidate is in RAM and the process has a memory limit, or
            if there is none at all.
    """
    environment = os.environ if environment is None else environment
    chosen = environment.get(SPILL_DIR_VARIABLE)
    if chosen:
        return (Disk(chosen),)
    usable = [directory for directory in _candidates(environment) if _usable(directory)]
    for directory in usable:
        if not filesystem_of(directory).is_memory:
            return (Disk(directory),)
    tried = ", ".join(_candidates(environment))
    if not usable:
        raise ConfigurationError(
            f"none of the directories {tried} can be written to, so there is no place to move "
            f"tensors to. Set {SPILL_DIR_VARIABLE} to a directory on a disk, or pass "
            "tiers=[jdynoff.Disk(path)]; tiers=[] runs without a disk."
        )
    limit = host_memory().limit_bytes
    if limit is not None:
        raise ConfigurationError(
            f"every writable directory among {tried} is in memory (tmpfs), and this process is "
            f"limited to {limit} bytes of it: moving tensors there would free nothing. Set "
            f"{SPILL_DIR_VARIABLE} to a directory on a disk, or pass "
            "tiers=[jdynoff.Disk(path)]; tiers=[] runs without a disk."
        )
    return (Disk(usable[0]),)


def check_disk(disk: Disk) -> None:
    """Warn about a directory that is in RAM, and refuse one that does not exist.

    Args:
        disk: The tier about to be used.

    Raises:
        ConfigurationError: If the directory is missing.
    """
    if not os.path.isdir(disk.directory):
        raise ConfigurationError(
            f"the spill directory '{disk.directory}' does not exist or is not a directory; create "
            f"it, or choose another with {SPILL_DIR_VARIABLE} or tiers=[jdynoff.Disk(path)]."
        )
    filesystem = filesystem_of(disk.directory)
    if filesystem.is_memory:
        warnings.warn(
            f"the spill directory '{disk.directory}' is on a {filesystem.kind}, which is memory: "
            "what is moved there still counts against the machine's memory. Choose a directory "
            f"on a disk with {SPILL_DIR_VARIABLE} or tiers=[jdynoff.Disk(path)].",
            RuntimeWarning,
            stacklevel=3,
        )
