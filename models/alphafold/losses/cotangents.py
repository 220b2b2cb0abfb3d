"""Keeps a loss term's broken gradient out of those of the other terms.

The losses of one network share its outputs, so their cotangents are added where the network is
differentiated. The trap: to replace a NaN *value* by zero is not enough. Its derivative is zero
times whatever made the NaN, which is NaN again, and added to the good terms it wipes them out.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


@jax.custom_vjp
def zero_nonfinite_cotangents(tree: Any) -> Any:
    """Return `tree`; where a cotangent of it is not finite, zero is passed back.

    Put it between what terms share and each user of it, one call for each user.

    Args:
        tree: pytree of floating-point arrays.

    Returns:
        The same arrays.
    """
    return tree


def _forward(tree: Any) -> tuple[Any, None]:
    return tree, None


def _backward(_: None, cotangents: Any) -> tuple[Any]:
    return (jax.tree.map(lambda c: jnp.where(jnp.isfinite(c), c, jnp.zeros_like(c)), cotangents),)


zero_nonfinite_cotangents.defvjp(_forward, _backward)
