"""Values that are computed again instead of moved: for nothing, or at a price in FLOPs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdynoff
from jdynoff.planning.cost import region_flops
from tests.programs.example import descend, difference_in_ulps, normal, quick
from tests.programs.rewritten import program_of

LAYERS, ROWS, KEYS, WIDTH = 4, 8, 64, 8


def attention_loss(parameters: Any, x: jax.Array) -> jax.Array:
    """Layers whose logits are large and cost 2 * WIDTH FLOPs an element."""

    def layer(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
        query, key, value = (x @ weight[name] for name in "qkv")
        mixed = jax.nn.softmax(jnp.einsum("bqc,bkc->bqk", query, key)) @ value
        return x + mixed, None

    x, _ = jax.lax.scan(layer, x, parameters)
    return jnp.mean(x**2)


def dropout_loss(parameters: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    def layer(x: jax.Array, slices: Any) -> tuple[jax.Array, None]:
        weight, number = slices
        kept = jax.random.bernoulli(jax.random.fold_in(key, number), 0.8, x.shape)
        return x + jnp.where(kept, jnp.sin(x @ weight["q"]), 0.0), None

    x, _ = jax.lax.scan(layer, x, (parameters, jnp.arange(LAYERS)))
    return jnp.mean(x**2)


def arguments() -> tuple[Any, jax.Array]:
    weights = {name: normal(n, LAYERS, WIDTH, WIDTH) for n, name in enumerate("qkv")}
    return weights, normal(7, ROWS, KEYS, WIDTH)


def moved(price: float) -> tuple[int, Any]:
    step = jdynoff.managed(
        quick(descend(attention_loss)), budget="min", min_bytes=1, flops_per_byte=price
    )
    result = step(*arguments())
    return step.stats().bytes_offloaded, result


def test_at_a_price_products_are_computed_again_and_results_stay() -> None:
    plain = quick(descend(attention_loss))(*arguments())
    logits = LAYERS * ROWS * KEYS * KEYS * 4
    free, result = moved(0.0)
    assert free >= logits
    assert difference_in_ulps(result, plain) <= 8
    cheap, result = moved(2.0 * WIDTH)  # logits cost 2 * WIDTH / 4 a byte, and so do projections
    assert cheap <= free - logits
    assert difference_in_ulps(result, plain) <= 8
    all_of_it, result = moved(math.inf)
    assert all_of_it <= cheap
    assert difference_in_ulps(result, plain) <= 8


@pytest.mark.parametrize("price", [0.0, 2.0 * WIDTH])
def test_products_that_are_computed_again_wait_for_their_reader(price: float) -> None:
    step = jdynoff.managed(
        quick(descend(attention_loss)), budget="min", min_bytes=1, flops_per_byte=price
    )
    text = step.lower(*arguments()).as_text()
    assert ("jdynoff_after" in text) == (price > 0)


@pytest.mark.parametrize("price", [0.0, math.inf])
def test_random_numbers_are_the_same_when_made_again(price: float) -> None:
    given = (*arguments(), jax.random.key(3))
    plain = quick(descend(dropout_loss))(*given)
    step = jdynoff.managed(
        quick(descend(dropout_loss)), budget="min", min_bytes=1, flops_per_byte=price
    )
    assert difference_in_ulps(step(*given), plain) <= 8


def test_flops_are_those_of_the_formulas() -> None:
    def step(x: jax.Array, w: jax.Array, image: jax.Array, kernel: jax.Array) -> Any:
        y, _ = jax.lax.scan(lambda y, _: (y @ w, None), x, None, length=3)
        grouped = jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", feature_group_count=2)
        return y, grouped, jnp.transpose(x)

    shapes = (normal(0, 5, 7), normal(1, 7, 7), normal(2, 1, 4, 6, 6), normal(3, 10, 2, 3, 3))
    program, _ = program_of(step, shapes)
    products = 3 * 2 * 5 * 7 * 7
    convolution = 2 * (10 * 6 * 6) * (2 * 3 * 3)
    assert region_flops(program.top) == products + convolution
