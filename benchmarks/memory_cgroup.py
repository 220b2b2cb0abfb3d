"""Runs a command in a memory cgroup and reads its real peak. Linux, as root.

Both versions of cgroups are served. Swap is forbidden, so a process over the limit is killed.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
from collections.abc import Sequence

from benchmarks.real_peak import GROUP_VARIABLE

_ROOT = pathlib.Path("/sys/fs/cgroup")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a limited process ended.

    Attributes:
        returncode: Of the process; -9 if the kernel killed it.
        stdout: What it printed.
        stderr: What it printed to its standard error.
        peak_bytes: The cgroup's real peak, page cache included.
    """

    returncode: int
    stdout: str
    stderr: str
    peak_bytes: int


def unavailable() -> str:
    """Why no cgroup can be made here; "" if one can."""
    if os.geteuid() != 0:
        return "making a memory cgroup takes root"
    if not any(path.exists() for path in (_ROOT / "memory", _ROOT / "cgroup.controllers")):
        return "no memory cgroup controller is mounted at /sys/fs/cgroup"
    return ""


def run_limited(
    command: Sequence[str], limit_bytes: int, timeout_seconds: float, cwd: pathlib.Path
) -> Outcome:
    """Runs `command` with at most `limit_bytes` of memory and no swap.

    It finds its group in the environment (`benchmarks.real_peak`).

    Raises:
        OSError: If the cgroup cannot be made.
        subprocess.TimeoutExpired: If the command takes too long.
    """
    first = (_ROOT / "memory").is_dir()
    group = (_ROOT / "memory" if first else _ROOT) / f"jdynoff-{os.getpid()}"
    limit, swap, peak = (
        ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.max_usage_in_bytes")
        if first
        else ("memory.max", "memory.swap.max", "memory.peak")
    )
    group.mkdir()
    try:
        (group / limit).write_text(str(limit_bytes))
        if (group / swap).exists():
            (group / swap).write_text(str(limit_bytes) if first else "0")

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            cwd=cwd,
            env={**os.environ, GROUP_VARIABLE: str(group)},
            preexec_fn=enter,
            check=False,
        )
        measured = int((group / peak).read_text())
    finally:
        group.rmdir()
    return Outcome(done.returncode, done.stdout, done.stderr, measured)
