"""Loss of the prediction which atoms an experiment resolves (section 1.9.10).

The trap: only atoms that the residue type has are scored, and only for well resolved structures.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.losses.masking import resolution_in_range


def experimentally_resolved_loss(
    logits: jax.Array, batch: Mapping[str, jax.Array], config: ml_collections.ConfigDict
) -> jax.Array:
    """Compute the binary cross entropy.

    Args:
        logits: [residues, 37].
        batch: `atom37_atom_exists`, `all_atom_mask` and `resolution`.
        config: the `experimentally_resolved` tree.

    Returns:
        Scalar.
    """
    exists = batch["atom37_atom_exists"].astype(jnp.float32)
    resolved = batch["all_atom_mask"].astype(jnp.float32)
    errors = -resolved * jax.nn.log_sigmoid(logits) - (1.0 - resolved) * jax.nn.log_sigmoid(-logits)
    loss = jnp.sum(errors * exists) / (1e-8 + jnp.sum(exists))
    if config.filter_by_resolution:
        loss = loss * resolution_in_range(
            batch["resolution"], config.min_resolution, config.max_resolution
        )
    return loss
