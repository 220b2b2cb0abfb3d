"""Ground truth derived from atom positions: atom14, rigid groups, torsions, pseudo-beta.

These are what the losses compare with. All of it is computed on the whole chain before cropping,
so that the first residue of a crop still has its phi and pre-omega. Values whose mask is zero are
meaningless. The trap is symmetry: the two oxygens of aspartate, say, are named by convention, and
a prediction with the names exchanged is just as right; for those atoms and their rigid group an
alternative ground truth ("alt_gt") is given and the loss takes the better one.

References:
    Jumper et al. 2021, supplement 1.8.1 (frames), 1.8.5 (renaming), 1.9.7 (pi-periodic chi).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.alphafold.structure.residue_constants import (
    ATOM14_IS_AMBIGUOUS,
    ATOM14_MASK,
    ATOM14_TO_ATOM37,
    ATOM37_MASK,
    ATOM37_TO_ATOM14,
    ATOM_ORDER,
    CHI_ATOM37_INDICES,
    CHI_MASK,
    CHI_PI_PERIODIC,
    GLYCINE,
    GROUP_ATOM37_INDICES,
    GROUP_IS_AMBIGUOUS,
    GROUP_MASK,
    NUM_GROUPS,
    RENAMING_MATRICES,
)

Floats = NDArray[np.float32]
_CA, _CB = ATOM_ORDER["CA"], ATOM_ORDER["CB"]
_NUM_TORSIONS = 7
_TINY = 1e-8
# Renaming is a permutation that is its own inverse, so the matrix's rows name the partner.
_ATOM14_PARTNER = RENAMING_MATRICES.argmax(axis=-1)


def make_labels(
    aatype: NDArray[np.integer], all_atom_positions: Floats, all_atom_mask: Floats
) -> dict[str, NDArray[np.generic]]:
    """Compute every ground-truth feature of a chain.

    Args:
        aatype: residue types 0..20. # shape=(residues,)
        all_atom_positions: Angstrom. # shape=(residues, 37, 3)
        all_atom_mask: 1 where seen. # shape=(residues, 37)

    Returns:
        Features by the field's names, each with a leading residue axis, float32 or int32.
    """
    labels: dict[str, NDArray[np.generic]] = {}
    labels.update(atom14_labels(aatype, all_atom_positions, all_atom_mask))
    labels.update(rigid_group_labels(aatype, all_atom_positions, all_atom_mask))
    torsions, alternatives, torsion_mask = torsion_angles(aatype, all_atom_positions, all_atom_mask)
    labels["torsion_angles_sin_cos"] = torsions
    labels["alt_torsion_angles_sin_cos"] = alternatives
    labels["torsion_angles_mask"] = torsion_mask
    labels["chi_mask"] = torsion_mask[:, 3:]
    chi = np.arctan2(torsions[:, 3:, 0], torsions[:, 3:, 1])
    labels["chi_angles"] = (chi * torsion_mask[:, 3:]).astype(np.float32)
    labels["pseudo_beta"], labels["pseudo_beta_mask"] = pseudo_beta(
        aatype, all_atom_positions, all_atom_mask
    )
    return labels


def pseudo_beta(
    aatype: NDArray[np.integer], all_atom_positions: Floats, all_atom_mask: Floats
) -> tuple[Floats, Floats]:
    """C-beta, or C-alpha for glycine. Leading axes are free.

    Returns:
        Positions (..., 3) and mask (...).
    """
    glycine = aatype == GLYCINE
    positions = np.where(
        glycine[..., None], all_atom_positions[..., _CA, :], all_atom_positions[..., _CB, :]
    )
    mask = np.where(glycine, all_atom_mask[..., _CA], all_atom_mask[..., _CB])
    return positions.astype(np.float32), mask.astype(np.float32)


def atom14_labels(
    aatype: NDArray[np.integer], all_atom_positions: Floats, all_atom_mask: Floats
) -> dict[str, NDArray[np.generic]]:
    """Gather the 37-atom layout into 14 atoms per residue, with the symmetric alternative."""
    to37 = ATOM14_TO_ATOM37[aatype]
    exists = ATOM14_MASK[aatype]
    rows = np.arange(len(aatype))[:, None]
    seen = (all_atom_mask[rows, to37] * exists).astype(np.float32)
    positions = (all_atom_positions[rows, to37] * seen[..., None]).astype(np.float32)
    partner = _ATOM14_PARTNER[aatype]
    return {
        "residx_atom14_to_atom37": to37,
        "residx_atom37_to_atom14": ATOM37_TO_ATOM14[aatype],
        "atom14_atom_exists": exists,
        "atom37_atom_exists": ATOM37_MASK[aatype],
        "atom14_atom_is_ambiguous": ATOM14_IS_AMBIGUOUS[aatype],
        "atom14_gt_positions": positions,
        "atom14_gt_exists": seen,
        "atom14_alt_gt_positions": positions[rows, partner],
        "atom14_alt_gt_exists": seen[rows, partner],
    }


def frames_from_points(
    on_negative_x: NDArray[np.floating],
    origin: NDArray[np.floating],
    in_xy_plane: NDArray[np.floating],
) -> tuple[Floats, NDArray[np.floating]]:
    """Build frames by Gram-Schmidt (supplement, algorithm 21).

    Args:
        on_negative_x: points on the negative x axis. # shape=(..., 3)
        origin: origins. # shape=(..., 3)
        in_xy_plane: points of the half plane y > 0. # shape=(..., 3)

    Returns:
        Rotations (..., 3, 3) whose columns are the axes, and translations (..., 3).
    """
    x_axis = _unit(origin - on_negative_x)
    towards = in_xy_plane - origin
    y_axis = _unit(towards - np.sum(towards * x_axis, axis=-1, keepdims=True) * x_axis)
    z_axis = np.cross(x_axis, y_axis)
    return np.stack([x_axis, y_axis, z_axis], axis=-1).astype(np.float32), origin


def rigid_group_labels(
    aatype: NDArray[np.integer], all_atom_positions: Floats, all_atom_mask: Floats
) -> dict[str, NDArray[np.generic]]:
    """Frames of the eight rigid groups as 12 numbers (rotation row-major, translation)."""
    atoms = GROUP_ATOM37_INDICES[aatype]
    rows = np.arange(len(aatype))[:, None, None]
    points = all_atom_positions[rows, atoms].astype(np.float64)
    group_exists = GROUP_MASK[aatype]
    exists = (all_atom_mask[rows, atoms].min(axis=-1) * group_exists).astype(np.float32)
    rotations, origins = frames_from_points(points[:, :, 0], points[:, :, 1], points[:, :, 2])
    # The backbone group was built with C on negative x; its convention is C on positive x.
    rotations[:, 0] *= np.array([-1.0, 1.0, -1.0], dtype=np.float32)
    ambiguous = GROUP_IS_AMBIGUOUS[aatype]
    # The alternative is the same frame turned by 180 degrees about its own x axis.
    turn = np.ones((len(aatype), NUM_GROUPS, 1, 3), dtype=np.float32)
    turn[..., 1:] = 1.0 - 2.0 * ambiguous[..., None, None]
    frames = _flatten_frames(rotations, origins)
    quaternion = quaternion_of_rotation(rotations[:, 0])
    return {
        "rigidgroups_gt_frames": frames,
        "rigidgroups_gt_exists": exists,
        "rigidgroups_group_exists": group_exists,
        "rigidgroups_group_is_ambiguous": ambiguous,
        "rigidgroups_alt_gt_frames": _flatten_frames(rotations * turn, origins),
        "backbone_affine_tensor": np.concatenate(
            [quaternion, origins[:, 0].astype(np.float32)], axis=-1
        ),
        "backbone_affine_mask": exists[:, 0],
    }


def torsion_angles(
    aatype: NDArray[np.integer], all_atom_positions: Floats, all_atom_mask: Floats
) -> tuple[Floats, Floats, Floats]:
    """The seven torsions of each residue: pre-omega, phi, psi, chi1..chi4.

    Returns:
        (sin, cos) pairs (residues, 7, 2), the same with pi-periodic chi turned by 180 degrees,
        and the mask (residues, 7).
    """
    length = len(aatype)
    previous = np.zeros_like(all_atom_positions)
    previous[1:] = all_atom_positions[:-1]
    previous_mask = np.zeros_like(all_atom_mask)
    previous_mask[1:] = all_atom_mask[:-1]
    n, ca, c, o = (ATOM_ORDER[name] for name in ("N", "CA", "C", "O"))
    points = np.zeros((length, _NUM_TORSIONS, 4, 3), dtype=np.float64)
    mask = np.zeros((length, _NUM_TORSIONS), dtype=np.float32)

    points[:, 0, :2] = previous[:, [ca, c]]
    points[:, 0, 2:] = all_atom_positions[:, [n, ca]]
    mask[:, 0] = previous_mask[:, [ca, c]].prod(-1) * all_atom_mask[:, [n, ca]].prod(-1)
    points[:, 1, :1] = previous[:, [c]]
    points[:, 1, 1:] = all_atom_positions[:, [n, ca, c]]
    mask[:, 1] = previous_mask[:, c] * all_atom_mask[:, [n, ca, c]].prod(-1)
    points[:, 2] = all_atom_positions[:, [n, ca, c, o]]
    mask[:, 2] = all_atom_mask[:, [n, ca, c, o]].prod(-1)
    chi_atoms = CHI_ATOM37_INDICES[aatype]
    rows = np.arange(length)[:, None, None]
    points[:, 3:] = all_atom_positions[rows, chi_atoms]
    mask[:, 3:] = all_atom_mask[rows, chi_atoms].prod(-1) * CHI_MASK[aatype]

    rotations, origins = frames_from_points(points[:, :, 1], points[:, :, 2], points[:, :, 0])
    local = np.einsum("rtji,rtj->rti", rotations.astype(np.float64), points[:, :, 3] - origins)
    angles = np.stack([local[..., 2], local[..., 1]], axis=-1)
    angles /= np.sqrt(np.sum(np.square(angles), axis=-1, keepdims=True) + _TINY)
    # Psi is measured to O, which lies opposite to the next residue's N: 180 degrees away.
    angles[:, 2] *= -1.0
    alternatives = angles.copy()
    alternatives[:, 3:] *= (1.0 - 2.0 * CHI_PI_PERIODIC[aatype])[..., None]
    return angles.astype(np.float32), alternatives.astype(np.float32), mask


def quaternion_of_rotation(rotation: Floats) -> Floats:
    """Unit quaternions (w, x, y, z), w >= 0, of rotation matrices (..., 3, 3).

    The quaternion is the eigenvector of the largest eigenvalue of a symmetric 4x4 matrix that is
    linear in the rotation: no case distinction, and the nearest rotation for noisy input.
    """
    r = rotation.astype(np.float64)
    matrix = np.zeros((*r.shape[:-2], 4, 4))
    matrix[..., 0, 0] = r[..., 0, 0] + r[..., 1, 1] + r[..., 2, 2]
    for axis in range(3):
        one, two = (axis + 1) % 3, (axis + 2) % 3
        matrix[..., axis + 1, axis + 1] = r[..., axis, axis] - r[..., one, one] - r[..., two, two]
        matrix[..., 0, axis + 1] = matrix[..., axis + 1, 0] = r[..., two, one] - r[..., one, two]
        matrix[..., one + 1, two + 1] = matrix[..., two + 1, one + 1] = (
            r[..., one, two] + r[..., two, one]
        )
    quaternion = np.linalg.eigh(matrix)[1][..., -1]
    sign = np.where(quaternion[..., :1] < 0.0, -1.0, 1.0)
    return (quaternion * sign).astype(np.float32)


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    return vectors / np.sqrt(np.sum(np.square(vectors), axis=-1, keepdims=True) + _TINY)


def _flatten_frames(rotations: Floats, origins: NDArray[np.floating]) -> Floats:
    flat = rotations.reshape(*rotations.shape[:-2], 9)
    return np.concatenate([flat, origins], axis=-1).astype(np.float32)
