"""What has no meaning is refused, with what to do instead."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jdynoff
from tests.loops.loops import Counted, looped, normal, run, score, tanh_cell, weights

P, X = weights(), normal(1, 2, 8)


def loss(x: jax.Array) -> jax.Array:
    return score(looped(tanh_cell, P, x, 3))


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: jax.jvp(loss, (x,), (x,))[1],
        lambda x: jax.jacfwd(loss)(x),
        lambda x: jax.linearize(loss, x)[1](x),
        lambda x: jax.grad(lambda x: jax.jvp(loss, (x,), (x,))[1])(x),
    ],
    ids=["jvp", "jacfwd", "linearize", "grad of jvp"],
)
def test_forward_mode_is_refused(transform: object) -> None:
    with pytest.raises(jdynoff.TransformError, match=r"forward mode.*jax\.grad"):
        jax.jit(transform)(X)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: jax.grad(lambda x: jnp.sum(jax.grad(loss)(x) ** 2))(x),
        lambda x: jax.jvp(jax.grad(loss), (x,), (x,))[1],
        lambda x: jax.hessian(loss)(x),
    ],
    ids=["grad of grad", "jvp of grad", "hessian"],
)
def test_second_derivatives_are_refused(transform: object) -> None:
    with pytest.raises(jdynoff.TransformError, match=r"differentiated again|Hessian-vector"):
        jax.jit(transform)(X)  # type: ignore[arg-type]


def test_a_gradient_inside_a_function_whose_derivative_stops_there_is_not_refused() -> None:
    def outer(x: jax.Array) -> jax.Array:
        return jnp.sum(lax.stop_gradient(jax.grad(loss)(x)) * x)

    with Counted() as counted:
        got = run(jax.grad(outer), X)
    assert jnp.array_equal(got, jax.jit(jax.grad(loss))(X))
    assert counted.opened == 1


def test_a_predicate_that_differs_between_lanes_is_refused() -> None:
    for transform in (jax.vmap(loss_until), jax.vmap(jax.grad(loss_until))):
        with pytest.raises(jdynoff.TransformError, match=r"differs between the lanes.*lax\.map"):
            jax.jit(transform)(X)


def loss_until(x: jax.Array) -> jax.Array:
    final = jdynoff.while_loop(lambda c: jnp.linalg.norm(c) > 0.1, lambda c: jnp.sin(c) * 0.9, x)
    return jnp.sum(final)


def test_what_the_refusal_proposes_works() -> None:
    mapped = jax.jit(lambda x: lax.map(jax.grad(loss_until), x))(X)

    def whole_batch(x: jax.Array) -> jax.Array:
        def active(x: jax.Array) -> jax.Array:
            return jnp.linalg.norm(x, axis=1, keepdims=True) > 0.1

        final = jdynoff.while_loop(
            lambda x: jnp.any(active(x)), lambda x: jnp.where(active(x), jnp.sin(x) * 0.9, x), x
        )
        return jnp.sum(final)

    assert jnp.allclose(jax.jit(jax.grad(whole_batch))(X), mapped, rtol=1e-5)


def test_a_branch_around_the_loop_that_differs_between_lanes_is_refused() -> None:
    def branching(x: jax.Array) -> jax.Array:
        return lax.cond(
            x[0] > 0,
            lambda x: score(looped(lambda p, x, i: jnp.sin(x), P, x, 2)),
            lambda x: score(x),
            x,
        )

    with pytest.raises(jdynoff.TransformError, match=r"jax\.lax\.cond or jax\.lax\.switch around"):
        jax.jit(jax.vmap(jax.grad(branching)))(X)


def test_a_memory_limit_that_cannot_be_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JDYNOFF_LOOP_MEMORY", "a lot")
    with pytest.raises(jdynoff.ConfigurationError, match=r"JDYNOFF_LOOP_MEMORY is 'a lot'"):
        jax.jit(jax.grad(lambda x: loss(x)))(X)
