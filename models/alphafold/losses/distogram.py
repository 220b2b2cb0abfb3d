"""Distogram loss (section 1.9.8): cross entropy of binned pseudo-beta distances.

The trap: distances are compared as squares, so a distance exactly on an edge is in the lower bin.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.alphafold.losses.masked_msa import softmax_cross_entropy


def distogram_loss(
    logits: jax.Array, bin_edges: jax.Array, pseudo_beta: jax.Array, pseudo_beta_mask: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute the loss.

    Args:
        logits: [residues, residues, bins].
        bin_edges: inner edges of the bins, Angstrom, [bins - 1].
        pseudo_beta: true positions, Angstrom, [residues, 3].
        pseudo_beta_mask: which of them are known, [residues].

    Returns:
        The loss (scalar) and the true distances [residues, residues] in Angstrom.
    """
    difference = pseudo_beta[:, None] - pseudo_beta[None, :]
    squared = jnp.sum(jnp.square(difference), axis=-1)
    true_bins = jnp.sum(squared[..., None] > jnp.square(bin_edges), axis=-1)
    errors = softmax_cross_entropy(logits, true_bins)
    mask = pseudo_beta_mask[:, None] * pseudo_beta_mask[None, :]
    loss = jnp.sum(errors * mask) / (1e-6 + jnp.sum(mask))
    return loss, jnp.sqrt(1e-6 + squared)
