"""Structural violations: broken bonds, wrong angles and clashes (section 1.9.11).

Losses that need no ground truth, and metrics of how often a prediction is physically impossible.
The traps: only residues with consecutive numbers are bonded, whatever the distance; and in clashes
the sixth atom of *any* two residues is exempt, not only the sulphurs of two cysteines, as the
published weights were trained that way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from models.alphafold.losses.masking import masked_mean
from models.alphafold.network.chunking import map_row_chunks
from models.alphafold.structure import residue_constants as rc

Batch = Mapping[str, jax.Array]

_N, _CA, _C, _SG = 0, 1, 2, 5  # in atom14
_MAX_EXTREME_CA_CA = 1.5  # Angstrom beyond the ideal distance


class BondViolations(NamedTuple):
    """Peptide bonds between consecutive residues."""

    c_n_loss_mean: jax.Array  # shape=()
    ca_c_n_loss_mean: jax.Array  # shape=()
    c_n_ca_loss_mean: jax.Array  # shape=()
    per_residue_loss_sum: jax.Array  # shape=(residues,)
    per_residue_violation_mask: jax.Array  # shape=(residues,)


class ClashViolations(NamedTuple):
    """Atoms of different residues that are too near."""

    mean_loss: jax.Array  # shape=()
    per_atom_loss_sum: jax.Array  # shape=(residues, 14)
    per_atom_clash_mask: jax.Array  # shape=(residues, 14)


class WithinResidueViolations(NamedTuple):
    """Distances inside a residue that are out of bounds."""

    per_atom_loss_sum: jax.Array  # shape=(residues, 14)
    per_atom_violations: jax.Array  # shape=(residues, 14)


class Violations(NamedTuple):
    """All of them."""

    bonds: BondViolations
    clashes: ClashViolations
    within: WithinResidueViolations
    total_per_residue_mask: jax.Array  # shape=(residues,)


def _length(vector: jax.Array) -> jax.Array:
    return jnp.sqrt(1e-6 + jnp.sum(jnp.square(vector), axis=-1))


def bond_violations(
    positions: jax.Array, exists: jax.Array, batch: Batch, tolerance_factor: float
) -> BondViolations:
    """Compare peptide bonds with their ideal length and angles (equations 44 and 45).

    Args:
        positions: atom14 positions [residues, 14, 3], Angstrom.
        exists: which atoms the residues have, [residues, 14].
        batch: `residue_index` and `aatype`.
        tolerance_factor: standard deviations that are free.

    Returns:
        Losses and masks.
    """
    ca, c = positions[:-1, _CA], positions[:-1, _C]
    next_n, next_ca = positions[1:, _N], positions[1:, _CA]
    has_ca, has_c = exists[:-1, _CA], exists[:-1, _C]
    has_next_n, has_next_ca = exists[1:, _N], exists[1:, _CA]
    index = batch["residue_index"]
    bonded = (index[1:] - index[:-1] == 1).astype(jnp.float32)
    to_proline = (batch["aatype"][1:] == rc.PROLINE).astype(jnp.float32)

    def compare(
        value: jax.Array, mean: jax.Array, stddev: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        error = jnp.sqrt(1e-6 + jnp.square(value - mean))
        loss = jax.nn.relu(error - tolerance_factor * stddev)
        mean_loss = jnp.sum(mask * loss) / (jnp.sum(mask) + 1e-6)
        return loss, mean_loss, mask * (error > tolerance_factor * stddev)

    length, length_proline = rc.PEPTIDE_BOND_LENGTH, rc.PEPTIDE_BOND_LENGTH_PROLINE
    ideal = tuple(
        (1.0 - to_proline) * general + to_proline * proline
        for general, proline in zip(length, length_proline, strict=True)
    )
    c_n_length = _length(c - next_n)
    to_ca = (ca - c) / _length(ca - c)[:, None]
    to_n = (next_n - c) / c_n_length[:, None]
    to_next_ca = (next_ca - next_n) / _length(next_ca - next_n)[:, None]
    cos_ca_c_n = jnp.sum(to_ca * to_n, axis=-1)
    cos_c_n_ca = jnp.sum(-to_n * to_next_ca, axis=-1)

    bond = bonded * has_c * has_next_n
    parts = [
        compare(c_n_length, *ideal, bond),
        compare(cos_ca_c_n, *rc.PEPTIDE_COS_CA_C_N, bond * has_ca),
        compare(cos_c_n_ca, *rc.PEPTIDE_COS_C_N_CA, bond * has_next_ca),
    ]
    losses, means, masks = zip(*parts, strict=True)
    # A bond counts half for each of the two residues.
    loss, mask = sum(losses), jnp.max(jnp.stack(masks), axis=0)
    per_residue = 0.5 * (jnp.pad(loss, (0, 1)) + jnp.pad(loss, (1, 0)))
    per_residue_mask = jnp.maximum(jnp.pad(mask, (0, 1)), jnp.pad(mask, (1, 0)))
    return BondViolations(*means, per_residue, per_residue_mask)


def clash_violations(
    positions: jax.Array,
    exists: jax.Array,
    batch: Batch,
    overlap_tolerance: float,
    chunk_size: int | None = None,
) -> ClashViolations:
    """Find atoms of different residues whose van der Waals spheres overlap (equation 46).

    Args:
        positions: atom14 positions [residues, 14, 3], Angstrom.
        exists: which atoms the residues have, [residues, 14].
        batch: `residue_index` and `residx_atom14_to_atom37`.
        overlap_tolerance: overlap that is free, Angstrom.
        chunk_size: residues at a time.

    Returns:
        Losses and masks.
    """
    by_element = np.array([rc.VAN_DER_WAALS_RADIUS[name[0]] for name in rc.ATOM_TYPES], np.float32)
    radii = exists * jnp.asarray(by_element)[batch["residx_atom14_to_atom37"]]
    index = batch["residue_index"]

    def atom(which: int) -> np.ndarray:
        return np.eye(rc.NUM_ATOM14, dtype=np.float32)[which]

    c_then_n = np.outer(atom(_C), atom(_N))
    sulphurs = np.outer(atom(_SG), atom(_SG))

    def against_all(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        row_positions, row_exists, row_radii, row_index = rows
        # All arrays are [row residue, residue, row atom, atom].
        difference = row_positions[:, None, :, None] - positions[None, :, None, :]
        distance = jnp.sqrt(1e-10 + jnp.sum(jnp.square(difference), axis=-1))
        mask = row_exists[:, None, :, None] * exists[None, :, None, :]
        step = index[None, :] - row_index[:, None]
        mask = mask * (step != 0)[..., None, None]
        peptide = (step == 1)[..., None, None] * c_then_n
        peptide = peptide + (step == -1)[..., None, None] * c_then_n.T
        mask = mask * (1.0 - peptide) * (1.0 - sulphurs)
        allowed = row_radii[:, None, :, None] + radii[None, :, None, :] - overlap_tolerance
        error = mask * jax.nn.relu(allowed - distance)
        clash = mask * (distance < allowed)
        return (
            jnp.sum(error, axis=(1, 3)),
            jnp.max(clash, axis=(1, 3)),
            jnp.sum(mask, axis=(1, 2, 3)),
        )

    rows = (positions, exists, radii, index)
    loss_sum, clash_mask, pairs = map_row_chunks(against_all, rows, chunk_size)
    # Every pair was met twice.
    mean_loss = 0.5 * jnp.sum(loss_sum) / (1e-6 + 0.5 * jnp.sum(pairs))
    return ClashViolations(mean_loss, loss_sum, clash_mask)


def within_residue_violations(
    positions: jax.Array,
    exists: jax.Array,
    aatype: jax.Array,
    overlap_tolerance: float,
    tolerance_factor: float,
) -> WithinResidueViolations:
    """Compare the distances inside each residue with their bounds.

    Args:
        positions: atom14 positions [residues, 14, 3], Angstrom.
        exists: which atoms the residues have, [residues, 14].
        aatype: residue types [residues].
        overlap_tolerance: overlap of spheres that is free, Angstrom.
        tolerance_factor: standard deviations from ideal distances that are free.

    Returns:
        Losses and masks.
    """
    bounds = rc.atom14_distance_bounds(overlap_tolerance, tolerance_factor)
    lower, upper = (jnp.asarray(bound)[aatype] for bound in bounds[:2])
    apart = 1.0 - jnp.eye(rc.NUM_ATOM14)
    mask = exists[:, :, None] * exists[:, None, :] * apart
    difference = positions[:, :, None] - positions[:, None, :]
    distance = jnp.sqrt(1e-10 + jnp.sum(jnp.square(difference), axis=-1))
    loss = mask * (jax.nn.relu(lower - distance) + jax.nn.relu(distance - upper))
    outside = mask * ((distance < lower) | (distance > upper))
    return WithinResidueViolations(
        jnp.sum(loss, axis=1) + jnp.sum(loss, axis=2),
        jnp.maximum(jnp.max(outside, axis=1), jnp.max(outside, axis=2)),
    )


def find_violations(
    positions: jax.Array,
    batch: Batch,
    config: ml_collections.ConfigDict,
    chunk_size: int | None = None,
) -> Violations:
    """Find all violations of a predicted structure.

    Args:
        positions: atom14 positions [residues, 14, 3], Angstrom.
        batch: `atom14_atom_exists`, `residue_index`, `aatype`, `residx_atom14_to_atom37`.
        config: the `structure_module` tree.
        chunk_size: residues at a time.

    Returns:
        The violations.
    """
    exists = batch["atom14_atom_exists"].astype(jnp.float32)
    factor = config.violation_tolerance_factor
    overlap = config.clash_overlap_tolerance
    bonds = bond_violations(positions, exists, batch, factor)
    clashes = clash_violations(positions, exists, batch, overlap, chunk_size)
    within = within_residue_violations(positions, exists, batch["aatype"], overlap, factor)
    total = jnp.stack(
        [
            bonds.per_residue_violation_mask,
            jnp.max(clashes.per_atom_clash_mask, axis=-1),
            jnp.max(within.per_atom_violations, axis=-1),
        ]
    )
    return Violations(bonds, clashes, within, jnp.max(total, axis=0))


def violation_loss(violations: Violations, exists: jax.Array) -> jax.Array:
    """Return the unweighted loss, a scalar.

    Args:
        violations: what `find_violations` found.
        exists: which atoms the residues have, [residues, 14].
    """
    bonds = violations.bonds
    atoms = jnp.sum(violations.clashes.per_atom_loss_sum + violations.within.per_atom_loss_sum)
    return (
        bonds.c_n_loss_mean
        + bonds.ca_c_n_loss_mean
        + bonds.c_n_ca_loss_mean
        + atoms / (1e-6 + jnp.sum(exists))
    )


def violation_metrics(
    violations: Violations, positions: jax.Array, batch: Batch
) -> dict[str, jax.Array]:
    """Return the fractions of residues with a violation, by kind, as scalars."""
    seq_mask = batch["seq_mask"]
    exists = batch["atom14_atom_exists"]
    distance = _length(positions[1:, _CA] - positions[:-1, _CA])
    index = batch["residue_index"]
    bonded = exists[1:, _CA] * exists[:-1, _CA] * (index[1:] - index[:-1] == 1)
    extreme = distance - rc.CA_CA_DISTANCE > _MAX_EXTREME_CA_CA
    clashes = jnp.max(violations.clashes.per_atom_clash_mask, axis=-1)
    within = jnp.max(violations.within.per_atom_violations, axis=-1)
    return {
        "violations_extreme_ca_ca_distance": masked_mean(extreme, bonded),
        "violations_between_residue_bond": masked_mean(
            violations.bonds.per_residue_violation_mask, seq_mask
        ),
        "violations_between_residue_clash": masked_mean(clashes, seq_mask),
        "violations_within_residue": masked_mean(within, seq_mask),
        "violations_per_residue": masked_mean(violations.total_per_residue_mask, seq_mask),
    }
