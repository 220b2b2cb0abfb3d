"""How many bytes a set of decisions moves."""

from __future__ import annotations

from jdynoff.planning.decisions import Decisions
from jdynoff.planning.live_ranges import executions


def offloaded_bytes(decisions: Decisions) -> int:
    """Bytes handed to the manager in one step, if every branch is taken."""
    return sum(site.total_bytes * executions(site.region) for site in decisions.moved())


def reloaded_bytes(decisions: Decisions) -> int:
    """Bytes taken back in one step, if every branch is taken."""
    return sum(
        site.total_bytes * site.most_readers * executions(site.region) for site in decisions.moved()
    )


def calls(decisions: Decisions) -> int:
    """Offloads and reloads in one step, if every branch is taken."""
    return sum(
        site.entries * (1 + site.most_readers) * executions(site.region)
        for site in decisions.moved()
    )
