"""Managed steps give plain JAX's results, for every construct that users write."""

from __future__ import annotations

import pytest

import jdynoff
from tests.programs import EXAMPLES
from tests.programs.example import Example, difference_in_ulps, quick, same_bits


# One example has such a checkpoint; the warning has a test of its own.
@pytest.mark.filterwarnings("ignore:.*jax.checkpoint covers:UserWarning")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_managed_step_agrees_with_plain_jax(example: Example) -> None:
    arguments = example.arguments()
    jitted = quick(example.step)
    expected = jitted(*arguments)
    step = jdynoff.managed(jitted, budget="min", min_bytes=1, flops_per_byte=0.0)
    first = step(*arguments)
    second = step(*arguments)

    assert difference_in_ulps(expected, first) <= example.ulps
    assert same_bits(first, second)
    stats, plan = step.stats(), step.plan(*arguments)
    assert stats.entries_unread == 0
    assert (stats.bytes_offloaded > 0) == (plan.offloaded_bytes > 0)
    if example.moves:
        assert stats.bytes_offloaded > 0
        assert stats.bytes_reloaded >= stats.bytes_offloaded
    if example.bounded:
        assert stats.bytes_offloaded <= plan.offloaded_bytes
        assert stats.bytes_reloaded <= plan.reloaded_bytes
    assert stats.pool_peak_bytes <= plan.pool_bytes
