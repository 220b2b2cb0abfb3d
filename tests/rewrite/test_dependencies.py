"""What a transfer waits for: enough for the order, and no more."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

import jdynoff
from tests.programs.example import normal


def test_a_transfer_waits_for_one_element_of_what_is_only_another_order() -> None:
    """As in AlphaFold's outer product mean: XLA multiplies its gradient in two orders, neither of
    which is the one that a transfer would have it built in.
    """
    depth, length, channels = 3, 24, 8

    def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        left, right = jnp.tanh(x @ weights["left"]), jnp.tanh(x @ weights["right"])
        outer = jnp.einsum("iac,ajd->icdj", left.transpose(1, 0, 2), right)
        pairs = jnp.tanh(jnp.einsum("icdj,cdf->ijf", outer, weights["out"]))
        return x + jnp.einsum("ijf,ajf->aif", pairs, x), None

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

    weights = {
        "left": normal(0, depth, 16, channels),
        "right": normal(1, depth, 16, channels),
        "out": normal(2, depth, channels, channels, 16),
    }
    step = jdynoff.managed(jax.jit(jax.grad(loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
    text = step.lower(weights, normal(3, 4, length, 16)).as_text()
    reloads = [line for line in text.splitlines() if "@jdynoff_reload" in line]
    assert reloads
    waited_for = "".join(line.split(" : (")[-1].split(") -> ")[0] for line in reloads)
    assert "tensor<1x1x1x1xf32>" in waited_for
    for order in itertools.permutations((length, channels, length, channels)):
        assert f"tensor<{'x'.join(map(str, order))}xf32>" not in waited_for
