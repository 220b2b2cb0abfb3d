"""Values and gradients are those of the unrolled loop, for any body and any number of trips."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jdynoff
from tests.loops.loops import (
    CELLS,
    WIDTH,
    Counted,
    close,
    looped,
    normal,
    score,
    tanh_cell,
    unrolled,
    weights,
)


@pytest.mark.parametrize("name", CELLS)
def test_values_and_gradients_are_those_of_the_unrolled_loop(name: str) -> None:
    cell, p, x = CELLS[name], weights(), normal(5, 3, WIDTH)
    step = jax.jit(jax.value_and_grad(lambda p, x, n: score(looped(cell, p, x, n)), (0, 1)))
    plain = jax.jit(jax.value_and_grad(lambda p, x: score(unrolled(cell, p, x, 4)), (0, 1)))
    for trips, want in ((4, plain(p, x)), (0, (score(x), (zeros(p), jax.grad(score)(x))))):
        with Counted() as counted:
            close(step(p, x, trips), want)
        assert counted.frames_pushed == counted.frames_popped == trips
        assert counted.missed == 0


def zeros(p: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, p)


def test_the_number_of_trips_may_depend_on_what_is_differentiated() -> None:
    def shrink(p: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, n = jdynoff.while_loop(
            lambda c: jnp.linalg.norm(c[0]) > 0.1,
            lambda c: (tanh_cell(p, c[0], 0), c[1] + 1),
            (x, 0),
        )
        return score(x), n

    p, x = {"w": jnp.eye(WIDTH) * 0.8, "b": jnp.zeros(WIDTH)}, normal(1, 4, WIDTH)
    step = jax.jit(jax.grad(shrink, (0, 1), has_aux=True))
    seen = set()
    for scale in (0.01, 1.0, 3.0):
        gradients, trips = step(p, x * scale)
        seen.add(int(trips))
        n = int(trips)
        plain = jax.jit(jax.grad(lambda p, x, n=n: score(unrolled(tanh_cell, p, x, n)), (0, 1)))
        close(gradients, plain(p, x * scale))
    assert len(seen) == 3
    assert 0 in seen


def test_thousands_of_trips_pass_through_a_small_memory_and_the_disk_exactly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = normal(2, 16, 512)

    def step(x: jax.Array, n: Any) -> jax.Array:
        return score(looped(lambda p, x, i: x + 0.01 * jnp.sin(x), None, x, n))

    in_memory = jax.block_until_ready(jax.jit(jax.grad(step))(x, 1500))
    monkeypatch.setenv("JDYNOFF_LOOP_MEMORY", "1MiB")
    jax.clear_caches()
    manager = jdynoff.runtime.manager_for()
    before = manager.totals()["spill_file_bytes"]
    through_the_disk = jax.jit(jax.grad(lambda x, n: step(x, n)))(x, 1500).block_until_ready()
    assert manager.totals()["spill_file_bytes"] >= max(before, 30 << 20)
    np.testing.assert_array_equal(in_memory, through_the_disk)


def test_integer_boolean_and_key_carries_pass_through() -> None:
    def noisy(x: jax.Array, n: Any) -> Any:
        def trip(c: Any) -> Any:
            key, sub = jax.random.split(c["key"])
            x = jnp.where(c["odd"], c["x"] * jax.random.normal(sub, x_shape), jnp.sin(c["x"]))
            return {"x": x, "i": c["i"] + 1, "odd": ~c["odd"], "key": key, "none": None}

        x_shape = x.shape
        init = {"x": x, "i": 0, "odd": False, "key": jax.random.key(4), "none": None}
        return jdynoff.while_loop(lambda c: c["i"] < n, trip, init)

    def plain(x: jax.Array) -> jax.Array:
        key = jax.random.key(4)
        for i in range(5):
            key, sub = jax.random.split(key)
            x = x * jax.random.normal(sub, x.shape) if i % 2 else jnp.sin(x)
        return x

    x = normal(1, 4)
    final = jax.jit(noisy)(x, 5)
    assert int(final["i"]) == 5
    assert bool(final["odd"])
    assert jnp.issubdtype(final["key"].dtype, jax.dtypes.prng_key)
    gradient = jax.jit(jax.grad(lambda x, n: jnp.sum(noisy(x, n)["x"])))(x, 5)
    close(gradient, jax.jit(jax.grad(lambda x: jnp.sum(plain(x))))(x))


def test_keys_and_packed_integers_are_kept_where_a_checkpointed_body_needs_them() -> None:
    def run(x: jax.Array, n: Any) -> jax.Array:
        @jax.checkpoint
        def trip(x: jax.Array, key: jax.Array, small: jax.Array) -> Any:
            key, sub = jax.random.split(key)
            x = jnp.sin(x * jax.random.normal(sub, x.shape)) * small.astype(x.dtype)
            return x, key, jnp.flip(small)

        init = (x, jax.random.key(0), jnp.array([1, 2, 3, -4], jnp.int4), 0)
        final = jdynoff.while_loop(lambda c: c[3] < n, lambda c: (*trip(*c[:3]), c[3] + 1), init)
        return jnp.sum(final[0])

    def plain(x: jax.Array) -> jax.Array:
        key, small = jax.random.key(0), jnp.array([1.0, 2, 3, -4])
        for _ in range(4):
            key, sub = jax.random.split(key)
            x = jnp.sin(x * jax.random.normal(sub, x.shape)) * small
            small = jnp.flip(small)
        return jnp.sum(x)

    x = normal(1, 4)
    close(jax.jit(jax.grad(run))(x, 4), jax.jit(jax.grad(plain))(x))


def test_weak_types_and_captured_arrays_work_as_in_jax() -> None:
    table = np.arange(4.0, dtype=np.float32)

    def power(x: jax.Array, n: Any) -> jax.Array:
        return jdynoff.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * x), (0, 1.0))[1]

    def shifted(x: jax.Array) -> jax.Array:
        return jdynoff.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c * x + table, jnp.ones(4))

    assert float(jax.jit(jax.grad(power))(3.0, 4)) == 4 * 3.0**3
    assert jax.jit(power)(2.0, 5).dtype == jnp.float32
    close(
        jax.jit(jax.grad(lambda x: jnp.sum(shifted(x))))(1.5),
        jax.grad(lambda x: jnp.sum(jnp.ones(4) * x + table))(1.5),
    )


def test_a_wrong_body_gets_jaxs_own_error() -> None:
    with pytest.raises(TypeError, match="carry input and carry output must have"):
        jax.jit(lambda x: jdynoff.while_loop(lambda c: c[0] < 3, lambda c: (c[0], c), (x, x)))(1.0)


def test_values_are_those_of_lax_while_loop_and_nothing_is_kept_without_a_gradient() -> None:
    p, x = weights(), normal(3, 2, WIDTH)
    with Counted() as counted:
        got = jax.jit(lambda x, n: looped(tanh_cell, p, x, n))(x, 9)
        jax.jit(lambda x: jax.vjp(lambda x: looped(tanh_cell, p, x, 4), x)[0])(
            x
        ).block_until_ready()
    want, _ = jax.jit(
        lambda x: lax.while_loop(
            lambda c: c[1] < 9, lambda c: (tanh_cell(p, c[0], 0), c[1] + 1), (x, 0)
        )
    )(x)
    np.testing.assert_array_equal(got, want)
    assert counted.opened == 0


def test_only_what_varies_and_is_needed_is_kept() -> None:
    p, x = weights(), normal(3, 2, WIDTH)

    def kept(function: Any, *arguments: Any) -> list[str]:
        jaxpr = jax.make_jaxpr(jax.grad(function))(*arguments)
        (loop,) = [e for e in jaxpr.eqns if e.primitive.name == "jdynoff_while_forward"]
        return [str(aval) for aval in loop.params["trip"].kept_avals]

    # The state and tanh's slope; not the weights, nor their transposes and casts.
    state = f"float32[2,{WIDTH}]"
    assert kept(lambda p: score(looped(tanh_cell, p, x, 3)), p) == [state, state]
    assert len(kept(lambda p: score(looped(CELLS["jitted"], p, x, 3)), p)) == 2
    # The weights have no gradient here, so the state is not needed.
    assert kept(lambda x: score(looped(tanh_cell, p, x, 3)), x) == [state]

    # A linear body needs nothing at all.
    def linear(x: jax.Array) -> jax.Array:
        return score(looped(lambda p, x, i: x @ p["w"], p, x, 3))

    assert kept(linear, x) == []
    with Counted() as counted:
        close(
            jax.jit(jax.grad(linear))(x),
            jax.jit(jax.grad(lambda x: score(unrolled(lambda p, x, i: x @ p["w"], p, x, 3))))(x),
        )
    assert counted.opened == 0
    # A checkpointed body keeps the state only.
    assert kept(lambda p: score(looped(CELLS["checkpointed"], p, x, 3)), p) == [state]


@pytest.mark.parametrize("seed", range(5))
def test_random_loops_in_random_places(seed: int) -> None:
    """One or two loops, each plain, in a scan, in a branch or under a checkpoint."""
    random = np.random.default_rng(seed)
    names = sorted(CELLS)
    plan = [
        (str(random.choice(names)), int(random.integers(4)), int(random.integers(4)))
        for _ in range(int(random.integers(1, 3)))
    ]

    def network(run: Any, p: Any, x: jax.Array, counts: Any) -> jax.Array:
        for (name, place, _), n in zip(plan, counts, strict=True):

            def once(x: jax.Array, n: Any = n, name: str = name) -> jax.Array:
                return run(CELLS[name], p, x, n)

            if place == 1:
                x, _ = lax.scan(lambda x, s: (once(x * s), None), x, jnp.array([1.0, 0.5, 2.0]))
            elif place == 2:
                x = lax.cond(jnp.sum(x) > 0, once, lambda x: x * 2, x)
            elif place == 3:
                x = jax.checkpoint(once)(x)
            else:
                x = once(x)
        return score(x)

    counts = [trips for *_, trips in plan]
    p, x = weights(seed), normal(seed + 10, 2, WIDTH)
    got = jax.jit(jax.value_and_grad(lambda *a: network(looped, *a), (0, 1)))(p, x, counts)
    want = jax.jit(jax.value_and_grad(lambda p, x: network(unrolled, p, x, counts), (0, 1)))(p, x)
    close(got, want, ulp=64)
