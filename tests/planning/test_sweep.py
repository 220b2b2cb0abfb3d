"""Sweeps over budgets, pictures, and the rates that predictions reckon with."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdynoff
from jdynoff import cli
from jdynoff.planning.machine import (
    ASSUMED_CPU,
    FILE_VARIABLE,
    machine_of,
    read_machine,
    write_machine,
)
from tests.programs.example import descend, layer, normal, quick, weights

DEPTH, ROWS, WIDTH = 8, 8192, 64  # several times the smallest pool


def loss(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
    return jnp.mean(x**2)


@pytest.fixture(scope="module")
def arguments() -> tuple[Any, jax.Array]:
    small = jax.tree.map(lambda weight: weight / 8, weights(depth=DEPTH, width=WIDTH))
    return small, normal(0, ROWS, WIDTH)


@pytest.fixture(scope="module")
def swept(arguments: Any) -> Any:
    return jdynoff.managed(quick(descend(loss)), budget=1).plan.sweep(*arguments)


def test_every_feasible_budget_holds_and_the_least_is_named(swept: Any) -> None:
    fits = [row.plan is not None for row in swept.rows]
    assert fits == sorted(fits, reverse=True), "a hole in the budgets"
    assert 4 <= sum(fits) < len(fits)
    for row in swept.rows:
        assert (row.plan is not None) == (row.budget_bytes >= swept.min_feasible_bytes)
        if row.plan is not None:
            assert row.plan.device_peak_bytes <= row.budget_bytes
            assert row.plan.compiles <= 3


def test_a_smaller_budget_is_never_predicted_faster(swept: Any) -> None:
    plans = [row.plan for row in swept.rows if row.plan is not None]
    seconds = [plan.forecast.step_seconds for plan in plans]
    assert seconds == sorted(seconds)


def test_a_sweep_prints_and_draws(swept: Any, tmp_path: Path) -> None:
    text = str(swept)
    assert "does not fit" in text
    assert "of plain" in text
    pytest.importorskip("matplotlib")
    assert swept.plot(tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_plan_draws_its_memory(swept: Any, tmp_path: Path) -> None:
    plan = swept.rows[3].plan
    assert max(size for _, size in plan.profile.points) <= plan.simulated_bytes
    peak = max(size for _, size in plan.plain_profile.points)
    assert peak >= 2 * max(size for _, size in plan.profile.points)
    pytest.importorskip("matplotlib")
    assert plan.plot(tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_named_budgets_are_planned_in_order(arguments: Any) -> None:
    step = jdynoff.managed(quick(descend(loss)), budget="min")
    found = step.plan.sweep(*arguments, budgets=["1GiB", 10_000])
    assert [row.budget_bytes for row in found.rows] == [1 << 30, 10_000]
    assert [row.plan is None for row in found.rows] == [False, True]
    step(*arguments)  # its own plan is its own budget's


@pytest.mark.parametrize("fresh", [1e8, 1e12, math.inf])
def test_what_fits_is_moved_only_where_memory_must_be_cleared(
    arguments: Any, fresh: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "machine.json"))
    write_machine(dataclasses.replace(ASSUMED_CPU, fresh_bytes_per_second=fresh))
    step = jdynoff.managed(quick(descend(loss)), budget="1GiB")
    plan = step.plan(*arguments)
    assert (plan.offloaded_bytes > 0) == (fresh == 1e8)
    assert ("% faster" in plan.note) == (fresh == 1e8)
    assert plan.spill_bytes == 0
    assert plan.compiles <= 3
    again = jdynoff.managed(quick(descend(loss)), budget="1GiB").plan(*arguments)  # remembered
    assert again.note == plan.note
    assert again.forecast == plan.forecast


def test_a_plan_after_a_call_names_the_least(
    arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "machine.json"))
    write_machine(dataclasses.replace(ASSUMED_CPU, fresh_bytes_per_second=1e8))
    step = jdynoff.managed(quick(descend(loss)), budget="1GiB")
    jax.block_until_ready(step(*arguments))
    named = step.plan(*arguments).min_feasible_bytes
    least = jdynoff.managed(quick(descend(loss)), budget="min").plan(*arguments)
    assert named == least.min_feasible_bytes


@pytest.mark.parametrize("empty", [(), (0, 4)])
def test_a_step_that_computes_nothing_runs(empty: tuple[int, ...]) -> None:
    step = jdynoff.managed(jax.jit(lambda x: (x, jnp.sin(jnp.zeros(empty)))[0]), budget="1GiB")
    assert step(jnp.ones(4)).shape == (4,)
    jdynoff.managed(jax.jit(lambda x: x))(jnp.ones(3))


def test_measured_rates_are_kept_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "folder" / "machine.json"))
    device = jax.local_devices()[0]
    assert machine_of(device) == ASSUMED_CPU
    assert cli.main(["doctor", "--measure", "--json", "--size-mib", "4"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert all(value > 0 for value in figures.values() if isinstance(value, float))
    assert machine_of(device).flops_per_second == figures["flops_per_second"]
    assert machine_of(device).origin.startswith("measured on ")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"name": "x"}'])
def test_an_unreadable_file_of_rates_counts_as_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text(content)
    assert read_machine(path) == ASSUMED_CPU
