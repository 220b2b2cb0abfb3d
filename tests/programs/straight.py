"""Python-unrolled layers, random numbers, and arrays of every kind."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.example import (
    DEPTH,
    WIDTH,
    Example,
    batch,
    descend,
    layer,
    normal,
    weights,
)


def _listed_weights(depth: int = DEPTH) -> list[dict[str, jax.Array]]:
    stacked = weights(depth=depth)
    return [jax.tree.map(lambda leaf: leaf[number], stacked) for number in range(depth)]  # noqa: B023


def unrolled_layers() -> Example:
    """A list of layers in a Python loop."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        for weight in parameters:
            x = layer(x, weight)
        return jnp.mean(x**2)

    return Example("unrolled-layers", descend(loss), lambda: (_listed_weights(), batch()))


def unrolled_checkpoints() -> Example:
    """The same with a checkpoint around every layer."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        for weight in parameters:
            x = jax.checkpoint(layer)(x, weight)
        return jnp.mean(x**2)

    return Example("unrolled-checkpoints", descend(loss), lambda: (_listed_weights(), batch()))


def shared_weights() -> Example:
    """One weight used by all layers, and transposed by some."""

    def loss(weight: Any, x: jax.Array) -> jax.Array:
        for number in range(DEPTH):
            into = weight["in"].T if number % 2 else weight["in"]
            x = layer(x, {"in": into, "out": weight["out"]})
        return jnp.mean(x**2)

    return Example(
        "shared-weights", descend(loss), lambda: (_listed_weights()[0], batch()), ulps=32
    )


def scan_between_layers() -> Example:
    """Straight-line layers before, between and after two scans."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        listed, stacked = parameters
        for weight in listed:
            x = layer(x, weight)
        y, _ = lax.scan(lambda x, w: (layer(x, w), None), x, stacked)
        for weight in listed:
            y = layer(y, weight)
        z, _ = lax.scan(lambda x, w: (layer(x, w), None), y, stacked, reverse=True)
        return jnp.mean((x * y + z) ** 2)

    return Example(
        "straight-line-around-scans",
        descend(loss),
        lambda: ((_listed_weights(3), weights()), batch()),
        ulps=32,
    )


def dropout(scanned: bool) -> Example:
    """New-style PRNG keys, split per layer, dropout, and a key that is returned."""

    def step(parameters: Any, key: jax.Array, x: jax.Array) -> Any:
        key, mine = jax.random.split(key)

        def block(x: jax.Array, weight: Any, key: jax.Array) -> jax.Array:
            keep = jax.random.bernoulli(key, 0.7, x.shape)
            return jnp.where(keep, layer(x, weight) / 0.7, 0.0)

        def loss(parameters: Any) -> jax.Array:
            keys = jax.random.split(mine, DEPTH)
            if scanned:
                y, _ = lax.scan(lambda x, i: (block(x, *i), None), x, (parameters, keys))
            else:
                y = x
                for number in range(DEPTH):
                    weight = jax.tree.map(lambda leaf: leaf[number], parameters)  # noqa: B023
                    y = block(y, weight, keys[number])
            return jnp.mean(y**2)

        value, gradient = jax.value_and_grad(loss)(parameters)
        return value, gradient, key

    return Example(
        f"dropout-{'scanned' if scanned else 'unrolled'}",
        step,
        lambda: (weights(), jax.random.key(3), batch()),
        ulps=32,
    )


def carried_key() -> Example:
    """A PRNG key in the carry of a scan, and keys stacked as its results."""

    def step(parameters: Any, key: jax.Array, x: jax.Array) -> Any:
        def loss(parameters: Any) -> tuple[jax.Array, Any]:
            def body(carry: Any, weight: Any) -> tuple[Any, jax.Array]:
                x, key = carry
                key, mine = jax.random.split(key)
                noise = jax.random.normal(mine, x.shape)
                return (layer(x + noise, weight), key), mine

            (y, key_), keys = lax.scan(body, (x, key), parameters)
            return jnp.mean(y**2), (key_, keys)

        return jax.value_and_grad(loss, has_aux=True)(parameters)

    return Example("carried-key", step, lambda: (weights(), jax.random.key(3), batch()), ulps=32)


def mixed_types() -> Example:
    """Residuals of bool, int, bfloat16, float16 and float32 in one scan."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            order = jnp.argsort(x, axis=-1)
            y = jnp.take_along_axis(x, order, axis=-1)
            mask = y > 0
            low = (y.astype(jnp.bfloat16) @ weight["in"].astype(jnp.bfloat16)).astype(jnp.float16)
            z = jnp.sin(low) * jnp.cos(low)
            return x + jnp.where(mask, z.astype(jnp.float32), jnp.exp(-y)) @ weight["out"], None

        x, _ = lax.scan(body, x, parameters)
        return jnp.mean(x**2)

    # bfloat16 steps are 2^16 float32 steps; a different fusion may round one of them differently.
    return Example("mixed-types", descend(loss), lambda: (weights(), batch()), ulps=2**14)


def complex_numbers() -> Example:
    """Complex weights and an FFT.

    The norm of the transform is kept: at larger magnitudes the phases amplify rounding so much that
    two compilations of plain JAX differ by a hundred units in the last place.
    """

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            y = jnp.fft.fft(x @ weight, norm="ortho")
            return y * jnp.exp(1j * jnp.abs(y)) / 4, None

        x, _ = lax.scan(body, x, parameters)
        return jnp.mean(jnp.abs(x) ** 2)

    return Example(
        "complex-numbers",
        descend(loss),
        lambda: (
            normal(1, DEPTH, WIDTH, WIDTH) + 1j * normal(2, DEPTH, WIDTH, WIDTH),
            batch() + 0j,
        ),
        ulps=32,
    )


def eight_bit_floats() -> Example:
    """Activations kept in float8, as quantised training does."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        @jax.custom_vjp
        def squash(x: jax.Array) -> jax.Array:
            return jnp.tanh(x)

        def forward(x: jax.Array) -> tuple[jax.Array, Any]:
            return jnp.tanh(x), (x.astype(jnp.float8_e4m3fn), x.astype(jnp.float8_e5m2))

        def backward(saved: Any, g: jax.Array) -> tuple[jax.Array]:
            fine, coarse = (leaf.astype(jnp.float32) for leaf in saved)
            return (g * (1 - jnp.tanh(fine) * jnp.tanh(coarse)),)

        squash.defvjp(forward, backward)

        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            return x + squash(x @ weight["in"]) @ weight["out"], None

        x, _ = lax.scan(body, x, parameters)
        return jnp.mean(x**2)

    return Example("float8-residuals", descend(loss), lambda: (weights(), batch()), ulps=32)


def small_integers() -> Example:
    """int8 and uint16 values and int4 casts kept for later."""

    def step(x: jax.Array, xs: jax.Array) -> Any:
        def first(x: jax.Array, y: jax.Array) -> Any:
            z = jnp.sort(x + y)
            return z, (
                z.astype(jnp.int8),
                (z * z).astype(jnp.uint16),
                z > 3,
                jnp.cumsum(z).astype(jnp.int16),
            )

        def second(x: jax.Array, saved: Any) -> Any:
            a, b, c, d = saved
            return jnp.where(c, x + a.astype(jnp.int32), x * 3 - b) + d, None

        last, stacks = lax.scan(first, x, xs)
        return lax.scan(second, last, stacks, reverse=True)[0]

    return Example(
        "small-integers",
        step,
        lambda: (jnp.arange(6, dtype=jnp.int32), jnp.arange(30, dtype=jnp.int32).reshape(5, 6)),
    )


def zero_size() -> Example:
    """Arrays without elements among the residuals."""

    def loss(parameters: Any, x: jax.Array, empty: jax.Array) -> jax.Array:
        def body(carry: Any, weight: Any) -> tuple[Any, jax.Array]:
            x, e = carry
            e = jnp.sin(e) * e
            return (layer(x, weight) + e.sum(), e), jnp.cos(e)

        (x, e), es = lax.scan(body, (x, empty), parameters)
        return jnp.mean(x**2) + e.sum() + es.sum()

    return Example(
        "zero-size-arrays", descend(loss), lambda: (weights(), batch(), jnp.zeros((0, 3)))
    )


def convolution() -> Example:
    """Convolutions, pooling and batch statistics."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            y = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            y = (y - y.mean((0, 1, 2))) * lax.rsqrt(y.var((0, 1, 2)) + 1e-3)
            pooled = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")
            return x + jax.nn.relu(pooled), None

        x, _ = lax.scan(body, x, parameters)
        return jnp.mean(x**2)

    return Example(
        "convolutions",
        descend(loss),
        lambda: (normal(1, 3, 3, 3, 2, 2), normal(2, 2, 4, 4, 2)),
        ulps=64,
    )


def attention() -> Example:
    """Masked attention with a softmax over blocks in an inner scan."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        causal = jnp.tril(jnp.ones((6, 6), bool))

        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            q, k, v = jnp.split(x @ weight, 3, axis=-1)
            logits = jnp.where(causal, q @ k.T, -1e9)
            return x + jax.nn.softmax(logits) @ v, None

        x, _ = lax.scan(body, x, parameters)
        return jnp.mean(x**2)

    return Example(
        "attention",
        descend(loss),
        lambda: (normal(1, DEPTH, WIDTH, 3 * WIDTH), normal(2, 6, WIDTH)),
        ulps=32,
    )


def gather_and_scatter() -> Example:
    """An embedding table that is looked up and scattered into."""

    def loss(table: jax.Array, tokens: jax.Array) -> jax.Array:
        def body(x: jax.Array, token: jax.Array) -> tuple[jax.Array, None]:
            row = table[token]
            return jnp.tanh(x * row.sum(0)).at[token].add(row[:, 0]), None

        x, _ = lax.scan(body, jnp.ones(WIDTH), tokens)
        return jnp.sum(x**2)

    return Example(
        "gather-and-scatter",
        descend(loss),
        lambda: (normal(1, WIDTH, WIDTH), jnp.asarray([[1, 2], [7, 7], [0, 3], [5, 5]])),
    )


EXAMPLES = [
    unrolled_layers(),
    unrolled_checkpoints(),
    shared_weights(),
    scan_between_layers(),
    dropout(True),
    dropout(False),
    carried_key(),
    mixed_types(),
    complex_numbers(),
    eight_bit_floats(),
    small_integers(),
    zero_size(),
    convolution(),
    attention(),
    gather_and_scatter(),
]
