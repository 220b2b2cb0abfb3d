"""Side-chain torsion loss (Algorithm 27), over all layers of the structure module.

The trap: angles of symmetric side chains may be off by pi, and the raw (sin, cos) pairs are also
pulled towards unit length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.alphafold.losses.masking import masked_mean
from models.alphafold.structure import residue_constants as rc
from models.alphafold.structure.structure_module import normalize_angles


class ChiLosses(NamedTuple):
    """Unweighted parts, scalars."""

    chi_loss: jax.Array
    angle_norm_loss: jax.Array


def supervised_chi_loss(
    unnormalized_angles: jax.Array, batch: Mapping[str, jax.Array]
) -> ChiLosses:
    """Compute the losses.

    Args:
        unnormalized_angles: (sin, cos) pairs [layers, residues, 7, 2].
        batch: `aatype`, `seq_mask`, `chi_mask` and `chi_angles` (radians).

    Returns:
        Squared chord of the chi angles' error, and deviation of the pairs from unit length.
    """
    predicted = normalize_angles(unnormalized_angles)[..., 3:, :]
    chi = batch["chi_angles"]
    true = jnp.stack([jnp.sin(chi), jnp.cos(chi)], axis=-1)
    periodic = jnp.asarray(rc.CHI_PI_PERIODIC)[batch["aatype"]]
    turned = true * (1.0 - 2.0 * periodic)[..., None]
    error = jnp.sum(jnp.square(true - predicted), axis=-1)
    turned_error = jnp.sum(jnp.square(turned - predicted), axis=-1)
    chi_mask = jnp.broadcast_to(batch["chi_mask"], error.shape)
    chi_loss = masked_mean(jnp.minimum(error, turned_error), chi_mask)

    norm = jnp.sqrt(jnp.sum(jnp.square(unnormalized_angles), axis=-1) + 1e-6)
    seq_mask = jnp.broadcast_to(batch["seq_mask"][:, None], norm.shape)
    return ChiLosses(chi_loss, masked_mean(jnp.abs(norm - 1.0), seq_mask))
