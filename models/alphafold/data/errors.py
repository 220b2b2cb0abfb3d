"""What goes wrong with protein files, and what the caller wants done about it.

Every parser and reader in this package raises `DataError` with the file and, where one exists,
the line; `parsing` makes that so also where a parser meets what nobody thought of. A training run
rarely wants to stop for one bad file among thousands, so the dataset readers take a
`BadFilePolicy`: raise at once, or skip and count. The trap is a policy that skips everything
silently: `SkipCounter.summary()` is what a run should print, and a dataset in which nothing is left
raises whatever the policy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Literal, Protocol

BadFilePolicy = Literal["raise", "skip"]
# "file:line:column" and the like, as parsers write it.
_LINE_IN_MESSAGE = re.compile(r":(\d+)(?::\d+)?(?:\(\d+\))?:? ")


class DataError(ValueError):
    """A protein file that cannot be used, with where and why.

    Attributes:
        source: path or name of the file.
        line: 1-based line number, or None where the fault has no line.
        reason: what is wrong, without the place.
        kind: short stable name of the fault, used as the key when faults are counted.
    """

    def __init__(
        self, reason: str, *, source: str, line: int | None = None, kind: str = "malformed"
    ) -> None:
        self.reason = reason
        self.source = source
        self.line = line
        self.kind = kind
        place = source if line is None else f"{source}:{line}"
        super().__init__(f"{place}: {reason}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the keyword arguments: errors cross the loader's process boundary."""
        return (_rebuild_data_error, (self.reason, self.source, self.line, self.kind))


def _rebuild_data_error(reason: str, source: str, line: int | None, kind: str) -> DataError:
    return DataError(reason, source=source, line=line, kind=kind)


def line_in_message(message: str) -> int | None:
    """The line that a parser's message names, or None."""
    place = _LINE_IN_MESSAGE.search(message)
    return int(place[1]) if place else None


@contextlib.contextmanager
def parsing(source: str) -> Iterator[None]:
    """Turn what a parser raises on an odd file into a `DataError` that names the file.

    Faults that a parser knows are `DataError`s already and pass unchanged.

    Args:
        source: path or name of the file.
    """
    try:
        yield
    except DataError:
        raise
    except (
        ArithmeticError, AttributeError, EOFError, LookupError, RuntimeError, TypeError, ValueError
    ) as error:  # fmt: skip
        raise DataError(
            f"cannot be parsed ({type(error).__name__}: {error}); it is damaged, or has a form "
            "that is not known here",
            source=source,
            line=line_in_message(str(error)),
        ) from error


def unforeseen(error: Exception, name: str) -> DataError:
    """The `DataError` of a protein for an exception that no reader foresaw."""
    return DataError(
        f"cannot be used ({type(error).__name__}: {error})", source=name, kind="unforeseen"
    )


class SkippedDataWarning(UserWarning):
    """A file or chain was left out of a dataset; the text says which, why, and the count so far."""


class FaultHandler(Protocol):
    """What decides about a fault: a counter, or a list for someone else to count."""

    def handle(self, error: DataError) -> None:
        """Raise `error`, or note it."""


@dataclasses.dataclass
class FaultList:
    """Keeps faults for the process that counts them, which workers are not.

    Attributes:
        policy: "raise" passes every fault on; "skip" keeps it.
        faults: in the order of their discovery.
    """

    policy: BadFilePolicy = "skip"
    faults: list[DataError] = dataclasses.field(default_factory=list)

    def handle(self, error: DataError) -> None:
        """Raise `error`, or keep it, as the policy says."""
        if self.policy == "raise":
            raise error
        self.faults.append(error)


@dataclasses.dataclass
class SkipCounter:
    """Counts what a dataset leaves out, by kind of fault, warning at each one.

    Attributes:
        policy: "raise" passes every fault on; "skip" counts and warns.
        counts: faults seen so far, by `DataError.kind`.
    """

    policy: BadFilePolicy = "raise"
    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    _known: set[str] = dataclasses.field(default_factory=set, repr=False, compare=False)

    def handle_once(self, error: DataError) -> None:
        """As `handle`, but a fault that was handled so before is passed over.

        For files that are read again and again, such as templates of several targets.
        """
        if str(error) not in self._known:
            self._known.add(str(error))
            self.handle(error)

    def handle(self, error: DataError) -> None:
        """Raise `error`, or count it and warn, as the policy says."""
        if self.policy == "raise":
            raise error
        self.counts[error.kind] += 1
        total = sum(self.counts.values())
        warnings.warn(
            f"skipped ({error.kind}, {total} skipped so far): {error}",
            SkippedDataWarning,
            stacklevel=3,
        )

    def summary(self) -> str:
        """One line for the end of a run: how many were left out, by kind."""
        if not self.counts:
            return "nothing skipped"
        parts = ", ".join(f"{kind}: {count}" for kind, count in sorted(self.counts.items()))
        return f"{sum(self.counts.values())} skipped ({parts})"
