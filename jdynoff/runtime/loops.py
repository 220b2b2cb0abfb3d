"""Where the stacks of loops go outside of a managed step: memory up to a limit, then disk.

A managed step has a budget and its loops use it. Elsewhere there is nobody to ask, so the limit is
a share of the memory that is available when a loop is first compiled, or `JDYNOFF_LOOP_MEMORY`.
"""

from __future__ import annotations

import os
import threading

from jdynoff import _native
from jdynoff.errors import ConfigurationError
from jdynoff.planning.budget import parse_bytes
from jdynoff.runtime.device_memory import host_memory
from jdynoff.runtime.manager import manager_for

MEMORY_VARIABLE = "JDYNOFF_LOOP_MEMORY"
# The step's own arrays, and XLA's, need the rest.
_SHARE_OF_AVAILABLE = 0.25
_LEAST_BYTES = 16 << 20

_lock = threading.Lock()
_default_bytes: int | None = None


def loop_memory_bytes() -> int:
    """How much memory the stacks of loops may use on each device before they go to disk."""
    global _default_bytes
    named = os.environ.get(MEMORY_VARIABLE)
    if named:
        try:
            return parse_bytes(named)
        except ValueError as error:
            raise ConfigurationError(
                f"{MEMORY_VARIABLE} is {named!r}; it must be bytes, as a number or as text such "
                'as "2GiB".'
            ) from error
    with _lock:
        if _default_bytes is None:
            available = host_memory().available_bytes
            _default_bytes = max(int(available * _SHARE_OF_AVAILABLE), _LEAST_BYTES)
        return _default_bytes


def configure() -> None:
    """Tells the manager where the loops that are compiled from now on have their stacks."""
    _native.configure_loops(manager_for(), loop_memory_bytes())
