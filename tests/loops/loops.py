"""Loops to differentiate, each beside the same trips unrolled in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jdynoff
from jdynoff import _native

WIDTH = 8


def normal(seed: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def weights(seed: int = 0) -> dict[str, jax.Array]:
    return {"w": normal(seed, WIDTH, WIDTH) * 0.4, "b": normal(seed + 1, WIDTH) * 0.1}


def tanh_cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
    return jnp.tanh(x @ p["w"] + p["b"])


def gated_cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
    gate = jax.nn.sigmoid(x @ p["w"])
    return jnp.where(i % 2 == 0, gate * x, x) + jax.nn.relu(p["b"])


def random_cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), i), 0.8, x.shape)
    return jnp.where(keep, jnp.sin(x @ p["w"]), 0) + p["b"]


def scanned_cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
    x, _ = lax.scan(lambda x, row: (jnp.tanh(x * row + p["b"]), None), x, p["w"])
    return x


def branching_cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
    return lax.cond(i % 2 == 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x * p["b"] + x, x)


def checkpointed_cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
    return jax.checkpoint(lambda p, x: jnp.tanh(jnp.cos(x @ p["w"]) + p["b"]))(p, x)


def jitted_cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
    return jax.jit(lambda p, x: jnp.tanh(x @ jnp.tril(p["w"]).T) + p["b"])(p, x)


def half_cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
    return jnp.tanh(x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(x.dtype) + p["b"]


def indexed_cell(p: Any, x: jax.Array, i: Any) -> jax.Array:
    return x.at[:, i % WIDTH].add(jnp.take(p["b"], i % WIDTH)) * 0.9 + lax.top_k(x, WIDTH)[0] * 0.1


CELLS: dict[str, Callable[..., jax.Array]] = {
    cell.__name__.removesuffix("_cell"): cell
    for cell in (
        tanh_cell,
        gated_cell,
        random_cell,
        scanned_cell,
        branching_cell,
        checkpointed_cell,
        jitted_cell,
        half_cell,
        indexed_cell,
    )
}


def looped(cell: Callable[..., jax.Array], p: Any, x: jax.Array, trips: Any) -> jax.Array:
    """The cell, `trips` times; `trips` is data."""
    final, _ = jdynoff.while_loop(
        lambda c: c[1] < trips, lambda c: (cell(p, c[0], c[1]), c[1] + 1), (x, 0)
    )
    return final


def unrolled(cell: Callable[..., jax.Array], p: Any, x: jax.Array, trips: int) -> jax.Array:
    for i in range(trips):
        x = cell(p, x, i)
    return x


def score(x: jax.Array) -> jax.Array:
    return jnp.sum(x * jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape))


def close(a: Any, b: Any, ulp: int = 16) -> None:
    """Equal up to a few units in the last place of the largest element of each array.

    Programs of which one is unrolled fuse differently; the transport itself is exact.
    """
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        left, right = np.asarray(left), np.asarray(right)
        assert left.dtype == right.dtype
        tolerance = ulp * np.finfo(left.dtype).eps * max(float(np.max(np.abs(right))), 1e-30)
        np.testing.assert_allclose(left, right, rtol=0, atol=tolerance)


def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """Jits, calls and waits: what the stacks did is counted when the run is over."""
    return jax.block_until_ready(jax.jit(function)(*arguments))


def totals() -> dict[str, int]:
    return _native.loop_totals()


class Counted:
    """What the stacks did in a block of a test."""

    def __enter__(self) -> Counted:
        self.before = totals()
        return self

    def __exit__(self, *_: object) -> None:
        after = totals()
        for name in ("opened", "frames_pushed", "frames_popped", "dropped", "missed"):
            setattr(self, name, after[name] - self.before[name])

    opened: int
    frames_pushed: int
    frames_popped: int
    dropped: int
    missed: int
