"""The lDDT-C-alpha score and the loss of its prediction (Algorithm 29, section 1.9.6).

The trap: a residue without any neighbour to score gets exactly 1, so use its mask.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.losses.masked_msa import softmax_cross_entropy
from models.alphafold.losses.masking import resolution_in_range
from models.alphafold.structure import residue_constants as rc

_CA = rc.ATOM_ORDER["CA"]


def lddt(
    predicted: jax.Array,
    true: jax.Array,
    mask: jax.Array,
    *,
    cutoff: float = 15.0,
    per_residue: bool = False,
) -> jax.Array:
    """Compute the local distance difference test.

    The fraction of true distances below the cutoff that the prediction keeps within 0.5, 1, 2 and
    4 Angstrom, averaged over the four.

    Args:
        predicted: one point per residue [residues, 3], Angstrom.
        true: [residues, 3].
        mask: which true points are known, [residues].
        cutoff: Angstrom.
        per_residue: a score for each residue instead of one for all.

    Returns:
        Scores in [0, 1]: [residues] or a scalar.
    """

    def distances(points: jax.Array) -> jax.Array:
        difference = points[:, None] - points[None, :]
        return jnp.sqrt(1e-10 + jnp.sum(jnp.square(difference), axis=-1))

    true_distances = distances(true)
    error = jnp.abs(true_distances - distances(predicted))
    scored = (true_distances < cutoff) * mask[:, None] * mask[None, :]
    scored = scored * (1.0 - jnp.eye(mask.shape[0]))
    kept = sum((error < limit).astype(jnp.float32) for limit in (0.5, 1.0, 2.0, 4.0)) / 4.0
    axes = (1,) if per_residue else (0, 1)
    return (1e-10 + jnp.sum(scored * kept, axis=axes)) / (1e-10 + jnp.sum(scored, axis=axes))


def predicted_lddt_loss(
    logits: jax.Array,
    predicted_atom37: jax.Array,
    batch: Mapping[str, jax.Array],
    config: ml_collections.ConfigDict,
) -> tuple[jax.Array, jax.Array]:
    """Compute the loss.

    Args:
        logits: [residues, bins].
        predicted_atom37: predicted atoms [residues, 37, 3]; no gradient flows into them.
        batch: `all_atom_positions`, `all_atom_mask` and `resolution`.
        config: the `predicted_lddt` tree.

    Returns:
        The loss (scalar) and the true score of each residue.
    """
    mask = batch["all_atom_mask"][:, _CA]
    score = lddt(
        jax.lax.stop_gradient(predicted_atom37[:, _CA]),
        batch["all_atom_positions"][:, _CA],
        mask,
        per_residue=True,
    )
    bins = jnp.minimum(jnp.floor(score * config.num_bins), config.num_bins - 1).astype(jnp.int32)
    errors = softmax_cross_entropy(logits, bins)
    loss = jnp.sum(errors * mask) / (jnp.sum(mask) + 1e-8)
    if config.filter_by_resolution:
        loss = loss * resolution_in_range(
            batch["resolution"], config.min_resolution, config.max_resolution
        )
    return loss, score


def plddt(logits: jax.Array) -> jax.Array:
    """Return the expected score [residues], 0 to 100, under logits [residues, bins]."""
    num_bins = logits.shape[-1]
    centres = (jnp.arange(num_bins) + 0.5) / num_bins
    return 100.0 * jnp.sum(jax.nn.softmax(logits, axis=-1) * centres, axis=-1)
