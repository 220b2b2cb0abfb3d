"""Frame aligned point error (Algorithm 28), of the backbone and of all atoms.

The distance of every atom to its true place, seen from every rigid frame. The traps: it is not a
mean over pairs that are masked in, but sums divided by the *product* of the numbers of frames and
points; and symmetric atoms are renamed before atoms are compared (Algorithm 26).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from models.alphafold.network.chunking import map_row_chunks
from models.alphafold.structure import quaternion, rigid
from models.alphafold.structure import residue_constants as rc
from models.alphafold.structure.rigid import Rigid

Batch = Mapping[str, jax.Array]


def frame_aligned_point_error(
    predicted_frames: Rigid,
    true_frames: Rigid,
    frames_mask: jax.Array,
    predicted_points: jax.Array,
    true_points: jax.Array,
    points_mask: jax.Array,
    *,
    length_scale: float,
    clamp_distance: float | None,
    chunk_size: int | None = None,
) -> jax.Array:
    """Compute the error.

    Args:
        predicted_frames: [frames].
        true_frames: [frames].
        frames_mask: [frames].
        predicted_points: [points, 3], Angstrom.
        true_points: [points, 3], Angstrom.
        points_mask: [points].
        length_scale: the error is measured in this many Angstrom.
        clamp_distance: larger errors count as this many Angstrom; None for no limit.
        chunk_size: frames at a time.

    Returns:
        Scalar.
    """

    def per_frame(rows: tuple[Rigid, Rigid]) -> jax.Array:
        predicted, true = (Rigid(x.rotation[:, None], x.translation[:, None]) for x in rows)
        difference = rigid.invert_apply(predicted, predicted_points) - rigid.invert_apply(
            true, true_points
        )
        error = jnp.sqrt(jnp.sum(jnp.square(difference), axis=-1) + 1e-4)
        if clamp_distance is not None:
            error = jnp.clip(error, 0.0, clamp_distance)
        return jnp.sum(error / length_scale * points_mask, axis=-1)

    errors = map_row_chunks(per_frame, (predicted_frames, true_frames), chunk_size)
    count = jnp.sum(frames_mask) * jnp.sum(points_mask)
    return jnp.sum(errors * frames_mask) / (1e-4 + count)


def backbone_fape(
    traj: jax.Array, batch: Batch, config: ml_collections.ConfigDict
) -> tuple[jax.Array, jax.Array]:
    """Compute the backbone error of every layer.

    Args:
        traj: predicted backbone frames [layers, residues, 7], Angstrom.
        batch: `backbone_affine_tensor`, `backbone_affine_mask` and optionally `use_clamped_fape`,
            the weight of the clamped error against the unclamped one.
        config: the `structure_module` tree.

    Returns:
        The mean over layers and the last layer's error.
    """
    true = quaternion.from_tensor(batch["backbone_affine_tensor"])
    mask = batch["backbone_affine_mask"]

    def error(frames: jax.Array, clamp_distance: float | None) -> jax.Array:
        predicted = quaternion.from_tensor(frames)
        return frame_aligned_point_error(
            predicted.rigid,
            true.rigid,
            mask,
            predicted.translation,
            true.translation,
            mask,
            length_scale=config.fape.loss_unit_distance,
            clamp_distance=clamp_distance,
        )

    def layer(frames: jax.Array) -> jax.Array:
        clamped = error(frames, config.fape.clamp_distance)
        if "use_clamped_fape" not in batch:
            return clamped
        weight = batch["use_clamped_fape"]
        return clamped * weight + error(frames, None) * (1.0 - weight)

    losses = jax.vmap(layer)(traj)
    return jnp.mean(losses), losses[-1]


class RenamedTruth(NamedTuple):
    """Ground truth with symmetric atoms named like the prediction."""

    alt_naming_is_better: jax.Array  # shape=(residues,), dtype=float32
    positions: jax.Array  # shape=(residues, 14, 3), Angstrom
    exists: jax.Array  # shape=(residues, 14)


def rename_ground_truth(
    predicted: jax.Array, batch: Batch, chunk_size: int | None = None
) -> RenamedTruth:
    """Choose the naming of symmetric atoms that fits the prediction best (Algorithm 26).

    Compares distances between ambiguous atoms and all others, so only the few atom14 columns that
    are ambiguous in any residue are looked at.

    Args:
        predicted: atom14 positions [residues, 14, 3].
        batch: `atom14_gt_*`, `atom14_alt_gt_*` and `atom14_atom_is_ambiguous`.
        chunk_size: residues at a time.

    Returns:
        The renamed truth; it carries no gradient.
    """
    predicted = jax.lax.stop_gradient(predicted)
    columns = np.flatnonzero(rc.ATOM14_IS_AMBIGUOUS.any(axis=0))
    columns = slice(int(columns[0]), int(columns[-1]) + 1)
    truth, exists = batch["atom14_gt_positions"], batch["atom14_gt_exists"]
    alternative = batch["atom14_alt_gt_positions"]
    ambiguous = batch["atom14_atom_is_ambiguous"]

    def distances(rows: jax.Array, points: jax.Array) -> jax.Array:
        difference = rows[:, :, None, None] - points[None, None]
        return jnp.sqrt(1e-10 + jnp.sum(jnp.square(difference), axis=-1))

    def misfit(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        row_predicted, row_truth, row_alternative, row_mask = rows
        mask = row_mask[:, :, None, None] * (exists * (1.0 - ambiguous))[None, None]
        reference = distances(row_predicted, predicted)

        def total(row: jax.Array, points: jax.Array) -> jax.Array:
            error = jnp.sqrt(1e-10 + jnp.square(reference - distances(row, points)))
            return jnp.sum(mask * error, axis=(1, 2, 3))

        return total(row_truth, truth), total(row_alternative, alternative)

    rows = tuple(x[:, columns] for x in (predicted, truth, alternative, exists * ambiguous))
    original, swapped = map_row_chunks(misfit, rows, chunk_size)
    better = (swapped < original).astype(jnp.float32)

    def choose(first: jax.Array, second: jax.Array) -> jax.Array:
        weight = better.reshape(better.shape + (1,) * (first.ndim - 1))
        return (1.0 - weight) * first + weight * second

    return RenamedTruth(
        better, choose(truth, alternative), choose(exists, batch["atom14_alt_gt_exists"])
    )


def sidechain_fape(
    predicted_frames: Rigid,
    predicted_atom14: jax.Array,
    renamed: RenamedTruth,
    batch: Batch,
    config: ml_collections.ConfigDict,
    chunk_size: int | None = None,
) -> jax.Array:
    """Compute the error of all atoms seen from all rigid groups.

    Args:
        predicted_frames: rigid groups [residues, 8].
        predicted_atom14: atoms [residues, 14, 3], Angstrom.
        renamed: ground truth, symmetric atoms renamed.
        batch: `rigidgroups_gt_frames`, `rigidgroups_alt_gt_frames`, `rigidgroups_gt_exists`.
        config: the `structure_module` tree.
        chunk_size: residues' worth of frames at a time.

    Returns:
        Scalar.
    """
    weight = renamed.alt_naming_is_better[:, None, None]
    true_frames = (1.0 - weight) * batch["rigidgroups_gt_frames"]
    true_frames = rigid.from_flat12(true_frames + weight * batch["rigidgroups_alt_gt_frames"])

    def flat(frames: Rigid) -> Rigid:
        return Rigid(frames.rotation.reshape(-1, 3, 3), frames.translation.reshape(-1, 3))

    return frame_aligned_point_error(
        flat(predicted_frames),
        flat(true_frames),
        batch["rigidgroups_gt_exists"].reshape(-1),
        predicted_atom14.reshape(-1, 3),
        renamed.positions.reshape(-1, 3),
        renamed.exists.reshape(-1),
        length_scale=config.sidechain.length_scale,
        clamp_distance=config.sidechain.atom_clamp_distance,
        chunk_size=None if chunk_size is None else chunk_size * rc.NUM_GROUPS,
    )
