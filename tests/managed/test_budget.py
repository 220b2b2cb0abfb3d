"""A budget is a contract, and the plan says what keeping it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest

import jdynoff
from tests.programs.example import (
    descend,
    difference_in_ulps,
    layer,
    normal,
    quick,
    same_bits,
    weights,
)

DEPTH, WIDTH, ROWS = 12, 128, 2048


def loss(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
    return jnp.mean(x**2)


def arguments() -> tuple[Any, ...]:
    return weights(depth=DEPTH, width=WIDTH), normal(0, ROWS, WIDTH)


def managed(budget: int | str | None, **options: Any) -> Any:
    return jdynoff.managed(quick(descend(loss)), budget=budget, **options)


@pytest.fixture(scope="module")
def structs() -> tuple[Any, ...]:
    return jax.eval_shape(arguments)


@pytest.fixture(scope="module")
def least(structs: tuple[Any, ...]) -> jdynoff.Plan:
    return managed("min").plan(*structs)


@pytest.fixture(scope="module")
def expected() -> Any:
    return quick(descend(loss))(*arguments())


@pytest.mark.parametrize("times", [1.0, 1.3, 2.0])
def test_xla_and_the_pool_together_keep_the_budget(
    times: float, least: jdynoff.Plan, expected: Any
) -> None:
    budget = int(times * least.min_feasible_bytes)
    step = managed(budget)
    plan = step.plan(*arguments())
    memory = step.lower(*arguments()).compile().memory_analysis()
    xla = (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )
    assert xla + plan.pool_bytes == plan.device_peak_bytes <= budget
    assert plan.min_feasible_bytes == least.min_feasible_bytes
    found = step(*arguments())
    assert difference_in_ulps(expected, found) <= 8
    stats = step.stats()
    assert 0 < stats.bytes_offloaded <= plan.offloaded_bytes <= least.offloaded_bytes
    assert stats.pool_peak_bytes <= plan.pool_bytes


@pytest.mark.parametrize("times", [1.3, 2.0, 20.0])
def test_the_least_that_a_plan_names_works_as_a_budget(
    times: float, least: jdynoff.Plan, structs: tuple[Any, ...]
) -> None:
    named = managed(int(times * least.min_feasible_bytes)).plan(*structs).min_feasible_bytes
    assert managed(named).plan(*structs).device_peak_bytes <= named


def test_a_tenth_below_the_least_is_refused(least: jdynoff.Plan, structs: tuple[Any, ...]) -> None:
    with pytest.raises(jdynoff.BudgetError) as raised:
        managed(int(0.9 * least.min_feasible_bytes)).plan(*structs)
    assert raised.value.min_feasible_bytes == least.min_feasible_bytes


def test_the_least_is_far_below_plain_jax(least: jdynoff.Plan, structs: tuple[Any, ...]) -> None:
    plain = quick(descend(loss)).lower(*structs).compile().memory_analysis()
    assert least.memory.temporary_bytes < plain.temp_size_in_bytes / 4
    assert least.plain_is_simulated
    assert plain.temp_size_in_bytes / 3 < least.plain_peak_bytes < plain.temp_size_in_bytes * 3


def test_a_plan_needs_only_shapes(least: jdynoff.Plan) -> None:
    concrete = managed("min").plan(*arguments())
    assert concrete.sites == least.sites
    assert concrete.device_peak_bytes == least.device_peak_bytes


def test_a_call_after_a_plan_does_not_compile_again() -> None:
    compiles: list[str] = []

    def count(event: str, duration: float, **_: Any) -> None:
        if "backend_compile" in event:
            compiles.append(event)

    step = managed("min")
    made = jax.block_until_ready(arguments())
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        step(*made)
        first = len(compiles)
        step(*made)
        assert first == 1
        assert len(compiles) == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert step.plan(*made).compiles == 1


def test_a_plan_goes_through_json_and_prints_the_lines_of_the_model(least: jdynoff.Plan) -> None:
    content = json.loads(least.to_json())
    assert content["min_feasible_bytes"] == least.min_feasible_bytes
    assert content["traffic_bytes"] == least.offloaded_bytes + least.reloaded_bytes
    assert len(content["sites"]) == len(least.sites)
    assert [site["bytes"] for site in content["sites"]] == [site.bytes for site in least.sites]
    rows = [line.split("│")[1].strip() for line in str(least).splitlines() if "│" in line]
    assert "tests/programs/example.py:" in "".join(rows)  # the table folds long cells
    sources = {site.source.rsplit(":")[0] for site in least.sites if site.source}
    assert {Path(source).name for source in sources} <= {"example.py", "test_budget.py"}
    offloaded = [site for site in least.sites if site.action == "offload"]
    assert sum(site.bytes for site in offloaded) == least.offloaded_bytes


@pytest.mark.parametrize("times", [1.0, 1.6])
def test_one_step_gives_identical_bits_on_every_tier(
    times: float, least: jdynoff.Plan, spill_directory: Path
) -> None:
    budget: Any = "min" if times == 1.0 else int(times * least.min_feasible_bytes)
    tiers = [jdynoff.Disk(spill_directory)]
    results = []
    for verify in (False, True):
        step = managed(budget, tiers=tiers, verify=verify)
        results += [step(*arguments()), step(*arguments())]
        stats = step.stats()
        assert (stats.bytes_written > 0) == (step.plan(*arguments()).spill_bytes > 0)
    assert all(same_bits(results[0], other) for other in results)


CACHED = """
import jax, jax.monitoring
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
import jdynoff
from tests.programs import branches
example = branches.switch_in_scan(2)
made = jax.block_until_ready(example.arguments())
events.clear()
step = jdynoff.managed(jax.jit(example.step), budget="min", min_bytes=1, flops_per_byte=0.0)
jax.block_until_ready(step(*made))
assert step.stats().bytes_offloaded > 0
print(*(sum(event.endswith(kind) for event in events) for kind in ("cache_hits", "cache_misses")))
"""


def test_the_next_process_finds_the_step_in_the_compilation_cache(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PYTHONPATH": os.getcwd(),
    }
    found = []
    for seed in ("1", "2"):  # an id that came from Python's hash() would differ
        done = subprocess.run(
            [sys.executable, "-c", CACHED],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**environment, "PYTHONHASHSEED": seed},
        )
        assert done.returncode == 0, done.stderr
        found.append(tuple(map(int, done.stdout.split())))
    (hits, misses), again = found  # the step and its pilot
    assert (hits, misses >= 1) == (0, True)
    assert again == (misses, 0)
