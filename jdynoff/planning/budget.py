"""What the user means by `budget=`."""

from __future__ import annotations

import re

from jdynoff.errors import ConfigurationError

MINIMUM = "min"

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", start=1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", start=1)},
}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")


def parse_bytes(quantity: int | str) -> int:
    """Reads a number of bytes such as `8 * 2**30`, "8GiB" or "500 MB".

    Raises:
      ConfigurationError: if it is not a positive number of bytes.
    """
    if isinstance(quantity, bool) or not isinstance(quantity, int | str):
        raise ConfigurationError(
            f"a size must be an int of bytes or text such as '8GiB', not {quantity!r} of type "
            f"{type(quantity).__name__}."
        )
    if isinstance(quantity, int):
        size = quantity
    else:
        found = _QUANTITY.match(quantity)
        unit = found.group(2).lower() if found else None
        if found is None or unit not in _UNITS:
            raise ConfigurationError(
                f"cannot read {quantity!r} as a number of bytes; write it as 8589934592, '8GiB', "
                "'500MB' or 'min'."
            )
        size = int(float(found.group(1)) * _UNITS[unit])
    if size <= 0:
        raise ConfigurationError(f"a size must be positive, not {quantity!r}.")
    return size


def parse_budget(budget: int | str | None) -> int | str | None:
    """Validates `budget=`: bytes, "min", or None for what the device has."""
    if budget is None or (isinstance(budget, str) and budget.strip().lower() == MINIMUM):
        return None if budget is None else MINIMUM
    return parse_bytes(budget)


def format_bytes(size: int | float) -> str:
    """Writes bytes for people: 1.5 GiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
