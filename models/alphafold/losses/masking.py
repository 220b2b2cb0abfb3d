"""The mean over what is present, for losses and metrics.

The trap: with nothing present it is 0, not NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def masked_mean(value: jax.Array, mask: jax.Array) -> jax.Array:
    """Return `sum(value * mask) / sum(mask)` for arrays of one shape."""
    return jnp.sum(value * mask) / (jnp.sum(mask) + 1e-10)


def resolution_in_range(
    resolution: jax.Array, min_resolution: float, max_resolution: float
) -> jax.Array:
    """Return 1.0 if a structure's resolution (Angstrom) lies in the closed range, else 0.0."""
    inside = (resolution >= min_resolution) & (resolution <= max_resolution)
    return inside.astype(jnp.float32)
