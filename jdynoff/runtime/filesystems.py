"""Which filesystem a directory is on, and whether writing there really frees memory.

The trap this exists for: ``/tmp`` is a tmpfs on many machines. What is spilled there stays in RAM,
inside the very memory limit that spilling is meant to respect.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})

_MOUNT_TABLE = Path("/proc/self/mountinfo")


@dataclasses.dataclass(frozen=True)
class Filesystem:
    """Where a directory lives.

    Attributes:
        kind: The filesystem's type as the kernel names it, such as ``ext4``; ``unknown`` where
            the kernel does not say.
        mount_point: The directory that it is mounted on.
        free_bytes: What this user may still write there.
    """

    kind: str
    mount_point: str
    free_bytes: int

    @property
    def is_memory(self) -> bool:
        """Whether its files are RAM."""
        return self.kind in MEMORY_FILESYSTEMS


def _unescape(field: str) -> str:
    # The kernel writes blanks, tabs, newlines and backslashes of a path as \ooo.
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), field)


def parse_mounts(table: str) -> list[tuple[str, str]]:
    """Read a mount table.

    Args:
        table: Text in the format of ``/proc/self/mountinfo``.

    Returns:
        (mount point, filesystem type) in the order of mounting: a later one hides an earlier one
        on the same directory.
    """
    mounts = []
    for line in table.splitlines():
        left, separator, right = line.partition(" - ")
        fields = left.split()
        if separator and len(fields) >= 5 and right:
            mounts.append((_unescape(fields[4]), right.split()[0]))
    return mounts


def filesystem_of(directory: str | os.PathLike[str]) -> Filesystem:
    """Find the filesystem that a directory is on.

    Args:
        directory: An existing directory.

    Returns:
        Its filesystem.

    Raises:
        OSError: If the directory cannot be examined.
    """
    real = os.path.realpath(directory)
    room = os.statvfs(real)
    kind, mount_point = "unknown", "/"
    table = _MOUNT_TABLE.read_text(errors="surrogateescape") if _MOUNT_TABLE.exists() else ""
    for candidate, candidate_kind in parse_mounts(table):
        inside = real == candidate or real.startswith(candidate.rstrip("/") + "/")
        if inside and len(candidate) >= len(mount_point):
            kind, mount_point = candidate_kind, candidate
    return Filesystem(kind, mount_point, room.f_bavail * room.f_frsize)
