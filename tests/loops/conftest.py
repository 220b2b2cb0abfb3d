"""Every test of loops must leave no stack and no entry behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import jax
import pytest

from jdynoff import _native
from jdynoff.flights import ledger
from jdynoff.runtime.manager import manager_for


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stacks that nobody comes back for are given up later; tests of them say so."""
    left_by_others = _native.loop_totals()["live_stacks"]
    yield
    gc.collect()
    ledger(jax.devices()[0]).wait()
    if request.node.get_closest_marker("leaves_stacks") is not None:
        return
    assert _native.loop_totals()["live_stacks"] <= left_by_others
    if left_by_others:
        return
    manager = manager_for(None)
    deadline = time.monotonic() + 5
    while manager.totals()["open_tickets"] and time.monotonic() < deadline:
        time.sleep(0.001)  # the last stack's ticket is closed on a thread of its own
    totals = manager.totals()
    assert (totals["live_entries"], totals["open_tickets"]) == (0, 0)
