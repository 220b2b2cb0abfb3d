"""Input, relative position, recycling and extra-MSA embedders (Algorithms 3, 4 and 32).

They turn features into the first MSA and pair representations. The trap: `pair_activiations` is
spelled like that in the published parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.network.layers import LayerNorm, Linear
from models.alphafold.network.settings import Settings
from models.alphafold.structure.pseudo_beta import pseudo_beta

Batch = Mapping[str, jax.Array]

NUM_MSA_CLASSES = 23  # 20 residues, unknown, gap, mask token


def distance_bins(
    positions: jax.Array, *, min_bin: float, max_bin: float, num_bins: int
) -> jax.Array:
    """One-hot the distances between positions.

    Args:
        positions: [residues, 3], Angstrom.
        min_bin: lower edge of the first bin, Angstrom; nearer pairs are in no bin.
        max_bin: lower edge of the last bin, which has no upper edge.
        num_bins: number of bins.

    Returns:
        [residues, residues, num_bins], 0 or 1.
    """
    lower = jnp.square(jnp.linspace(min_bin, max_bin, num_bins))
    upper = jnp.concatenate([lower[1:], jnp.array([1e8], lower.dtype)])
    difference = positions[:, None, :] - positions[None, :, :]
    squared = jnp.sum(jnp.square(difference), axis=-1, keepdims=True)
    return ((squared > lower) & (squared < upper)).astype(jnp.float32)


def embed_input(
    batch: Batch, config: ml_collections.ConfigDict, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """Algorithm 3: MSA [rows, residues, c_m] and pair [residues, residues, c_z] from features."""
    target = settings.cast(batch["target_feat"])
    query = Linear(config.msa_channel, name="preprocess_1d")(target)
    rows = Linear(config.msa_channel, name="preprocess_msa")(settings.cast(batch["msa_feat"]))
    left = Linear(config.pair_channel, name="left_single")(target)
    right = Linear(config.pair_channel, name="right_single")(target)
    return rows + query[None], left[:, None] + right[None]


def embed_relative_position(
    residue_index: jax.Array, config: ml_collections.ConfigDict, settings: Settings
) -> jax.Array:
    """Algorithm 4: pair update from clipped differences of residue numbers."""
    limit = config.max_relative_feature
    offset = residue_index[:, None] - residue_index[None, :]
    bins = jax.nn.one_hot(jnp.clip(offset + limit, 0, 2 * limit), 2 * limit + 1)
    return Linear(config.pair_channel, name="pair_activiations")(settings.cast(bins))


def embed_recycled(
    batch: Batch,
    msa: jax.Array,
    pair: jax.Array,
    config: ml_collections.ConfigDict,
    settings: Settings,
) -> tuple[jax.Array, jax.Array]:
    """Algorithm 32: add the previous iteration's outputs, those that are there.

    Args:
        batch: `aatype`, and optionally `prev_pos` [residues, 37, 3], `prev_msa_first_row` and
            `prev_pair`.
        msa: MSA representation.
        pair: pair representation.
        config: `recycle_pos`, `recycle_features` and `prev_pos` (bins).
        settings: shared settings.

    Returns:
        The new MSA and pair representations.
    """
    if config.recycle_pos and "prev_pos" in batch:
        beta, _ = pseudo_beta(batch["aatype"], batch["prev_pos"])
        bins = distance_bins(
            beta,
            min_bin=config.prev_pos.min_bin,
            max_bin=config.prev_pos.max_bin,
            num_bins=config.prev_pos.num_bins,
        )
        pair = pair + Linear(config.pair_channel, name="prev_pos_linear")(settings.cast(bins))
    if config.recycle_features and "prev_msa_first_row" in batch:
        first_row = LayerNorm("prev_msa_first_row_norm")(settings.cast(batch["prev_msa_first_row"]))
        msa = msa.at[0].add(first_row)
    if config.recycle_features and "prev_pair" in batch:
        pair = pair + LayerNorm("prev_pair_norm")(settings.cast(batch["prev_pair"]))
    return msa, pair


def embed_extra_msa(
    batch: Batch, config: ml_collections.ConfigDict, settings: Settings
) -> jax.Array:
    """Embed the rows that are not cluster centres: [extra rows, residues, c_e]."""
    features = jnp.concatenate(
        [
            jax.nn.one_hot(batch["extra_msa"], NUM_MSA_CLASSES),
            batch["extra_has_deletion"][..., None],
            batch["extra_deletion_value"][..., None],
        ],
        axis=-1,
    )
    linear = Linear(config.extra_msa_channel, name="extra_msa_activations")
    return linear(settings.cast(features))
