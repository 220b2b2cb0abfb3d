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
    gc.collect()
    ledger(jax.devices()[0]).wait()
    for tiers in ((), None):
        totals = manager_for(tiers).totals()
        assert (totals["live_entries"], totals["open_tickets"]) == (0, 0)
