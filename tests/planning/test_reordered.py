"""Which operands of products are copied; and that nothing is built for a dependency alone."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdynoff
from jdynoff.planning.reordered import reordered_bytes
from tests.programs.example import normal
from tests.programs.rewritten import program_of


@pytest.mark.parametrize(
    ("formula", "left", "right", "copied"),
    [
        ("ij,jk->ik", (4, 8), (8, 16), ()),
        ("ji,kj->ik", (8, 4), (16, 8), ()),  # transposed matrices are multiplied as they lie
        ("bij,bjk->bik", (2, 4, 8), (2, 8, 16), ()),
        ("bqhd,bkhd->bhqk", (2, 4, 3, 8), (2, 5, 3, 8), (0, 1)),  # heads between the tokens
        ("bqhd,bkhd->bhqk", (2, 4, 1, 8), (2, 5, 1, 8), ()),  # with a single head they are not
        ("icdj,cdk->ijk", (4, 3, 5, 6), (3, 5, 7), (0,)),  # contracted over its middle
        ("ijcd,cdk->ijk", (4, 6, 3, 5), (3, 5, 7), ()),
    ],
)
def test_operands_whose_axes_lie_otherwise_are_copied(
    formula: str, left: tuple[int, ...], right: tuple[int, ...], copied: tuple[int, ...]
) -> None:
    operands = normal(0, *left), normal(1, *right)
    program, _ = program_of(lambda x, y: jnp.einsum(formula, x, y), operands)
    sizes = [reordered_bytes(operation) for operation in program.top.operations]
    assert sum(sizes) == sum(operands[number].nbytes for number in copied)


def test_other_operations_copy_nothing() -> None:
    program, _ = program_of(lambda x: jnp.sin(x).T + jax.nn.relu(x.T), (normal(0, 4, 8),))
    assert not any(map(reordered_bytes, program.top.operations))


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
