"""Steps whose path depends on the data: how many layers run is decided by each batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

LAYERS, ROWS, WIDTH = 16, 1024, 64
Step = Callable[..., Any]


def parameters() -> dict[str, jax.Array]:
    """Weights of the layers."""
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / np.sqrt(WIDTH)
    return {"w": jnp.asarray(weights)}


def batch(depth: int, seed: int = 0) -> dict[str, jax.Array]:
    """A batch with which `growing` runs about `depth` layers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, WIDTH)).astype(np.float32)
    return {"x": jnp.asarray(x * 3.0 / 1.2 ** (depth - 0.5))}


def growing(state: dict[str, jax.Array], batch: dict[str, jax.Array]) -> Any:
    """A step whose layers run until the activations have grown: nobody knows beforehand."""

    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            def run(x: jax.Array) -> jax.Array:
                return 1.2 * x + 0.01 * jnp.tanh(jnp.sin(x @ weight) @ weight)

            return jax.lax.cond(jnp.std(x) < 3.0, run, lambda x: x, x), None

        x, _ = jax.lax.scan(layer, batch["x"], weights["w"])
        return jnp.mean(x**2)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda old, change: old - 0.001 * change, state, gradient), value


def chosen(state: dict[str, jax.Array], batch: dict[str, jax.Array], depth: jax.Array) -> Any:
    """The same with a depth that is an argument: what decides the path is cheap to compute."""

    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        def layer(carry: Any, weight: jax.Array) -> tuple[Any, None]:
            x, number = carry

            def run(x: jax.Array) -> jax.Array:
                return 1.2 * x + 0.01 * jnp.tanh(jnp.sin(x @ weight) @ weight)

            return (jax.lax.cond(number < depth, run, lambda x: x, x), number + 1), None

        (x, _), _ = jax.lax.scan(layer, (batch["x"], 0), weights["w"])
        return jnp.mean(x**2)

    value, gradient = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda old, change: old - 0.001 * change, state, gradient), value
