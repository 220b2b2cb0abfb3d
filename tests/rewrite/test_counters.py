"""Counters of blocks against a run of the program by hand, twins of the backward pass included."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdynoff.program.blocks import find_blocks
from tests.programs import branches, loops
from tests.programs.example import Example, normal
from tests.programs.interpret import assert_counted
from tests.programs.rewritten import program_of, rewrite

EXAMPLES = [*branches.EXAMPLES, *loops.EXAMPLES]


def run_and_count(step: Any, arguments: tuple[Any, ...], manager: Any) -> None:
    rewritten = rewrite(step, arguments)
    rewritten.run(arguments, manager)
    assert_counted(rewritten, arguments)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_block_is_counted(example: Example, manager: Any) -> None:
    """Also those that are not counted: scans, and the backward pass by the forward pass."""
    run_and_count(example.step, example.arguments(), manager)


def gated(checkpoint: bool) -> Any:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        def gate(x: jax.Array) -> jax.Array:
            return jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ weight), jnp.sin, x)

        return (jax.checkpoint(gate) if checkpoint else gate)(x), None

    return jax.grad(lambda weights, x: jnp.sum(jax.lax.scan(layer, x, weights)[0]))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_backward_pass_is_known_by_the_forward_pass(checkpoint: bool, manager: Any) -> None:
    arguments = normal(0, 6, 4, 4), normal(1, 3, 4)
    program, _ = program_of(gated(checkpoint), arguments)
    blocks = find_blocks(program)
    assert len(blocks.counted) == 1
    assert sum(block.is_twin for block in blocks.blocks) >= 2
    run_and_count(gated(checkpoint), arguments, manager)


def test_conditionals_on_different_values_are_counted_apart(manager: Any) -> None:
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def one(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            carry = jax.lax.cond(row[0] > 0, jnp.sin, jnp.cos, carry)
            return jax.lax.cond(carry[0] > 0, jnp.sin, jnp.cos, carry), None

        first, _ = jax.lax.scan(one, x[0], x)
        second, _ = jax.lax.scan(one, x[0], y)
        return first + second

    arguments = normal(0, 7, 3), normal(1, 7, 3)
    program, _ = program_of(step, arguments)
    assert len(find_blocks(program).counted) == 4
    run_and_count(step, arguments, manager)


def test_inner_branches_follow_through_a_branch_around_them(manager: Any) -> None:
    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def inner(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.cond(jnp.sum(x) > 0, lambda x: jnp.tanh(x @ weight), jnp.cos, x), None

        def outer(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
            def deep(x: jax.Array) -> jax.Array:
                return jax.lax.scan(inner, x, weights)[0]

            return jax.lax.cond(x[0, 0] > 0, deep, jnp.sin, x), None

        return jax.grad(lambda weights: jnp.sum(jax.lax.scan(outer, x, weights)[0]))(weights)

    arguments = normal(0, 5, 3, 4, 4), normal(1, 3, 4)
    program, _ = program_of(step, arguments)
    assert len(find_blocks(program).counted) == 2
    run_and_count(step, arguments, manager)


def nest(first: Any, second: Any) -> Any:
    """Two nests of loops over the same array, with a conditional in each."""

    def step(p: jax.Array) -> jax.Array:
        def loops(test: Any) -> jax.Array:
            def outer(x: jax.Array, a: jax.Array) -> tuple[jax.Array, None]:
                def inner(x: jax.Array, b: jax.Array) -> tuple[jax.Array, None]:
                    return jax.lax.cond(test(a, b), jnp.sin, jnp.cos, x), None

                return jax.lax.scan(inner, x, p)

            return jax.lax.scan(outer, jnp.float32(1.0), p)[0]

        return loops(first) + loops(second)

    return step


def test_which_loop_of_a_nest_takes_the_slices_is_told_apart(manager: Any) -> None:
    p = jnp.array([0.0, 0.0, 1.0, 2.0])
    for first, second in (
        (lambda a, b: a == b, lambda a, b: a == a),
        (lambda a, b: a == a, lambda a, b: b == b),
        (lambda a, b: a > 0, lambda a, b: b > 0),
    ):
        step = nest(first, second)
        program, _ = program_of(step, (p,))
        assert len(find_blocks(program).counted) == 2
        run_and_count(step, (p,), manager)
    program, _ = program_of(nest(lambda a, b: a < b, lambda a, b: a < b), (p,))
    assert len(find_blocks(program).counted) == 1


def test_draws_and_callbacks_are_never_taken_for_the_same_value() -> None:
    def draws(x: jax.Array) -> jax.Array:
        for _ in range(2):
            drawn = jax.lax.rng_uniform(0.0, 1.0, ())
            x = jax.lax.cond(drawn > 0.5, jnp.sin, jnp.cos, x)
        return x

    def callbacks(x: jax.Array) -> jax.Array:
        for _ in range(2):
            drawn = jax.pure_callback(lambda: np.float32(1), jax.ShapeDtypeStruct((), np.float32))
            x = jax.lax.cond(drawn > 0.5, jnp.sin, jnp.cos, x)
        return x

    for step in (draws, callbacks):
        program, _ = program_of(step, (jnp.float32(1.0),))
        assert len(find_blocks(program).counted) == 2
