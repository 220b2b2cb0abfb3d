"""What this process really occupies, from the operating system, for reports.

Linux keeps the peak of a process; writing to `clear_refs` starts it anew, so that the peak of the
training alone can be told from that of the compiler before it. The trap: where `/proc` is missing
or closed, only the peak since the process began is known, and `reset_peak` says so by False.
"""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def reset_peak() -> bool:
    """Start the peak anew; returns whether that was possible."""
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return True


def release_unused() -> int:
    """Give memory that was freed but kept by the C library back to the system, where it can be.

    A compiler leaves a lot of it behind, which would hide what comes after.

    Returns:
        `current_bytes()` afterwards.
    """
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl has not
        if trim is not None:
            trim(0)
    return current_bytes()


def peak_bytes() -> int:
    """The most that this process occupied since `reset_peak`, or since it began."""
    found = _status("VmHWM")
    if found is not None:
        return found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def current_bytes() -> int:
    """What this process occupies now; its peak where the system does not tell."""
    found = _status("VmRSS")
    return peak_bytes() if found is None else found


def _status(field: str) -> int | None:
    if not _STATUS.is_file():
        return None
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
