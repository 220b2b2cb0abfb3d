"""What goes wrong with protein files, and what the caller wants done about it.

Every parser and reader in this package raises `DataError` with the file and, where one exists,
the line. A training run rarely wants to stop for one bad file among thousands, so the dataset
readers take a `BadFilePolicy`: raise at once, or skip and count. The trap is a policy that skips
everything silently: `SkipCounter.summary()` is what a run should print, and a dataset in which
nothing is left raises whatever the policy.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from typing import Literal

BadFilePolicy = Literal["raise", "skip"]


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


class SkippedDataWarning(UserWarning):
    """A file or chain was left out of a dataset; the text says which, why, and the count so far."""


@dataclasses.dataclass
class SkipCounter:
    """Counts what a dataset leaves out, by kind of fault, warning at each one.

    Attributes:
        policy: "raise" passes every fault on; "skip" counts and warns.
        counts: faults seen so far, by `DataError.kind`.
    """

    policy: BadFilePolicy = "raise"
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

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
