"""What cannot be managed says so, and says what to do instead."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdynoff
from jdynoff.planning.budget import parse_budget
from tests.programs.example import (
    batch,
    descend,
    difference_in_ulps,
    layer,
    normal,
    quick,
    same_bits,
    weights,
)


def scan_loss(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
    return jnp.mean(x**2)


def small_step() -> Any:
    return jdynoff.managed(lambda x: jnp.sum(x**2))


def scanned(step: Callable[..., Any]) -> Any:
    return jax.lax.scan(lambda c, x: (c, step(x)), 0.0, batch())


@pytest.mark.parametrize(
    "call",
    [
        lambda step: jax.jit(step)(batch()),
        lambda step: jax.grad(step)(batch()),
        lambda step: jax.vmap(step)(batch()),
        lambda step: jax.eval_shape(step, batch()),
        lambda step: jax.jvp(step, (batch(),), (batch(),)),
        lambda step: jax.make_jaxpr(step)(batch()),
        scanned,
    ],
    ids=["jit", "grad", "vmap", "eval_shape", "jvp", "make_jaxpr", "scan"],
)
def test_a_managed_step_must_be_outermost(call: Callable[..., Any]) -> None:
    with pytest.raises(jdynoff.TransformError, match="outermost"):
        call(small_step())


def test_an_impossible_budget_names_the_least_and_the_largest_arrays() -> None:
    parameters, x = weights(width=64, depth=8), normal(0, 512, 64)
    least = jdynoff.managed(quick(descend(scan_loss)), budget="min").plan(parameters, x)
    budget = int(0.9 * least.min_feasible_bytes)
    step = jdynoff.managed(quick(descend(scan_loss)), budget=budget)
    with pytest.raises(jdynoff.BudgetError) as raised:
        step(parameters, x)
    error = raised.value
    assert error.budget_bytes == budget
    assert error.min_feasible_bytes == least.min_feasible_bytes
    assert str(error.min_feasible_bytes) in str(error)
    sizes = [tensor.nbytes for tensor in error.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 8 * 64 * 64 * 4
    assert any("tests/programs/example.py:" in tensor.source for tensor in error.largest)
    assert "example.py:" in str(error)


def test_a_budget_of_the_least_is_enough() -> None:
    # Tame weights: products may be computed again, in another order, and chaos would amplify that.
    parameters = jax.tree.map(lambda weight: weight / 8, weights(width=64, depth=8))
    x = normal(0, 512, 64)
    least = jdynoff.managed(quick(descend(scan_loss)), budget="min").plan(parameters, x)
    step = jdynoff.managed(quick(descend(scan_loss)), budget=least.min_feasible_bytes)
    plan = step.plan(parameters, x)
    assert plan.device_peak_bytes <= least.min_feasible_bytes
    assert difference_in_ulps(quick(descend(scan_loss))(parameters, x), step(parameters, x)) <= 8


@pytest.mark.parametrize("budget", ["8 bananas", "", "-3", 0, -1, True, 1.5, "0GiB", [1]])
def test_a_budget_that_is_no_size_is_refused(budget: Any) -> None:
    with pytest.raises(jdynoff.ConfigurationError):
        jdynoff.managed(lambda x: x, budget=budget)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("500 MB", 500_000_000),
        ("1.5kib", 1536),
        (" 7 ", 7),
        (12, 12),
        ("2TB", 2 * 10**12),
        ("MIN", "min"),
        (None, None),
    ],
)
def test_budgets_are_read_as_people_write_them(text: Any, size: Any) -> None:
    assert parse_budget(text) == size


def test_a_step_with_nothing_to_move_runs_unchanged_and_says_why() -> None:
    step = jdynoff.managed(
        lambda x: jnp.sin(x) @ x.T, budget="min", min_bytes=1, flops_per_byte=0.0
    )
    plan = step.plan(batch())
    assert "nothing to move" in plan.note
    assert plan.offloaded_bytes == plan.pool_bytes == 0
    assert "jdynoff_begin" not in step.lower(batch()).compile().as_text()
    assert same_bits(step(batch()), jax.jit(lambda x: jnp.sin(x) @ x.T)(batch()))
    assert step.stats().bytes_offloaded == 0


def test_a_step_that_fits_says_so() -> None:
    plan = jdynoff.managed(quick(descend(scan_loss)), budget="1GiB").plan(weights(), batch())
    assert "fits without moving anything" in plan.note
    assert plan.min_feasible_bytes <= plan.device_peak_bytes


def test_a_checkpoint_around_everything_is_a_warning_with_its_line() -> None:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = layer(x, parameters)
        return jnp.mean(x**2)

    single = jax.tree.map(lambda leaf: leaf[0], weights())
    outer = jax.checkpoint(loss)
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    step = jdynoff.managed(
        quick(lambda p, x: jax.value_and_grad(lambda p: outer(p, x))(p)),
        budget="min",
        min_bytes=1,
        flops_per_byte=0.0,
    )
    with pytest.warns(UserWarning, match=rf"test_errors\.py:{line}: jax\.checkpoint covers"):
        plan = step.plan(single, batch())
    assert plan.warnings
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(single, batch())  # once is enough


def test_disable_jit_runs_unmanaged_and_warns() -> None:
    step = jdynoff.managed(quick(descend(scan_loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
    with jax.disable_jit(), pytest.warns(UserWarning, match="jax_disable_jit is on"):
        found = step(weights(), batch())
    assert difference_in_ulps(quick(descend(scan_loss))(weights(), batch()), found) <= 8


def test_debug_nans_names_the_output_that_holds_nan() -> None:
    step = jdynoff.managed(quick(descend(scan_loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
    bad = batch() * jnp.nan
    with jax.debug_nans(True):
        good = step(weights(), batch())
        with pytest.raises(FloatingPointError, match=r"output \[0\].*__wrapped__"):
            step(weights(), bad)
    assert bool(jnp.isfinite(good[0]))


def test_export_of_a_managed_step_is_refused() -> None:
    step = jdynoff.managed(quick(descend(scan_loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
    with pytest.raises(jdynoff.TransformError, match="__wrapped__"):
        jax.export.export(step)(weights(), batch())


def test_stats_before_the_first_step_say_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="call it before asking"):
        small_step().stats()


def test_tiers_of_another_type_are_refused() -> None:
    with pytest.raises(jdynoff.ConfigurationError, match="Disk"):
        jdynoff.managed(
            quick(descend(scan_loss)),
            budget="min",
            min_bytes=1,
            flops_per_byte=0.0,
            tiers=["/var/tmp"],
        )(weights(), batch())
