"""Random choices that turn an alignment into the network's MSA features.

The order is the paper's: delete blocks, thin out (self-distillation), draw cluster centres (the
query is always the first), mask 15 % of the centres' positions for the BERT task, assign every
other row to the centre it agrees with most, summarise each cluster, and draw extra rows. All
randomness comes from the generator that is passed in. The traps: the clusters are made with the
*masked* centres, so that the profile a cluster shows at a masked position does not contain the
answer of its own centre; and the profile that masking draws from is that of the *whole* alignment,
blocks that are deleted included: the paper says only "the profile", and the field's pipelines take
it before anything is drawn.

References:
    Jumper et al. 2021, supplement 1.2.6 (block deletion), 1.2.7 (clustering), 1.3 (distillation),
    table 1.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from models.alphafold.data.alignment import Alignment
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.data.residues import (
    GAP,
    MASK_TOKEN,
    NUM_MSA_TOKENS,
    UNKNOWN,
)

Floats = NDArray[np.float32]
Tokens = NDArray[np.uint8]
_NUM_PROFILE_TOKENS = GAP + 1
_ROWS_PER_CHUNK = 2048
NUM_MSA_FEATURES = 2 * NUM_MSA_TOKENS + 3


@dataclasses.dataclass(frozen=True, eq=False)
class Clusters:
    """Summary of each cluster, its centre included.

    Attributes:
        profile: distribution over the 23 tokens. # shape=(clusters, residues, 23), float32
        deletion_mean: mean deletion count. # shape=(clusters, residues), float32
    """

    profile: Floats
    deletion_mean: Floats


def make_msa_features(
    alignment: Alignment,
    config: FeatureConfig,
    rng: np.random.Generator,
    *,
    is_distillation: bool = False,
) -> dict[str, NDArray[np.generic]]:
    """Draw one set of MSA features of the whole chain, padded to the configured row numbers.

    Args:
        alignment: all rows that are known.
        config: sizes and probabilities.
        rng: source of randomness.
        is_distillation: the structure is a prediction; its alignment is thinned out first.

    Returns:
        msa_feat (S, N, 49), msa_mask, true_msa, bert_mask (S, N), msa_row_mask (S,), extra_msa,
        extra_has_deletion, extra_deletion_value, extra_msa_mask (E, N), extra_msa_row_mask (E,).
    """
    profile = column_profile(alignment.msa)
    if config.block_delete_msa:
        alignment = delete_blocks(
            alignment, config.msa_fraction_per_block, config.num_delete_blocks, rng
        )
    if is_distillation:
        alignment = sample_rows(alignment, config.max_distillation_msa_clusters, rng)
    centres, others = draw_cluster_centres(alignment.num_rows, config.num_clusters, rng)
    true_msa = alignment.msa[centres]
    masked_msa, bert_mask = mask_msa(true_msa, profile, config, rng)
    centre_deletions = alignment.deletion_matrix[centres]
    if config.msa_cluster_features:
        assignment = nearest_centres(masked_msa, alignment.msa[others])
        clusters = summarise_clusters(
            masked_msa,
            centre_deletions,
            alignment.msa[others],
            alignment.deletion_matrix[others],
            assignment,
        )
    else:
        clusters = Clusters(
            one_hot(masked_msa, NUM_MSA_TOKENS), centre_deletions.astype(np.float32)
        )
    msa_feat = np.concatenate(
        [
            one_hot(masked_msa, NUM_MSA_TOKENS),
            np.minimum(centre_deletions, 1)[..., None].astype(np.float32),
            squash_deletions(centre_deletions)[..., None],
            clusters.profile,
            squash_deletions(clusters.deletion_mean)[..., None],
        ],
        axis=-1,
    )
    extra = others[rng.permutation(len(others))[: config.max_extra_msa]]
    extra_deletions = alignment.deletion_matrix[extra]
    num_residues = alignment.num_residues
    centre_rows = np.ones(len(centres), dtype=np.float32)
    extra_rows = np.ones(len(extra), dtype=np.float32)
    by_centre = {
        "msa_feat": msa_feat,
        "msa_mask": np.ones((len(centres), num_residues), dtype=np.float32),
        "true_msa": true_msa.astype(np.int32),
        "bert_mask": bert_mask,
        "msa_row_mask": centre_rows,
    }
    by_extra = {
        "extra_msa": alignment.msa[extra].astype(np.int32),
        "extra_has_deletion": np.minimum(extra_deletions, 1).astype(np.float32),
        "extra_deletion_value": squash_deletions(extra_deletions),
        "extra_msa_mask": np.ones((len(extra), num_residues), dtype=np.float32),
        "extra_msa_row_mask": extra_rows,
    }
    return {
        **{name: pad_rows(value, config.num_clusters) for name, value in by_centre.items()},
        **{name: pad_rows(value, config.max_extra_msa) for name, value in by_extra.items()},
    }


def delete_blocks(
    alignment: Alignment, fraction: float, num_blocks: int, rng: np.random.Generator
) -> Alignment:
    """Delete `num_blocks` random blocks of neighbouring rows; the query always stays.

    Rows lie in order of similarity, so a block is a family: losing some makes the network use
    diverse alignments.
    """
    size = int(fraction * alignment.num_rows)
    if size == 0:
        return alignment
    starts = rng.integers(0, alignment.num_rows, size=num_blocks)
    kept = np.ones(alignment.num_rows, dtype=bool)
    for start in starts:
        kept[start : start + size] = False
    kept[0] = True
    names = tuple(name for name, keep in zip(alignment.names, kept, strict=True) if keep)
    return Alignment(alignment.msa[kept], alignment.deletion_matrix[kept], names, alignment.source)


def sample_rows(alignment: Alignment, max_rows: int, rng: np.random.Generator) -> Alignment:
    """Draw rows without replacement down to `max_rows`, in their order; the query always stays."""
    if alignment.num_rows <= max_rows:
        return alignment
    others = 1 + rng.choice(alignment.num_rows - 1, size=max_rows - 1, replace=False)
    kept = np.concatenate([[0], np.sort(others)])
    names = tuple(alignment.names[index] for index in kept)
    return Alignment(alignment.msa[kept], alignment.deletion_matrix[kept], names, alignment.source)


def draw_cluster_centres(
    num_rows: int, max_centres: int, rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Choose centre rows without replacement, row 0 first, and return them and all other rows."""
    order = np.concatenate([[0], 1 + rng.permutation(num_rows - 1)]).astype(np.int64)
    return order[:max_centres], order[max_centres:]


def column_profile(msa: Tokens) -> Floats:
    """Frequency of each residue, unknown and gap in each column.

    Returns:
        Frequencies. # shape=(residues, 22), dtype=float32
    """
    num_rows, num_residues = msa.shape
    flat = np.arange(num_residues) * _NUM_PROFILE_TOKENS + msa.astype(np.int64)
    counts = np.bincount(flat.ravel(), minlength=num_residues * _NUM_PROFILE_TOKENS)
    return (counts.reshape(num_residues, _NUM_PROFILE_TOKENS) / num_rows).astype(np.float32)


def mask_msa(
    msa: Tokens, profile: Floats, config: FeatureConfig, rng: np.random.Generator
) -> tuple[Tokens, Floats]:
    """Hide positions for the BERT task.

    Args:
        msa: rows to hide in. # shape=(rows, residues)
        profile: column frequencies for the draw from the profile. # shape=(residues, 22)
        config: fractions.
        rng: source of randomness.

    Returns:
        The rows with hidden positions replaced, and 1 where a position was chosen, also where it
        was left as it is.
    """
    chosen = rng.random(msa.shape) < config.masked_msa_replace_fraction
    columns = np.nonzero(chosen)[1]
    count = len(columns)
    kind = rng.random(count)
    uniform = rng.integers(0, UNKNOWN, size=count)
    cumulative = np.cumsum(profile.astype(np.float64), axis=1)[columns]
    threshold = rng.random(count)[:, None] * cumulative[:, -1:]
    from_profile = np.minimum((threshold >= cumulative).sum(axis=1), GAP)
    until_uniform = config.masked_msa_uniform_prob
    until_profile = until_uniform + config.masked_msa_profile_prob
    until_same = until_profile + config.masked_msa_same_prob
    replacement = np.select(
        [kind < until_uniform, kind < until_profile, kind < until_same],
        [uniform, from_profile, msa[chosen]],
        default=MASK_TOKEN,
    )
    masked = msa.copy()
    masked[chosen] = replacement.astype(np.uint8)
    return masked, chosen.astype(np.float32)


def nearest_centres(centres: Tokens, rows: Tokens) -> NDArray[np.int64]:
    """For each row the centre with the most equal residues; gaps and mask tokens never count.

    Args:
        centres: masked centre rows. # shape=(clusters, residues)
        rows: rows to assign. # shape=(rows, residues)

    Returns:
        Index of the centre of each row, the lowest on a tie. # shape=(rows,)
    """
    weights = one_hot(centres, GAP).reshape(len(centres), -1).T
    assignment = np.zeros(len(rows), dtype=np.int64)
    for start in range(0, len(rows), _ROWS_PER_CHUNK):
        chunk = rows[start : start + _ROWS_PER_CHUNK]
        agreement = one_hot(chunk, GAP).reshape(len(chunk), -1) @ weights
        assignment[start : start + len(chunk)] = agreement.argmax(axis=1)
    return assignment


def summarise_clusters(
    centres: Tokens,
    centre_deletions: NDArray[np.uint16],
    rows: Tokens,
    row_deletions: NDArray[np.uint16],
    assignment: NDArray[np.int64],
) -> Clusters:
    """Average tokens and deletion counts over each cluster, its centre included."""
    num_clusters, num_residues = centres.shape
    size = 1.0 + np.bincount(assignment, minlength=num_clusters)
    cell = assignment[:, None] * num_residues + np.arange(num_residues)
    shape = (num_clusters, num_residues, NUM_MSA_TOKENS)
    counts = np.bincount(
        (cell * NUM_MSA_TOKENS + rows).ravel(), minlength=int(np.prod(shape))
    ).reshape(shape)
    deletions = np.bincount(
        cell.ravel(), weights=row_deletions.ravel(), minlength=num_clusters * num_residues
    ).reshape(num_clusters, num_residues)
    profile = (counts + one_hot(centres, NUM_MSA_TOKENS)) / size[:, None, None]
    deletion_mean = (deletions + centre_deletions) / size[:, None]
    return Clusters(profile.astype(np.float32), deletion_mean.astype(np.float32))


def squash_deletions(counts: NDArray[np.generic]) -> Floats:
    """Map deletion counts to 0..1 by 2/pi * arctan(count / 3)."""
    return (np.arctan(counts.astype(np.float32) / 3.0) * (2.0 / np.pi)).astype(np.float32)


def one_hot(tokens: NDArray[np.integer], num_classes: int) -> Floats:
    """One-hot float32 rows; tokens beyond the classes give zeros."""
    table = np.zeros((max(NUM_MSA_TOKENS, num_classes), num_classes), dtype=np.float32)
    np.fill_diagonal(table, 1.0)
    return table[tokens]


def pad_rows(values: NDArray[np.generic], num_rows: int) -> NDArray[np.generic]:
    """Append rows of zeros up to `num_rows`."""
    missing = num_rows - values.shape[0]
    if missing <= 0:
        return values
    return np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1))
