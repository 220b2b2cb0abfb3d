"""What a test needs to know about a small step.

The trap: `ulps` is counted in units of the last place of an output's largest magnitude, not of each
element, since a rewritten program may fuse (and so round) differently where a value is small.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 8
BATCH = 4
DEPTH = 5  # divisible by no unroll factor that is tested

# Compiling dominates these tests; the code that it makes need not be fast.
QUICK_COMPILE = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass(frozen=True)
class Example:
    """A step, its arguments, and how exactly the managed step must agree with plain JAX.

    Attributes:
      name: what the step is an example of.
      step: a function, or one that `jax.jit` has made.
      arguments: makes fresh arguments.
      moves: whether its residuals must reach the manager at budget="min".
      bounded: whether the plan bounds what is moved (a `while` may run any number of times).
      ulps: how many units of the last place may separate it from plain JAX.
    """

    name: str
    step: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    moves: bool = True
    bounded: bool = True
    ulps: float = 8.0


def quick(step: Callable[..., Any], **options: Any) -> Any:
    """`jax.jit` that spends little time on optimising."""
    return jax.jit(step, compiler_options=QUICK_COMPILE, **options)


def normal(seed: int, *shape: int, dtype: Any = jnp.float32, scale: float = 0.5) -> jax.Array:
    """Reproducible normally distributed numbers."""
    numbers = np.random.default_rng(seed).standard_normal(shape) * scale
    return jnp.asarray(numbers, dtype)


def weights(seed: int = 0, depth: int = DEPTH, width: int = WIDTH) -> dict[str, jax.Array]:
    """Stacked weights of `layer`, shape=(depth, width, width)."""
    return {
        "in": normal(seed, depth, width, width),
        "out": normal(seed + 1, depth, width, width),
    }


def filled(init: Callable[..., Any], *arguments: Any, scale: float = 0.3) -> Any:
    """What `init` would return, filled with reproducible positive numbers instead of run.

    Running the initialisers of a library compiles dozens of small programs.
    """
    leaves, structure = jax.tree.flatten(jax.eval_shape(init, *arguments))
    arrays = [
        jnp.abs(normal(seed, *leaf.shape, dtype=leaf.dtype, scale=scale))
        for seed, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, arrays)


def layer(x: jax.Array, weight: dict[str, jax.Array]) -> jax.Array:
    """One residual layer whose backward pass needs several intermediate values."""
    return x + jax.nn.gelu(jnp.tanh(x @ weight["in"])) @ weight["out"]


def batch(seed: int = 7, width: int = WIDTH) -> jax.Array:
    """Activations, shape=(BATCH, width)."""
    return normal(seed, BATCH, width)


def descend(
    loss: Callable[..., jax.Array], learning_rate: float = 0.1
) -> Callable[..., tuple[jax.Array, Any]]:
    """A train step: value and gradient of `loss` in its first argument, and plain SGD."""

    def step(parameters: Any, *rest: Any) -> tuple[jax.Array, Any]:
        value, gradient = jax.value_and_grad(loss)(parameters, *rest)
        new = jax.tree.map(lambda p, g: p - learning_rate * g, parameters, gradient)
        return value, new

    return step


def difference_in_ulps(expected: Any, actual: Any) -> float:
    """Largest difference, in units of the last place of `expected`'s largest magnitude.

    Infinite where structure, shapes, dtypes, weak types or non-finite elements differ.
    """
    if jax.tree.structure(expected) != jax.tree.structure(actual):
        return float("inf")
    worst = 0.0
    for left, right in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        worst = max(worst, _leaf_difference(left, right))
    return worst


def _leaf_difference(left: Any, right: Any) -> float:
    if jax.typeof(left) != jax.typeof(right):  # shape, dtype and weak type
        return float("inf")
    if jnp.issubdtype(left.dtype, jax.dtypes.prng_key):
        left, right = jax.random.key_data(left), jax.random.key_data(right)
    if not jnp.issubdtype(left.dtype, jnp.inexact):
        return 0.0 if np.array_equal(left, right) else float("inf")
    epsilon = float(jnp.finfo(left.dtype).eps)
    wide = np.complex128 if jnp.issubdtype(left.dtype, jnp.complexfloating) else np.float64
    a, b = np.asarray(left).astype(wide), np.asarray(right).astype(wide)
    finite = np.isfinite(a)
    if not np.array_equal(finite, np.isfinite(b)):
        return float("inf")
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    magnitude = np.abs(a[finite]).max()
    error = np.abs(a[finite] - b[finite]).max()
    return 0.0 if error == 0 else float(error / (epsilon * max(magnitude, 1e-30)))


def same_bits(expected: Any, actual: Any) -> bool:
    """Whether two results have the same structure and the same bytes."""
    if jax.tree.structure(expected) != jax.tree.structure(actual):
        return False
    return all(
        a.dtype == b.dtype and _bytes(a) == _bytes(b)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True)
    )


def _bytes(array: Any) -> bytes:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    return np.asarray(array).tobytes()
