"""How far a process's memory really rises: the kernel's figure, not XLA's.

In a memory cgroup of its own (`benchmarks.memory_cgroup`) the kernel's highest usage counts, page
cache and kernel memory included. Where no cgroup can be made, or its highest usage cannot be set
back, the highest resident set does, which misses those two.

The trap: what XLA's compiler has freed stays with malloc, and a step that takes its temporaries
from there would seem to need none. It is given back to the system before the baseline is read.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pathlib
import re

GROUP_VARIABLE = "JDYNOFF_BENCHMARK_CGROUP"
"""Set for a process in a cgroup of its own: the group's directory."""

_RESIDENT = "peak resident set"
_CGROUP = "memory cgroup"


class Rise:
    """The highest memory of this process since `__init__`, less that of then.

    Attributes:
        how: What is measured, in words.
    """

    def __init__(self) -> None:
        """Gives unused memory back, reads the baseline and sets the peak back to it.

        Raises:
            OSError: If the kernel permits neither figure.
        """
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        group = pathlib.Path(os.environ.get(GROUP_VARIABLE, "/nonexistent"))
        self._file: int | None = None
        self.how = _RESIDENT
        for usage, peak in (
            ("memory.usage_in_bytes", "memory.max_usage_in_bytes"),
            ("memory.current", "memory.peak"),
        ):
            try:
                # Of version 2 each open file has a peak of its own, since Linux 6.12.
                self._file = os.open(group / peak, os.O_RDWR)
                os.write(self._file, b"0")
                self._baseline = int((group / usage).read_text())
                self.how = _CGROUP
                return
            except OSError:
                self._file = None
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        self._baseline = _status("VmRSS")

    def bytes(self) -> int:
        """The rise so far."""
        peak = _status("VmHWM") if self._file is None else int(os.pread(self._file, 64, 0))
        return peak - self._baseline


def _status(field: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text()
    found = re.search(rf"^{field}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {field}")
    return int(found[1]) * 1024
