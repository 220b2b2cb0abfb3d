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
    yield
    ledger(jax.devices()[0]).wait()
    if _left() != (0, 0):
        gc.collect()  # seconds, among thousands of traced programs
        ledger(jax.devices()[0]).wait()
    assert _left() == (0, 0)


def _left() -> tuple[int, int]:
    totals = [manager_for(tiers).totals() for tiers in ((), None)]
    return sum(t["live_entries"] for t in totals), sum(t["open_tickets"] for t in totals)
