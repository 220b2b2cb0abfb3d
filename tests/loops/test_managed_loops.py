"""Inside a managed step a loop's stacks are on the step's ticket, within its budget."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdynoff
from tests.loops.loops import Counted, normal

WIDTH = 128
MIB = 1 << 20


def cell(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def run_loop(w: jax.Array, x: jax.Array, n: Any) -> jax.Array:
    return jdynoff.while_loop(lambda c: c[1] < n, lambda c: (cell(w, c[0]), c[1] + 1), (x, 0))[0]


def simple(w: jax.Array, x: jax.Array, n: Any) -> jax.Array:
    return jnp.mean(run_loop(w, x, n) ** 2)


def layered(w: jax.Array, x: jax.Array, n: Any) -> jax.Array:
    """A scan of loops whose bodies hold loops, and a branch: the rewrite goes through all."""

    def layer(x: jax.Array, scale: jax.Array) -> Any:
        def outer(c: Any) -> Any:
            return jnp.sin(run_loop(w, c[0] * scale, n // 8)) + c[0], c[1] + 1

        x, _ = jdynoff.while_loop(lambda c: c[1] < 2, outer, (x, 0))
        x = lax.cond(jnp.sum(x) > 0, lambda x: run_loop(w, x, 2), lambda x: x * 0.5, x)
        return jnp.tanh(x @ w), None

    return jnp.mean(lax.scan(layer, x, jnp.array([0.5, 1.0, 2.0]))[0] ** 2)


def step_of(loss: Any) -> Any:
    def step(w: jax.Array, x: jax.Array, n: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x, n)
        return w - 0.1 * gradient, value

    return jax.jit(step)


W, X = normal(0, WIDTH, WIDTH) * 0.1, normal(1, 512, WIDTH)


@pytest.mark.parametrize("loss", [simple, layered])
@pytest.mark.parametrize("budget", ["min", "48MiB"])
def test_a_managed_step_has_the_same_results_within_its_budget(loss: Any, budget: str) -> None:
    plain = jax.block_until_ready(step_of(loss)(W, X, 64))
    managed = jdynoff.managed(step_of(loss), budget=budget)
    with Counted() as counted:
        got = managed(W, X, 64)
        stats = managed.stats()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), got, plain)
    assert counted.frames_popped == counted.frames_pushed > 50
    assert counted.missed == stats.entries_unread == 0
    plan = managed.plan(W, X, 64)
    # It went through this step's ticket, whose pool is a part of the plan.
    assert stats.bytes_offloaded == stats.bytes_reloaded > 8 * MIB
    assert stats.pool_peak_bytes <= plan.pool_bytes
    assert plan.device_peak_bytes == plan.memory.total_bytes + plan.pool_bytes
    if budget == "min":
        assert stats.bytes_written > MIB
    else:
        assert plan.device_peak_bytes <= 48 * MIB


def test_one_compiled_step_gives_the_same_bits_in_memory_and_through_the_disk() -> None:
    small = jdynoff.managed(step_of(simple), budget="min", verify=True)
    large = jdynoff.managed(step_of(simple), budget="1GiB")
    jax.tree.map(np.testing.assert_array_equal, small(W, X, 100), large(W, X, 100))
    assert small.stats().bytes_written > 0
    assert large.stats().bytes_written == 0


def test_the_plan_names_the_loop_and_says_that_no_number_is_known() -> None:
    plan = jdynoff.managed(step_of(simple), budget="min").plan(W, X, 64)
    (site,) = [site for site in plan.sites if "jdynoff.while_loop" in site.reason]
    assert (site.entries, site.action) == (0, "offload")
    assert site.entry_bytes in (2 * X.nbytes, 3 * X.nbytes)  # the state, and what tanh needs
    assert "test_managed_loops.py:" in site.source
    assert "while_loop" in str(plan)


def test_trips_from_none_to_many_run_in_one_plan_and_leave_nothing() -> None:
    managed = jdynoff.managed(step_of(simple), budget="min")
    moved = []
    for n in (0, 1, 50, 3):
        w, _ = managed(W, X, n)
        np.testing.assert_allclose(w, step_of(simple)(W, X, n)[0], rtol=1e-5, atol=1e-7)
        moved.append(managed.stats().bytes_offloaded)
    assert moved == [0, moved[1], 50 * moved[1], 3 * moved[1]]


def test_a_step_without_a_gradient_of_its_loop_moves_nothing() -> None:
    managed = jdynoff.managed(jax.jit(simple), budget="min")
    managed(W, X, 10)
    assert managed.stats().bytes_offloaded == 0


def test_without_a_disk_a_loop_that_is_too_long_says_so_and_the_next_step_works() -> None:
    managed = jdynoff.managed(step_of(simple), budget="min", tiers=[])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"no disk tier.*jdynoff\.Disk"):
        jax.block_until_ready(managed(W, X, 200))
    with pytest.raises(jdynoff.TransferError):
        managed.stats()
    jax.block_until_ready(managed(W, X, 5))


@pytest.mark.parametrize(
    ("fault", "code"),
    [("write_enospc", "disk-full"), ("read_eio", "io"), ("corrupt", "checksum")],
)
def test_a_failing_disk_is_one_exception_and_the_next_step_works(
    manager: Any, fault: str, code: str
) -> None:
    managed = jdynoff.managed(step_of(simple), budget="min", verify=True)
    want = jax.block_until_ready(managed(W, X, 60))
    manager.inject_fault(fault, 0, -1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"\[jdynoff:{code}\]"):
        jax.block_until_ready(managed(W, X, 60))
    manager.inject_fault("none")
    with pytest.raises(jdynoff.TransferError) as caught:
        managed.stats()
    assert caught.value.code == code
    jax.tree.map(np.testing.assert_array_equal, managed(W, X, 60), want)
