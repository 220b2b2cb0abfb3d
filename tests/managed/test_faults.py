"""What a managed step does when the disk fails: one clear exception, and the next step works."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest

import jdynoff
from jdynoff.runtime.manager import manager_for
from jdynoff.runtime.tiers import default_tiers
from tests.programs.example import descend, layer, normal, quick, same_bits, weights

DEPTH, WIDTH = 24, 256
STEPS_THROUGH_THE_DISK = int(os.environ.get("JDYNOFF_TEST_STEPS", "100"))


def loss(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
    return jnp.mean(x**2)


def arguments() -> tuple[Any, jax.Array]:
    return weights(depth=DEPTH, width=WIDTH), normal(7, 512, WIDTH)


@pytest.fixture(scope="module")
def step() -> Any:
    """A step that moves more than its pool holds, and checks what comes back."""
    managed = jdynoff.managed(quick(descend(loss)), budget="min", verify=True)
    plan = managed.plan(*arguments())
    assert plan.spill_bytes > 2 * plan.pool_bytes
    return managed


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("read_eio", "io"),
        ("read_short", "io"),
        ("write_eio", "io"),
        ("write_short", "io"),
        ("write_enospc", "disk-full"),
        ("corrupt", "checksum"),
    ],
)
def test_a_failing_disk_is_one_exception_and_the_next_step_works(
    step: Any, manager: Any, fault: str, code: str
) -> None:
    good = jax.block_until_ready(step(*arguments()))
    manager.inject_fault(fault, after=2, count=-1)
    with pytest.raises((jax.errors.JaxRuntimeError, jdynoff.TransferError), match=code):
        jax.block_until_ready(step(*arguments()))
    with pytest.raises(jdynoff.TransferError) as caught:
        step.stats()
    assert caught.value.code == code
    manager.inject_fault("none")
    assert same_bits(step(*arguments()), good)
    assert step.stats().bytes_written > 0
    totals = manager.totals()
    assert (totals["live_entries"], totals["open_tickets"]) == (0, 0)


def test_steps_in_flight_wait_for_each_others_disk_space_and_memory() -> None:
    plan = jdynoff.managed(quick(descend(loss)), budget="min").plan(*arguments())
    (disk,) = default_tiers()
    tiers = [jdynoff.Disk(disk.directory, limit=plan.spill_bytes)]
    step = jdynoff.managed(quick(descend(loss)), budget="min", tiers=tiers)
    good = jax.block_until_ready(step(*arguments()))
    results = [step(*arguments()) for _ in range(4)]  # none waits for its result
    assert all(same_bits(result, good) for result in results)
    totals = manager_for(tiers).totals()
    assert totals["arena_bytes"] <= plan.pool_bytes
    assert totals["spill_file_bytes"] <= plan.spill_bytes


def test_without_a_disk_the_pool_holds_everything_and_the_plan_says_so() -> None:
    step = jdynoff.managed(quick(descend(loss)), budget="min", tiers=[])
    plan = step.plan(*arguments())
    assert plan.spill_bytes == 0
    assert plan.pool_bytes >= plan.held_bytes
    assert plan.min_feasible_bytes >= plan.memory.total_bytes + plan.held_bytes
    least = jdynoff.managed(quick(descend(loss)), budget=plan.min_feasible_bytes, tiers=[])
    assert same_bits(least(*arguments()), step(*arguments()))
    assert step.stats().bytes_written == 0
    tight = jdynoff.managed(quick(descend(loss)), budget=plan.min_feasible_bytes - 1, tiers=[])
    with pytest.raises(jdynoff.BudgetError) as caught:
        tight.plan(*arguments())
    assert caught.value.min_feasible_bytes == plan.min_feasible_bytes


def test_many_steps_through_the_disk_grow_neither_memory_nor_file(step: Any, manager: Any) -> None:
    process = psutil.Process()
    parameters, x = arguments()
    for _ in range(10):
        jax.block_until_ready(step(parameters, x))
    memory, totals = process.memory_info().rss, manager.totals()
    for _ in range(STEPS_THROUGH_THE_DISK):
        jax.block_until_ready(step(parameters, x))
    assert process.memory_info().rss - memory < 32 << 20
    for name in ("arena_bytes", "spill_file_bytes"):
        assert manager.totals()[name] == totals[name]
