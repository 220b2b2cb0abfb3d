"""The exceptions of this package, and their way through XLA.

An error inside a running step reaches Python as text in an ``XlaRuntimeError``. The manager
prefixes its messages with ``[jdynoff:<code>]``; `from_xla` finds the prefix and rebuilds the
exception. The trap: the codes are a contract with ``xla_ext/status.h``.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from typing import Any

__all__ = [
    "BudgetError",
    "ConfigurationError",
    "JdynoffError",
    "SpillSpaceError",
    "TransferError",
    "TransformError",
    "from_code",
    "from_xla",
]


class JdynoffError(Exception):
    """Base class of everything that this package raises on purpose."""


class BudgetError(JdynoffError, ValueError):
    """The step cannot be made to fit the budget.

    Attributes:
        budget_bytes: What was asked for.
        min_feasible_bytes: The smallest budget with which this step can run.
        largest: The largest buffers live at the peak, largest first, each with its shape, dtype,
            bytes and source line.
    """

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int = 0,
        min_feasible_bytes: int = 0,
        largest: Sequence[Any] = (),
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.min_feasible_bytes = min_feasible_bytes
        self.largest = list(largest)


class TransferError(JdynoffError, RuntimeError):
    """The manager could not move bytes for a running step, which has therefore failed.

    Attributes:
        code: ``disk-full``, ``io``, ``checksum``, ``order``, ``token``, ``host-limit`` or
            ``internal``.
    """

    def __init__(self, message: str, *, code: str = "internal") -> None:
        super().__init__(message)
        self.code = code


class SpillSpaceError(TransferError, OSError):
    """Spill space could not be reserved. Nothing has run, and donated arguments are alive."""

    def __init__(self, message: str, *, code: str = "disk-full") -> None:
        TransferError.__init__(self, message, code=code)
        self.errno = errno.ENOSPC

    def __str__(self) -> str:
        return str(self.args[0])


class TransformError(JdynoffError, TypeError):
    """A managed step was called under another transformation (``jit``, ``grad``, ``vmap``)."""


class ConfigurationError(JdynoffError, ValueError):
    """The tiers, the platform or the process cannot do what was asked for."""


_PREFIX = re.compile(r"\[jdynoff:([a-z-]+)\] ([^\n]*)")


def from_code(code: str, message: str, *, reservation: bool = False) -> JdynoffError:
    """Build the exception of a manager's status.

    Args:
        code: A code of ``xla_ext/status.h``.
        message: What happened, what must hold, what to do next.
        reservation: Whether it happened before the step was dispatched.

    Returns:
        The exception, not raised.
    """
    if code == "configuration":
        return ConfigurationError(message)
    if reservation and code == "disk-full":
        return SpillSpaceError(message)
    return TransferError(message, code=code)


def from_xla(error: BaseException) -> JdynoffError | None:
    """Find the manager's error in an exception that XLA has raised.

    Args:
        error: Any exception; XLA's carry the manager's message somewhere in their text.

    Returns:
        The exception that the manager meant, or None if the error is not the manager's.
    """
    found = _PREFIX.search(str(error))
    if found is None:
        return None
    return from_code(found.group(1), found.group(2).strip())
