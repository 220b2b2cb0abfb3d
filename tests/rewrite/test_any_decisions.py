"""Every choice of what stays, leaves and comes back gives the same results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jdynoff._native import PAGE_BYTES, Manager
from jdynoff.planning.decisions import Site
from tests.programs import branches, loops, rules, straight
from tests.programs.example import Example, difference_in_ulps, quick, same_bits
from tests.programs.rewritten import rewrite

EXAMPLES = [
    loops.nested_scan(2, True),
    loops.stack_read_three_times(),
    loops.two_backwards(),
    branches.switch_in_scan(1),
    branches.cond_in_cond_in_scan(),
    rules.reverse_over_reverse(1),
    straight.scan_between_layers(),
]


def every_other(sites: Sequence[Site]) -> Sequence[Site]:
    return sites[::2]


def all_but_every_third(sites: Sequence[Site]) -> Sequence[Site]:
    return [site for number, site in enumerate(sites) if number % 3]


@pytest.mark.parametrize(
    ("keep", "share", "price"), [(every_other, 0.3, 0.0), (all_but_every_third, 0.0, -1.0)]
)
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_partly_kept_sites_change_nothing(
    example: Example,
    keep: Callable[[Sequence[Site]], Sequence[Site]],
    share: float,
    price: float,
    spill_directory: Path,
) -> None:
    arguments = example.arguments()
    expected = quick(example.step)(*arguments)
    rewritten = rewrite(example.step, arguments, keep=keep, share=share, price=price)
    manager = Manager(str(spill_directory))
    results, record = rewritten.run(arguments, manager)

    assert difference_in_ulps(expected, results) <= example.ulps
    assert any(site.kept for site in rewritten.decisions.sites)
    assert record["entries_unread"] == 0
    assert manager.totals()["live_entries"] == 0
    manager.shutdown()


@pytest.mark.parametrize(
    "example", [loops.nested_scan(2, True), branches.switch_in_scan(1)], ids=lambda e: e.name
)
def test_one_program_gives_identical_bits_under_every_pool_and_tier(
    example: Example, spill_directory: Path
) -> None:
    arguments = example.arguments()
    rewritten = rewrite(example.step, arguments)
    results = []
    written = []
    for pool_bytes in (None, 8 * PAGE_BYTES, 3 * PAGE_BYTES):
        for verify in (False, True):
            disk = None if pool_bytes is None else str(spill_directory)
            manager = Manager(disk, verify=verify)
            found, record = rewritten.run(arguments, manager, pool_bytes)
            results.append(found)
            written.append(record["bytes_written"])
            manager.shutdown()

    assert written[0] == 0
    assert written[-1] > 0
    assert all(same_bits(results[0], other) for other in results[1:])
