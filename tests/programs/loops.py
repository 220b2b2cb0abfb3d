"""Scans, loops and maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.example import (
    BATCH,
    DEPTH,
    WIDTH,
    Example,
    batch,
    descend,
    layer,
    normal,
    weights,
)


def scanned_layers(unroll: int | bool, reverse: bool) -> Example:
    """Layers in a scan."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            return layer(x, weight), None

        x, _ = lax.scan(body, x, parameters, unroll=unroll, reverse=reverse)
        return jnp.mean(x**2)

    direction = "reversed" if reverse else "forward"
    return Example(f"{direction}-scan-unroll-{unroll}", descend(loss), lambda: (weights(), batch()))


def residuals_of_slices(unroll: int | bool, reverse: bool = False) -> Example:
    """A scan whose residuals depend on `xs` alone: nothing in the carry orders its iterations."""

    def loss(scale: jax.Array, xs: jax.Array) -> jax.Array:
        def body(total: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jnp.sin(x * scale) @ x
            return total + jnp.tanh(y @ x).sum(), jnp.exp(-(y**2))

        total, ys = lax.scan(body, jnp.zeros(()), xs, unroll=unroll, reverse=reverse)
        return total + ys.mean()

    return Example(
        f"residuals-of-slices-unroll-{unroll}{'-reversed' if reverse else ''}",
        descend(loss),
        lambda: (normal(1, WIDTH), normal(2, 7, WIDTH, WIDTH)),
    )


def nested_scan(unroll: int, reverse: bool) -> Example:
    """Scan of scans."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def inner(x: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
            y = layer(x, weight)
            return y, jnp.sin(y).sum()

        def outer(x: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
            y, sums = lax.scan(inner, jnp.cos(x), weight, unroll=unroll, reverse=reverse)
            return y + x, sums.prod()

        x, products = lax.scan(outer, x, parameters)
        return jnp.mean(x**2) + products.sum()

    def arguments() -> tuple[Any, ...]:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(weights(s) for s in range(3)))
        return stacked, batch()

    direction = "-reversed" if reverse else ""
    return Example(f"nested-scan-unroll-{unroll}{direction}", descend(loss), arguments)


def triple_scan() -> Example:
    """Three scans inside one another, the middle one reversed and unrolled."""

    def loss(scale: jax.Array, x: jax.Array) -> jax.Array:
        def innermost(x: jax.Array, s: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(x * s) + x, None

        def middle(x: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, _ = lax.scan(innermost, x, s)
            return y, jnp.tanh(y) * x

        def outer(x: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, ys = lax.scan(middle, x, s, reverse=True, unroll=2)
            return y * 0.5, ys.sum(0)

        x, ys = lax.scan(outer, x, scale)
        return x.sum() + (ys**2).mean()

    return Example(
        "triple-scan", descend(loss), lambda: (normal(1, 2, 3, 4, WIDTH), normal(2, WIDTH))
    )


def two_scans_in_a_row() -> Example:
    """The second scan reads what the first one stacked, forwards: first in, first out."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def first(x: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
            y = layer(x, weight)
            return y, jnp.sin(y)

        def second(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            skip, weight = inputs
            return layer(x + skip, weight), None

        x, skips = lax.scan(first, x, parameters)
        x, _ = lax.scan(second, x, (skips, parameters))
        return jnp.mean(x**2)

    return Example("residual-read-by-a-later-forward-scan", descend(loss), _plain_arguments)


def u_net() -> Example:
    """The second scan reads what the first one stacked, backwards."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def down(x: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
            y = layer(x, weight)
            return y, y

        def up(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            skip, weight = inputs
            return layer(x * skip, weight), None

        x, skips = lax.scan(down, x, parameters)
        x, _ = lax.scan(up, x, (skips, parameters), reverse=True)
        return jnp.mean(x**2)

    return Example("u-net", descend(loss), _plain_arguments)


def stack_read_three_times() -> Example:
    """One stack that two scans and the output's sum read."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def first(x: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
            y = layer(x, weight)
            return y, jnp.cos(y)

        def fold(x: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(x + y), None

        x, ys = lax.scan(first, x, parameters)
        a, _ = lax.scan(fold, x, ys)
        b, _ = lax.scan(fold, x, ys, reverse=True, unroll=2)
        return jnp.mean(a * b) + ys.sum()

    return Example("stack-read-by-two-scans-and-a-sum", descend(loss), _plain_arguments)


def residual_is_output() -> Example:
    """The stacked activations are residuals, and returned as well."""

    def step(parameters: Any, x: jax.Array) -> Any:
        def loss(parameters: Any) -> tuple[jax.Array, jax.Array]:
            def body(x: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
                hidden = jnp.tanh(x @ weight["in"])
                return x + jnp.sin(hidden @ weight["out"]), hidden

            x_last, hiddens = lax.scan(body, x, parameters)
            return jnp.mean(x_last**2), hiddens

        (value, hiddens), gradient = jax.value_and_grad(loss, has_aux=True)(parameters)
        return value, hiddens, gradient

    return Example("residual-is-an-output", step, _plain_arguments)


def mapped() -> Example:
    """`lax.map`, with and without batches."""

    def loss(parameters: Any, xs: jax.Array) -> jax.Array:
        def one(x: jax.Array) -> jax.Array:
            weight = jax.tree.map(lambda leaf: leaf[0], parameters)
            return jnp.sin(layer(x, weight)).sum()

        return lax.map(one, xs).sum() + lax.map(one, xs, batch_size=2).prod()

    return Example("map", descend(loss), lambda: (weights(), normal(3, 5, BATCH, WIDTH)))


def associative() -> Example:
    """`lax.associative_scan` of a gated recurrence, with a scan around it."""

    def combine(a: Any, b: Any) -> Any:
        return a[0] * b[0], b[0] * a[1] + b[1]

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            gate = jax.nn.sigmoid(x @ weight["in"])
            _, y = lax.associative_scan(combine, (gate, jnp.sin(x @ weight["out"])))
            return x + y, None

        x, _ = lax.scan(body, x, parameters)
        return jnp.mean(x**2)

    return Example("associative-scan", descend(loss), lambda: (weights(), normal(3, 6, WIDTH)))


def while_in_forward() -> Example:
    """A `while_loop` between layers; its result is not differentiated through."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            y = layer(x, weight)
            scale = lax.while_loop(
                lambda s: s > 1.0, lambda s: s * 0.5, lax.stop_gradient(jnp.abs(y).max() * 8)
            )
            return y * scale, None

        x, _ = lax.scan(body, x, parameters)
        return jnp.mean(x**2)

    return Example("while-loop-in-forward", descend(loss), _plain_arguments)


def fori_static() -> Example:
    """`fori_loop` with static bounds is a scan, and can be differentiated."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(number: jax.Array, x: jax.Array) -> jax.Array:
            return layer(x, jax.tree.map(lambda leaf: leaf[number], parameters))

        return jnp.mean(lax.fori_loop(0, DEPTH, body, x) ** 2)

    return Example("fori-loop-static-bounds", descend(loss), _plain_arguments)


def fori_dynamic() -> Example:
    """A whole train step inside a loop with a trip count that is data."""
    inner = descend(_scan_loss)

    def step(parameters: Any, x: jax.Array, count: jax.Array) -> Any:
        def body(number: jax.Array, carry: Any) -> Any:
            _, parameters = carry
            return inner(parameters, x * (1 + number))

        return lax.fori_loop(0, count, body, (jnp.zeros(()), parameters))

    return Example(
        "train-step-in-a-while-loop",
        step,
        lambda: (weights(), batch(), jnp.asarray(3, jnp.int32)),
        bounded=False,
    )


def accumulated(unroll: int) -> Example:
    """Gradients of microbatches, added up by a scan."""

    def step(parameters: Any, xs: jax.Array) -> Any:
        def microbatch(total: Any, x: jax.Array) -> tuple[Any, None]:
            found = jax.value_and_grad(_scan_loss)(parameters, x)
            return jax.tree.map(jnp.add, total, found), None

        start = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, parameters))
        (value, gradient), _ = lax.scan(microbatch, start, xs, unroll=unroll)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient)

    return Example(
        f"gradient-accumulation-unroll-{unroll}",
        step,
        lambda: (weights(), normal(3, 3, BATCH, WIDTH)),
    )


def two_backwards() -> Example:
    """One forward pass, two backward passes: every residual is read twice."""

    def step(parameters: Any, x: jax.Array) -> Any:
        def forward(parameters: Any) -> tuple[jax.Array, jax.Array]:
            y, _ = lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
            return jnp.mean(y**2), jnp.mean(jnp.sin(y))

        values, pull = jax.vjp(forward, parameters)
        return values, pull((1.0, 0.0)), pull((0.0, 1.0))

    return Example("one-forward-two-backwards", step, _plain_arguments)


def empty_scan() -> Example:
    """Scans of length 0 and 1."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        none = jax.tree.map(lambda leaf: leaf[:0], parameters)
        one = jax.tree.map(lambda leaf: leaf[:1], parameters)
        for some in (none, one, parameters):
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, some)
        return jnp.mean(x**2)

    return Example("scans-of-length-0-and-1", descend(loss), _plain_arguments)


def carried_twice() -> Example:
    """A scan with several carries, one passed through, and a constant captured from outside."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        bias = jnp.sin(x)

        def body(carry: Any, weight: Any) -> tuple[Any, Any]:
            x, same, total = carry
            y = layer(x, weight) + bias
            return (y, same, total + y.sum()), (same * y, 1.0)

        (x, same, total), (products, ones) = lax.scan(body, (x, x, 0.0), parameters)
        return jnp.mean(x * same) + total * products.mean() * ones.sum()

    return Example("several-carries", descend(loss), _plain_arguments)


def _scan_loss(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
    return jnp.mean(x**2)


def _plain_arguments() -> tuple[Any, ...]:
    return weights(), batch()


def _all() -> list[Example]:
    makers: list[Callable[[], Example]] = [
        triple_scan,
        two_scans_in_a_row,
        u_net,
        stack_read_three_times,
        residual_is_output,
        mapped,
        associative,
        while_in_forward,
        fori_static,
        fori_dynamic,
        two_backwards,
        empty_scan,
        carried_twice,
    ]
    return [
        *(
            scanned_layers(unroll, reverse)
            for unroll in (1, 2, 3, True)
            for reverse in (False, True)
        ),
        *(residuals_of_slices(unroll) for unroll in (1, 2, 3, True)),
        residuals_of_slices(2, reverse=True),
        nested_scan(1, False),
        nested_scan(2, True),
        nested_scan(3, False),
        accumulated(1),
        accumulated(2),
        *(make() for make in makers),
    ]


EXAMPLES = _all()
