"""Conditionals, alone and inside loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.example import DEPTH, Example, batch, descend, layer, normal, weights


def _choices(depth: int = DEPTH, branches: int = 3) -> jax.Array:
    return (jnp.arange(depth) * 2) % branches


def switch_in_scan(unroll: int) -> Example:
    """A scan that switches between branches with unlike residuals."""

    def loss(parameters: Any, x: jax.Array, choices: jax.Array) -> jax.Array:
        def body(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            choice, weight = inputs
            branches: list[Callable[[jax.Array], jax.Array]] = [
                lambda x: layer(x, weight),
                lambda x: jnp.sin(x @ weight["in"]),
                lambda x: x,
            ]
            return lax.switch(choice, branches, x), None

        x, _ = lax.scan(body, x, (choices, parameters), unroll=unroll)
        return jnp.mean(x**2)

    return Example(
        f"switch-in-scan-unroll-{unroll}",
        descend(loss),
        lambda: (weights(), batch(), _choices()),
    )


def wide_branches() -> Example:
    """Branches of different widths: residuals of one branch do not exist in the others."""

    def loss(parameters: Any, x: jax.Array, choices: jax.Array) -> jax.Array:
        def branch(number: int) -> Callable[[jax.Array], jax.Array]:
            into, out = parameters[number]
            return lambda x: x + jax.nn.gelu(jnp.tanh(x @ into)) @ out

        branches = [branch(number) for number in range(len(parameters))]
        x, _ = lax.scan(lambda x, c: (lax.switch(c, branches, x), None), x, choices)
        return jnp.mean(x**2)

    def arguments() -> tuple[Any, ...]:
        widths = (3, 16, 5)
        parameters = [
            (normal(number, 8, width), normal(number + 9, width, 8))
            for number, width in enumerate(widths)
        ]
        return parameters, batch(), _choices()

    return Example("branches-of-different-widths", descend(loss), arguments)


def computed_predicate() -> Example:
    """The predicate is made inside the loop's body, so it is a residual too."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            return lax.cond(x.sum() > 0, lambda x: layer(x, weight), jnp.cos, x), None

        x, _ = lax.scan(body, x, parameters)
        return jnp.mean(x**2)

    return Example("predicate-computed-in-the-loop", descend(loss), _plain_arguments)


def scan_in_branch() -> Example:
    """A cond whose branches hold scans of different lengths."""

    def loss(parameters: Any, x: jax.Array, deep: jax.Array) -> jax.Array:
        def run(x: jax.Array, count: int) -> jax.Array:
            some = jax.tree.map(lambda leaf: leaf[:count], parameters)
            return lax.scan(lambda x, w: (layer(x, w), None), x, some)[0]

        y = lax.cond(deep, lambda x: run(x, DEPTH), lambda x: run(x, 2), x)
        return jnp.mean(y**2)

    return Example("cond-of-scan", descend(loss), lambda: (weights(), batch(), jnp.asarray(True)))


def cond_in_cond_in_scan() -> Example:
    """Nested conditionals in a reversed scan."""

    def loss(parameters: Any, x: jax.Array, choices: jax.Array) -> jax.Array:
        def body(x: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
            choice, weight = inputs

            def inner(x: jax.Array) -> jax.Array:
                return lax.cond(choice > 1, lambda x: layer(x, weight), jnp.sin, x @ weight["in"])

            y = lax.cond(choice > 0, inner, lambda x: jnp.exp(-(x**2)), x)
            return y + x, jnp.tanh(y).sum()

        x, sums = lax.scan(body, x, (choices, parameters), reverse=True)
        return jnp.mean(x**2) + sums.prod()

    return Example("cond-in-cond-in-scan", descend(loss), lambda: (weights(), batch(), _choices()))


def scan_in_switch_in_scan() -> Example:
    """Depth chosen per outer iteration: scans inside branches inside a scan."""

    def loss(parameters: Any, x: jax.Array, choices: jax.Array) -> jax.Array:
        def deep(x: jax.Array, weight: Any) -> jax.Array:
            return lax.scan(lambda x, _: (layer(x, weight), None), x, None, length=3)[0]

        def body(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            choice, weight = inputs
            return (
                lax.switch(
                    choice,
                    [lambda x: deep(x, weight), lambda x: jnp.sin(x), lambda x: layer(x, weight)],
                    x,
                ),
                None,
            )

        x, _ = lax.scan(body, x, (choices, parameters))
        return jnp.mean(x**2)

    return Example(
        "scan-in-switch-in-scan", descend(loss), lambda: (weights(), batch(), _choices())
    )


def repeated_cond() -> Example:
    """The same predicate twice in straight-line code, and two backward passes of one cond."""

    def step(parameters: Any, x: jax.Array, flag: jax.Array) -> Any:
        first = jax.tree.map(lambda leaf: leaf[0], parameters)

        def forward(weight: Any) -> tuple[jax.Array, jax.Array]:
            y = lax.cond(flag, lambda x: layer(x, weight), lambda x: x @ weight["in"], x)
            z = lax.cond(flag, lambda y: layer(y, weight), lambda y: jnp.sin(y), y)
            return y.sum(), (z**2).mean()

        values, pull = jax.vjp(forward, first)
        return values, pull((1.0, 0.0)), pull((0.5, 2.0))

    # Whether anything moves depends on how far apart the uses are; exactness is the claim.
    return Example(
        "cond-with-two-backwards",
        step,
        lambda: (weights(), batch(), jnp.asarray(True)),
        moves=False,
    )


def opposite_predicates() -> Example:
    """Conds on a predicate and on its negation must not be taken for each other."""

    def loss(parameters: Any, x: jax.Array, flags: jax.Array) -> jax.Array:
        def body(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            flag, weight = inputs
            y = lax.cond(flag, lambda x: layer(x, weight), lambda x: x @ weight["in"], x)
            z = lax.cond(jnp.logical_not(flag), lambda y: layer(y, weight), lambda y: jnp.sin(y), y)
            return z, None

        x, _ = lax.scan(body, x, (flags, parameters))
        return jnp.mean(x**2)

    return Example(
        "opposite-predicates",
        descend(loss),
        lambda: (weights(), batch(), jnp.arange(DEPTH) % 2 == 0),
    )


def dead_branch() -> Example:
    """A switch whose index is clamped: out of range on both sides."""

    def loss(parameters: Any, x: jax.Array, choices: jax.Array) -> jax.Array:
        def body(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            choice, weight = inputs
            return lax.switch(choice, [lambda x: layer(x, weight), jnp.sin], x), None

        x, _ = lax.scan(body, x, (choices, parameters))
        return jnp.mean(x**2)

    return Example(
        "switch-index-out-of-range",
        descend(loss),
        lambda: (weights(), batch(), jnp.asarray([-3, 9, 0, 1, 77])),
    )


def constants_of_branches() -> Example:
    """Branches that return different constants, read by a later cond on the same predicate."""

    def step(x: jax.Array, flag: jax.Array) -> Any:
        y, factor = lax.cond(flag, lambda x: (jnp.sin(x), 2.0), lambda x: (jnp.cos(x), 3.0), x)
        for _ in range(8):
            y = jnp.sin(y @ x)
        return lax.cond(flag, lambda y, f: y * f, lambda y, f: y + f, y, factor)

    return Example(
        "constants-of-branches",
        step,
        lambda: (normal(1, 4, 4), jnp.asarray(True)),
        moves=False,
    )


def constant_and_array() -> Example:
    """One branch returns a constant where the other one computes the value."""

    def step(x: jax.Array, flags: jax.Array) -> Any:
        def body(x: jax.Array, flag: jax.Array) -> tuple[jax.Array, jax.Array]:
            return lax.cond(
                flag, lambda x: (jnp.sin(x), x.sum()), lambda x: (x, jnp.float32(3.0)), x
            )

        def back(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            flag, factor = inputs
            return lax.cond(flag, lambda x: x * factor, lambda x: x + factor, x), None

        x, factors = lax.scan(body, x, flags)
        return lax.scan(back, x, (flags, factors), reverse=True)

    return Example(
        "constant-in-one-branch",
        step,
        lambda: (normal(1, 4, 4), jnp.arange(DEPTH) % 2 == 0),
    )


def constant_stack() -> Example:
    """A scan that stacks a constant, and its own slices, for another scan."""

    def step(x: jax.Array, xs: jax.Array) -> Any:
        def first(x: jax.Array, slice_: jax.Array) -> Any:
            return jnp.sin(x + slice_), (1.5, slice_, x)

        def second(x: jax.Array, saved: Any) -> Any:
            factor, slice_, before = saved
            return x * factor + slice_ * before, None

        x, saved = lax.scan(first, x, xs)
        return lax.scan(second, x, saved, reverse=True)[0]

    return Example("constant-stack", step, lambda: (normal(1, 4), normal(2, DEPTH, 4)))


def numbered_in_branch() -> Example:
    """A loop in a branch that counts: its slices follow from nothing that is stored."""

    def loss(parameters: Any, x: jax.Array, choices: jax.Array) -> jax.Array:
        def counted(x: jax.Array, weight: Any) -> jax.Array:
            def again(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
                return jnp.tanh(x * (1 + 0.1 * number)) @ weight["in"] @ weight["out"], None

            return lax.scan(again, x, jnp.arange(2, dtype=x.dtype))[0]

        def body(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            choice, weight = inputs
            return lax.cond(choice > 0, lambda x: counted(x, weight), jnp.sin, x), None

        x, _ = lax.scan(body, x, (choices, parameters))
        return jnp.mean(x**2)

    return Example(
        "counting-loop-in-branch", descend(loss), lambda: (weights(), batch(), _choices())
    )


def numbered_alone(nested: bool) -> Example:
    """The same right in the step: of the branch itself nothing is stored."""

    def loss(x: jax.Array, flag: jax.Array) -> jax.Array:
        def again(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            return jnp.sin(x * (1 + 0.1 * number)), None

        def counted(x: jax.Array) -> jax.Array:
            return lax.scan(again, x, jnp.arange(3, dtype=x.dtype))[0]

        def around(x: jax.Array) -> jax.Array:
            return lax.cond(flag > 1, counted, jnp.cos, x)

        return jnp.sum(lax.cond(flag > 0, around if nested else counted, jnp.sin, x) ** 2)

    name = "counting-loop-alone-in-" + ("nested-branches" if nested else "a-branch")
    return Example(name, jax.grad(loss), lambda: (normal(1, 512), jnp.int32(2)))


def constant_choices() -> Example:
    """A scan over an array that the step has captured decides which branch runs."""
    choices = _choices()

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            choice, weight = inputs
            return lax.cond(choice > 0, lambda x: layer(x, weight), jnp.cos, x), None

        return jnp.mean(lax.scan(body, x, (choices, parameters))[0] ** 2)

    return Example("branches-by-a-constant", descend(loss), _plain_arguments)


def _plain_arguments() -> tuple[Any, ...]:
    return weights(), batch()


EXAMPLES = [
    switch_in_scan(1),
    switch_in_scan(2),
    wide_branches(),
    computed_predicate(),
    scan_in_branch(),
    cond_in_cond_in_scan(),
    scan_in_switch_in_scan(),
    repeated_cond(),
    opposite_predicates(),
    dead_branch(),
    constants_of_branches(),
    constant_and_array(),
    constant_stack(),
    numbered_in_branch(),
    numbered_alone(False),
    numbered_alone(True),
    constant_choices(),
]
