"""The train steps that the memory benchmarks measure. Shapes are those of the published table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Step = Callable[..., Any]
Struct = jax.ShapeDtypeStruct

LAYERS, BATCH, WIDTH = 16, 2048, 512
SWITCH_BATCH, SWITCH_WIDTH = 2048, 128
BRANCH_WIDTHS = tuple(256 * number for number in range(1, 9))
_LEARNING_RATE = 0.1


def sgd(loss: Callable[..., jax.Array]) -> Step:
    """Makes a step of value_and_grad and gradient descent from a loss(weights, *batch)."""

    def step(weights: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, *batch)
        return value, jax.tree.map(lambda w, g: w - _LEARNING_RATE * g, weights, grads)

    return step


def _layer(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return x + jax.nn.gelu(jnp.tanh(x @ a) @ b)


def scan_loss(weights: Any, x: jax.Array) -> jax.Array:
    """Residual MLP with its layers in a scan."""
    carried, _ = jax.lax.scan(lambda x, w: (_layer(x, w["a"], w["b"]), None), x, weights)
    return jnp.mean(carried**2)


def unrolled_loss(weights: Any, x: jax.Array) -> jax.Array:
    """The same MLP with its layers in a Python list."""
    for w in weights:
        x = _layer(x, w["a"], w["b"])
    return jnp.mean(x**2)


def switch_loss(weights: Any, x: jax.Array, path: jax.Array) -> jax.Array:
    """One of 8 branches of different widths per iteration of a scan."""

    def branch(number: int) -> Callable[[jax.Array], jax.Array]:
        w = weights[number]
        return lambda x: x + jnp.tanh(x @ w["a"]) @ w["b"]

    branches = [branch(number) for number in range(len(BRANCH_WIDTHS))]
    carried, _ = jax.lax.scan(lambda x, i: (jax.lax.switch(i, branches, x), None), x, path)
    return jnp.mean(carried**2)


def accumulating_step(weights: Any, microbatches: jax.Array) -> Any:
    """Gradient accumulation over microbatches by a scan."""

    def one(total: Any, x: jax.Array) -> Any:
        return jax.tree.map(jnp.add, total, jax.value_and_grad(scan_loss)(weights, x)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights))
    (value, grads), _ = jax.lax.scan(one, zero, microbatches)
    return value, jax.tree.map(lambda w, g: w - _LEARNING_RATE * g, weights, grads)


def two_backward_step(weights: Any, x: jax.Array) -> Any:
    """One forward pass and two backward passes."""

    def outputs(weights: Any) -> Any:
        carried, _ = jax.lax.scan(lambda x, w: (_layer(x, w["a"], w["b"]), None), x, weights)
        return jnp.mean(carried**2), jnp.mean(jnp.sin(carried))

    _, pullback = jax.vjp(outputs, weights)
    return pullback((1.0, 0.0)), pullback((0.0, 1.0))


checkpointed_step = sgd(jax.checkpoint(scan_loss))
"""`jax.checkpoint` around the whole scan."""


def stacked_weights(sharding: Any = None, layers: int = LAYERS) -> dict[str, Struct]:
    """Shapes of the scanned MLP's weights."""
    return {
        name: Struct((layers, WIDTH, WIDTH), jnp.float32, sharding=sharding) for name in ("a", "b")
    }


def listed_weights(sharding: Any = None) -> list[dict[str, Struct]]:
    """Shapes of the unrolled MLP's weights."""
    struct = Struct((WIDTH, WIDTH), jnp.float32, sharding=sharding)
    return [{"a": struct, "b": struct} for _ in range(LAYERS)]


def branch_weights(sharding: Any = None) -> list[dict[str, Struct]]:
    """Shapes of the switch's weights."""
    return [
        {
            "a": Struct((SWITCH_WIDTH, width), jnp.float32, sharding=sharding),
            "b": Struct((width, SWITCH_WIDTH), jnp.float32, sharding=sharding),
        }
        for width in BRANCH_WIDTHS
    ]


def activations(
    batch: int = BATCH,
    width: int = WIDTH,
    leading: tuple[int, ...] = (),
    sharding: Any = None,
) -> Struct:
    """Shape of a step's input."""
    return Struct((*leading, batch, width), jnp.float32, sharding=sharding)


def random_like(structs: Any, seed: int = 0) -> Any:
    """Arrays of the given shapes: normal, scaled down for matrices."""
    leaves, treedef = jax.tree.flatten(structs)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = [
        jax.random.normal(key, leaf.shape, leaf.dtype) * leaf.shape[-2] ** -0.5
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)
