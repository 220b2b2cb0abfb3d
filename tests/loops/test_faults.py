"""Outside of managed steps: a failing disk, an exception half way, a gradient never taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdynoff
from jdynoff.runtime.manager import manager_for
from tests.loops.loops import Counted, looped, normal, run, tanh_cell, totals, weights

X = normal(2, 16, 512)
RUNS_KEPT = 16  # of xla_ext/loop_stacks.cc


def loss(x: jax.Array, n: Any) -> jax.Array:
    return jnp.sum(looped(lambda p, x, i: jnp.sin(x * 1.1), None, x, n))


@pytest.fixture
def small_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("JDYNOFF_LOOP_MEMORY", "1MiB")
    jax.clear_caches()
    found = manager_for(None)
    yield found
    found.inject_fault("none")
    jax.clear_caches()


@pytest.mark.parametrize(("fault", "code"), [("write_eio", "io"), ("read_short", "io")])
def test_a_failing_disk_is_one_exception_and_frees_the_stacks(
    small_memory: Any, fault: str, code: str
) -> None:
    step = jax.jit(jax.grad(loss))
    want = jax.block_until_ready(step(X, 200))
    small_memory.inject_fault(fault, 0, -1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"\[jdynoff:{code}\].*JDYNOFF_SPILL_DIR"):
        jax.block_until_ready(step(X, 200))
    assert totals()["live_stacks"] == 0
    small_memory.inject_fault("none")
    np.testing.assert_array_equal(step(X, 200), want)


@pytest.mark.leaves_stacks
@pytest.mark.parametrize("place", ["forwards", "between", "backwards"])
def test_an_exception_in_the_middle_leaves_no_more_than_the_last_few_stacks(place: str) -> None:
    def fail(x: Any) -> Any:
        raise RuntimeError("on purpose")

    def broken(x: jax.Array) -> jax.Array:
        return jax.pure_callback(fail, jax.typeof(x), x, vmap_method="sequential")

    @jax.custom_vjp
    def breaks_backwards(x: jax.Array) -> jax.Array:
        return x

    breaks_backwards.defvjp(lambda x: (x, None), lambda _, ct: (broken(ct),))

    def cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
        if place == "forwards":
            return jnp.sin(lax.cond(i == 3, broken, lambda x: x, lax.stop_gradient(x)) + x)
        return jnp.sin(breaks_backwards(x) if place == "backwards" else x)

    def step(x: jax.Array) -> jax.Array:
        y = looped(cell, None, x, 5)
        return jnp.sum((breaks_backwards(y) if place == "between" else y) ** 2)

    jitted = jax.jit(jax.grad(step))
    before = totals()
    for _ in range(RUNS_KEPT + 8):
        with pytest.raises(jax.errors.JaxRuntimeError, match="on purpose"):
            jax.block_until_ready(jitted(X[0, :4]))
    if place != "backwards":  # which is given up later still: it cannot be computed again
        assert totals()["live_stacks"] <= before["live_stacks"] + RUNS_KEPT + 1
        assert totals()["dropped"] > before["dropped"]
    jax.block_until_ready(jax.jit(jax.grad(loss))(X, 3))


@pytest.mark.leaves_stacks
def test_a_pullback_that_is_never_called_is_given_up_and_one_called_late_still_works() -> None:
    p, x = weights(), normal(1, 2, 8)
    jitted = jax.jit(lambda x: looped(tanh_cell, p, x, 3))
    want = run(jax.grad(lambda x: jnp.sum(looped(tanh_cell, p, x, 3))), x)
    _, late = jax.vjp(jitted, x)
    before = totals()
    for _ in range(3 * RUNS_KEPT):
        jax.block_until_ready(jax.vjp(jitted, x)[0])
    assert totals()["live_stacks"] <= before["live_stacks"] + RUNS_KEPT + 1
    with Counted() as counted:
        np.testing.assert_array_equal(jax.block_until_ready(late(jnp.ones_like(x))[0]), want)
    assert counted.missed == 1


def test_a_backward_branch_that_is_not_taken_keeps_the_stack_no_longer_than_its_run() -> None:
    p, x = weights(), normal(1, 2, 8)

    def step(x: jax.Array, wanted: Any) -> jax.Array:
        y, pullback = jax.vjp(lambda x: looped(tanh_cell, p, x, 3), x)
        return lax.cond(wanted, lambda: pullback(y)[0], lambda: y)

    managed = jdynoff.managed(jax.jit(step), budget="min")
    jax.block_until_ready(managed(x, False))
    assert managed.stats().entries_offloaded == 0  # packed, and freed with the ticket
    jax.block_until_ready(managed(x, True))
