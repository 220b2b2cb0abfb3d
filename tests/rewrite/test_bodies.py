"""Bodies of control flow read what is around them before they are traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import jdynoff
from tests.programs.example import DEPTH, batch, descend, difference_in_ulps, quick, weights


def test_branches_may_compute_again_what_lies_around_the_switch() -> None:
    """The weight is made in the loop's body, so the backward body makes it again for its branches.

    What one branch makes while it is traced must not be used outside of it.
    """

    def loss(parameters: Any, x: jax.Array, choices: jax.Array) -> jax.Array:
        def body(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
            choice, weight = inputs
            stack = parameters["out"].at[0].set(weight["in"])
            x = jax.checkpoint(lambda x, s: jax.nn.softmax(x @ s[0]))(x, stack)
            branches = [lambda x, s: jnp.tanh(x) @ s[0].T, lambda x, s: x @ s[0]]
            return jax.lax.switch(choice, branches, x, stack), None

        x, _ = jax.lax.scan(body, x, (choices, parameters))
        return jnp.mean(x**2)

    arguments = (weights(), batch(), jnp.arange(DEPTH) % 2)
    step = jdynoff.managed(quick(descend(loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
    assert difference_in_ulps(quick(descend(loss))(*arguments), step(*arguments)) <= 8
    assert step.stats().bytes_offloaded > 0
