"""Every test of managed steps must leave the managers empty."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import jax
import pytest

from jdynoff.flights import ledger
from jdynoff.runtime.manager import manager_for


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """No entry and no open ticket outlives the step that made it."""
    # Loops that ran outside of managed steps may have left stacks, which go when others come.
    before = _left()
    yield
    ledger(jax.devices()[0]).wait()
    if _more(before):
        gc.collect()  # seconds, among thousands of traced programs
        ledger(jax.devices()[0]).wait()
    assert not _more(before), f"{_left()} entries and tickets are left, {before} before"


def _left() -> tuple[int, int]:
    totals = [manager_for(tiers).totals() for tiers in ((), None)]
    return sum(t["live_entries"] for t in totals), sum(t["open_tickets"] for t in totals)


def _more(before: tuple[int, int]) -> bool:
    return any(now > then for now, then in zip(_left(), before, strict=True))
