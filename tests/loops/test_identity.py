"""A stack belongs to one execution of a loop, wherever the program has put it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdynoff
from tests.loops.loops import (
    WIDTH,
    Counted,
    close,
    looped,
    normal,
    run,
    score,
    tanh_cell,
    unrolled,
    weights,
)

P, X = weights(), normal(1, 2, WIDTH)


def same(build: Any, *, ulp: int = 32, missed: int = 0) -> None:
    """`build(loop)` is a function of (p, x); with loops and unrolled it must have one gradient."""
    with Counted() as counted:
        got = run(jax.value_and_grad(build(looped), (0, 1)), P, X)
        close(got, jax.jit(jax.value_and_grad(build(unrolled), (0, 1)))(P, X), ulp)
    # Not what was dropped meanwhile: that may be a stack that an earlier test left.
    assert counted.missed == missed


def test_one_jitted_function_called_twice() -> None:
    def build(loop: Any) -> Any:
        def call(p: Any, x: jax.Array, n: Any) -> jax.Array:
            return loop(tanh_cell, p, x, n)

        jitted = jax.jit(call, static_argnums=() if loop is looped else 2)
        return lambda p, x: score(jitted(p, x, 3)) + score(jitted(p, jitted(p, x, 2) * 3, 3))

    same(build)


def test_equal_calls_on_equal_operands() -> None:
    same(
        lambda loop: lambda p, x: score(loop(tanh_cell, p, x, 3)) * score(loop(tanh_cell, p, x, 3))
    )


@pytest.mark.parametrize(("unroll", "reverse"), [(1, True), (2, False), (True, True)])
def test_in_a_scan_that_may_be_unrolled(unroll: int | bool, reverse: bool) -> None:
    def build(loop: Any) -> Any:
        def loss(p: Any, x: jax.Array) -> jax.Array:
            def iteration(x: jax.Array, s: jax.Array) -> Any:
                first = loop(tanh_cell, p, x * s, 2)
                return first + loop(tanh_cell, p, x + s, 3), score(first)

            x, ys = lax.scan(iteration, x, jnp.arange(3.0), reverse=reverse, unroll=unroll)
            return score(x) + jnp.sum(ys)

        return loss

    same(build)


def test_trip_counts_that_differ_in_a_scan() -> None:
    counts = jnp.array([3, 0, 1, 5])

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return score(lax.scan(lambda x, n: (looped(tanh_cell, p, x, n), None), x, counts)[0])

    want = jax.jit(jax.grad(lambda p: score(unrolled(tanh_cell, p, X, 9))))(P)
    close(jax.jit(jax.grad(loss))(P, X), want)


def test_in_a_nested_loop() -> None:
    def nested(loop: Any) -> Any:
        def cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
            inner = loop(tanh_cell, p, x, i % 2 + 1)
            return jnp.tanh(inner + x) + loop(tanh_cell, p, x * 0.5, 1)

        return lambda p, x: score(loop(cell, p, x, 3))

    same(nested)


def test_a_loop_that_does_not_vary_in_a_scan_runs_forwards_once() -> None:
    # JAX hoists it out of the scan; the backward passes after the first compute it again.
    def build(loop: Any) -> Any:
        def loss(p: Any, x: jax.Array) -> jax.Array:
            def iteration(y: jax.Array, s: jax.Array) -> Any:
                return y * jnp.sin(loop(tanh_cell, p, x, 3) * s), None

            return score(lax.scan(iteration, jnp.ones_like(x), jnp.arange(1.0, 5.0))[0])

        return loss

    with Counted() as counted:
        got = run(jax.grad(build(looped)), P, X)
    close(got, jax.jit(jax.grad(build(unrolled)))(P, X), 32)
    assert counted.frames_popped == 4 * 3


def test_in_a_branch_that_is_taken_or_not() -> None:
    def loss(p: Any, x: jax.Array, taken: Any, n: Any, loop: Any = looped) -> jax.Array:
        x = lax.cond(taken, lambda x: loop(tanh_cell, p, x, n), lambda x: x * p["b"], x)
        return score(
            lax.switch(
                jnp.int32(taken) + 1, [lambda x: x] * 2 + [lambda x: loop(tanh_cell, p, x, n)], x
            )
        )

    step = jax.jit(jax.grad(loss))
    for taken in (True, False):
        with Counted() as counted:
            got = jax.block_until_ready(step(P, X, taken, 3))
        want = jax.jit(jax.grad(lambda p, t=taken: loss(p, X, t, 3, unrolled)))(P)
        close(got, want)
        assert counted.opened == 2 * taken


def test_two_backward_passes_over_one_forward_pass() -> None:
    def twice(loop: Any) -> Any:
        def step(p: Any, x: jax.Array) -> Any:
            _, pullback = jax.vjp(lambda p, x: loop(tanh_cell, p, x, 3), p, x)
            return pullback(jnp.ones_like(x)), pullback(jnp.cos(x))

        return run(step, P, X)

    with Counted() as counted:
        got = twice(looped)
    close(got, twice(unrolled))
    assert (counted.missed, counted.frames_popped) == (1, 6)


def test_jacrev_reads_one_stack_for_all_rows() -> None:
    with Counted() as counted:
        got = run(jax.jacrev(lambda x: looped(tanh_cell, P, x, 3)), X)
    close(got, jax.jit(jax.jacrev(lambda x: unrolled(tanh_cell, P, x, 3)))(X))
    assert (counted.opened, counted.frames_popped) == (1, 3)


@pytest.mark.parametrize("order", ["vmap(grad)", "grad(vmap)", "vmap(vmap(grad))"])
def test_vmap_with_one_predicate_for_all_lanes(order: str) -> None:
    xs = normal(4, 3, 2, WIDTH)

    def build(loop: Any) -> Any:
        def loss(p: Any, x: jax.Array) -> jax.Array:
            return score(loop(tanh_cell, p, x, 3))

        if order == "vmap(grad)":
            return jax.vmap(jax.grad(loss), (None, 0))(P, xs)
        if order == "grad(vmap)":
            return jax.grad(lambda p: jnp.sum(jax.vmap(lambda x: loss(p, x))(xs)))(P)
        scaled = jax.tree.map(lambda w: w * jnp.arange(1.0, 3.0).reshape(2, *[1] * w.ndim), P)
        return jax.vmap(lambda p: jax.vmap(jax.grad(loss, 1), (None, 0))(p, xs))(scaled)

    with Counted() as counted:
        got = run(lambda: build(looped))
    close(got, jax.jit(lambda: build(unrolled))(), 32)
    assert (counted.opened, counted.missed) == (1, 0)


@pytest.mark.parametrize("policy", [None, "everything_saveable", "dots_saveable"])
def test_checkpoint_around_the_loop(policy: str | None) -> None:
    chosen = None if policy is None else getattr(jax.checkpoint_policies, policy)

    def build(loop: Any) -> Any:
        @jax.checkpoint if policy is None else lambda f: jax.checkpoint(f, policy=chosen)
        def block(p: Any, x: jax.Array) -> jax.Array:
            return jnp.sin(loop(tanh_cell, p, x, 3))

        return lambda p, x: score(block(p, block(p, x)))

    same(build)


def test_without_jit_and_with_jit_inside_grad() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return score(looped(tanh_cell, p, x, 3))

    want = jax.jit(jax.grad(lambda p, x: score(unrolled(tanh_cell, p, x, 3))))(P, X)
    with Counted() as counted:
        close(jax.grad(loss)(P, X), want)
        close(jax.grad(jax.jit(loss))(P, X), want)
        _, pullback = jax.vjp(jax.jit(loss), P, X)
        close(pullback(1.0)[0], want)
        close(pullback(2.0)[0], jax.tree.map(lambda g: 2 * g, want))
    assert counted.missed == 1
    with jax.disable_jit():
        close(
            jax.grad(lambda x: score(looped(tanh_cell, P, x, 2)))(X),
            jax.grad(lambda x: score(unrolled(tanh_cell, P, x, 2)))(X),
        )


def test_the_same_step_again_and_again_gives_the_same_bits_and_does_not_grow() -> None:
    step = jax.jit(jax.grad(lambda p, x, n: score(looped(tanh_cell, p, x, n))))
    first = step(P, X, 50)
    for trips in [50, 3, 0, 50] * 50:
        last = step(P, X, trips)
    jax.tree.map(np.testing.assert_array_equal, first, last)
    manager = jdynoff.runtime.manager_for()
    assert manager.totals()["live_entries"] == 0
