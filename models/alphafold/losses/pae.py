"""Loss of the predicted aligned error, and the TM score it predicts (section 1.9.7).

Entry (i, j) is the error of residue j's C-alpha when prediction and truth are aligned on residue i.
The traps: neither prediction nor truth get a gradient; only the head learns. And the first edge is
0, so the first bin holds errors of exactly 0 and the loss's bin k ends at edge k, but an expected
error takes it to begin there: half a bin more than was taught, as the published weights are read.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.losses.masked_msa import softmax_cross_entropy
from models.alphafold.losses.masking import resolution_in_range
from models.alphafold.structure import quaternion, rigid
from models.alphafold.structure.rigid import Rigid


def predicted_aligned_error_loss(
    logits: jax.Array,
    breaks: jax.Array,
    predicted_affine: jax.Array,
    batch: Mapping[str, jax.Array],
    config: ml_collections.ConfigDict,
) -> jax.Array:
    """Compute the loss.

    Args:
        logits: [residues, residues, bins].
        breaks: inner edges of the bins, Angstrom, [bins - 1].
        predicted_affine: backbone frames [residues, 7], Angstrom.
        batch: `backbone_affine_tensor`, `backbone_affine_mask` and `resolution`.
        config: the `predicted_aligned_error` tree.

    Returns:
        Scalar.
    """

    def local_points(tensor: jax.Array) -> jax.Array:
        affine = quaternion.from_tensor(tensor)
        frames = Rigid(affine.rotation[:, None], affine.translation[:, None])
        return rigid.invert_apply(frames, affine.translation[None])

    difference = local_points(predicted_affine) - local_points(batch["backbone_affine_tensor"])
    squared = jax.lax.stop_gradient(jnp.sum(jnp.square(difference), axis=-1))
    bins = jnp.sum(squared[..., None] > jnp.square(breaks), axis=-1)
    errors = softmax_cross_entropy(logits, bins)
    mask = batch["backbone_affine_mask"]
    pair_mask = mask[:, None] * mask[None, :]
    loss = jnp.sum(errors * pair_mask) / (1e-8 + jnp.sum(pair_mask))
    if config.filter_by_resolution:
        loss = loss * resolution_in_range(
            batch["resolution"], config.min_resolution, config.max_resolution
        )
    return loss


def _bin_centres(breaks: jax.Array) -> jax.Array:
    """Middle of each bin; each is taken to start at its edge, the last is as wide as the others."""
    step = breaks[1] - breaks[0]
    return jnp.concatenate([breaks + step / 2, breaks[-1:] + 1.5 * step])


def expected_aligned_error(logits: jax.Array, breaks: jax.Array) -> jax.Array:
    """Return the expected error in Angstrom [residues, residues]."""
    return jnp.sum(jax.nn.softmax(logits, axis=-1) * _bin_centres(breaks), axis=-1)


def predicted_tm_score(logits: jax.Array, breaks: jax.Array, residue_mask: jax.Array) -> jax.Array:
    """Return the predicted TM score (scalar), the best over alignments on one residue.

    Args:
        logits: [residues, residues, bins].
        breaks: inner edges of the bins, Angstrom, [bins - 1].
        residue_mask: which residues count, [residues].
    """
    count = jnp.maximum(jnp.sum(residue_mask), 19.0)
    scale = 1.24 * (count - 15.0) ** (1.0 / 3.0) - 1.8
    per_bin = 1.0 / (1.0 + jnp.square(_bin_centres(breaks) / scale))
    expected = jnp.sum(jax.nn.softmax(logits, axis=-1) * per_bin, axis=-1)
    weight = residue_mask / (1e-8 + jnp.sum(residue_mask))
    aligned = jnp.sum(expected * weight[None, :], axis=-1)
    return jnp.max(jnp.where(residue_mask > 0, aligned, 0.0))
