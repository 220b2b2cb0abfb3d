"""How good a predicted structure is: lDDT, dRMSD, GDT and distogram accuracy.

`lddt_ca`, `drmsd_ca` and `distogram_accuracy` need no superposition, are written in `jax.numpy`
and work under `jit` and `vmap`; the GDT scores search for the best superpositions and run on the
host in numpy. All scores but dRMSD lie in 0..1, higher is better; multiply by 100 for the figures
quoted in papers. The trap: lDDT counts pairs by their *true* distance, so a residue with no true
neighbour has no score of its own and is given 1.

References:
    Mariani et al. 2013 (lDDT); Zemla 2003 (GDT); Jumper et al. 2021, supplement 1.9.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = jax.Array
Doubles = NDArray[np.float64]

_LDDT_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
_GDT_TS_THRESHOLDS = (1.0, 2.0, 4.0, 8.0)
_GDT_HA_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
_DISTOGRAM_FIRST_BREAK = 2.3125
_DISTOGRAM_LAST_BREAK = 21.6875
_CA = 1
_TINY = 1e-10
_MAX_REFINEMENTS = 20
_MIN_SUPERPOSED = 3


def lddt(
    predicted: Array,
    true: Array,
    mask: Array,
    *,
    cutoff: float = 15.0,
    per_residue: bool = False,
) -> Array:
    """Local distance difference test of one point per residue.

    For each pair with a true distance below the cutoff: the mean over 0.5, 1, 2 and 4 Angstrom of
    whether the predicted distance is off by less than that.

    Args:
        predicted: Angstrom. # shape=(..., residues, 3)
        true: Angstrom. # shape=(..., residues, 3)
        mask: 1 where the true point is known. # shape=(..., residues)
        cutoff: Angstrom.
        per_residue: score each residue by its own pairs.

    Returns:
        Scores in 0..1, shape (...) or (..., residues).
    """
    true_distance = _distances(true)
    off = jnp.abs(true_distance - _distances(predicted))
    residues = true.shape[-2]
    scored = (
        (true_distance < cutoff)
        * mask[..., :, None]
        * mask[..., None, :]
        * (1.0 - jnp.eye(residues))
    )
    within = sum(
        (off < threshold).astype(true_distance.dtype) for threshold in _LDDT_THRESHOLDS
    ) / len(_LDDT_THRESHOLDS)
    axes = (-1,) if per_residue else (-2, -1)
    return (_TINY + jnp.sum(scored * within, axis=axes)) / (_TINY + jnp.sum(scored, axis=axes))


def lddt_ca(
    predicted_atoms: Array, true_atoms: Array, true_mask: Array, *, per_residue: bool = False
) -> Array:
    """`lddt` of the C-alpha atoms.

    Args:
        predicted_atoms: atom37 positions. # shape=(..., residues, 37, 3)
        true_atoms: atom37 positions. # shape=(..., residues, 37, 3)
        true_mask: 1 where the true atom is known. # shape=(..., residues, 37)
        per_residue: score each residue by its own pairs.
    """
    return lddt(
        predicted_atoms[..., _CA, :],
        true_atoms[..., _CA, :],
        true_mask[..., _CA],
        per_residue=per_residue,
    )


def drmsd(predicted: Array, true: Array, mask: Array) -> Array:
    """Root mean square deviation of all distances between two known points, in Angstrom.

    Args:
        predicted: # shape=(..., residues, 3)
        true: # shape=(..., residues, 3)
        mask: 1 where the true point is known. # shape=(..., residues)

    Returns:
        Shape (...); 0 where fewer than two points are known.
    """
    residues = true.shape[-2]
    pairs = mask[..., :, None] * mask[..., None, :] * (1.0 - jnp.eye(residues))
    squares = jnp.square(_distances(predicted) - _distances(true))
    count = jnp.sum(pairs, axis=(-2, -1))
    return jnp.sqrt(jnp.sum(pairs * squares, axis=(-2, -1)) / jnp.maximum(count, 1.0))


def drmsd_ca(predicted_atoms: Array, true_atoms: Array, true_mask: Array) -> Array:
    """`drmsd` of the C-alpha atoms of atom37 positions, see `lddt_ca`."""
    return drmsd(predicted_atoms[..., _CA, :], true_atoms[..., _CA, :], true_mask[..., _CA])


def distogram_accuracy(
    logits: Array, pseudo_beta: Array, mask: Array, *, min_separation: int = 1
) -> Array:
    """Fraction of residue pairs whose most probable distance bin is the true one.

    The bins are those of the distogram head: equally wide between 2.3125 and 21.6875 Angstrom,
    and one at each end.

    Args:
        logits: # shape=(..., residues, residues, bins)
        pseudo_beta: true positions, Angstrom. # shape=(..., residues, 3)
        mask: 1 where the position is known. # shape=(..., residues)
        min_separation: leave out pairs closer along the array than this.
    """
    breaks = jnp.linspace(_DISTOGRAM_FIRST_BREAK, _DISTOGRAM_LAST_BREAK, logits.shape[-1] - 1)
    true_bin = jnp.sum(_distances(pseudo_beta)[..., None] > breaks, axis=-1)
    place = jnp.arange(pseudo_beta.shape[-2])
    apart = jnp.abs(place[:, None] - place[None, :]) >= min_separation
    pairs = mask[..., :, None] * mask[..., None, :] * apart
    right = (jnp.argmax(logits, axis=-1) == true_bin).astype(pairs.dtype)
    return jnp.sum(pairs * right, axis=(-2, -1)) / jnp.maximum(jnp.sum(pairs, axis=(-2, -1)), 1.0)


def gdt_ts(predicted: ArrayLike, true: ArrayLike, mask: ArrayLike, *, search: bool = True) -> float:
    """GDT total score: mean fraction of residues within 1, 2, 4 and 8 Angstrom.

    Args:
        predicted: one point per residue, Angstrom. # shape=(residues, 3)
        true: # shape=(residues, 3)
        mask: 1 where the true point is known. # shape=(residues,)
        search: find for each threshold the superposition that brings most residues within it, as
            GDT is defined. False uses the one least-squares superposition of all residues, which
            is a lower bound and cheaper.

    Returns:
        Score in 0..1; nan where fewer than three points are known or a prediction is not finite.
    """
    return _gdt(predicted, true, mask, _GDT_TS_THRESHOLDS, search)


def gdt_ha(predicted: ArrayLike, true: ArrayLike, mask: ArrayLike, *, search: bool = True) -> float:
    """GDT high accuracy: as `gdt_ts` with 0.5, 1, 2 and 4 Angstrom."""
    return _gdt(predicted, true, mask, _GDT_HA_THRESHOLDS, search)


def superpose(moving: ArrayLike, fixed: ArrayLike, mask: ArrayLike) -> Doubles:
    """Move points onto others by the rigid motion with the least squared deviation (Kabsch).

    Args:
        moving: # shape=(points, 3)
        fixed: # shape=(points, 3)
        mask: non-zero where the pair counts. # shape=(points,)

    Returns:
        All of `moving`, moved. # shape=(points, 3), dtype=float64
    """
    points = np.asarray(moving, dtype=np.float64)
    chosen = np.asarray(mask) > 0
    rotation, shift = _rigid_motion(points[chosen], np.asarray(fixed, dtype=np.float64)[chosen])
    return points @ rotation.T + shift


def _distances(points: Array) -> Array:
    difference = points[..., :, None, :] - points[..., None, :, :]
    return jnp.sqrt(_TINY + jnp.sum(jnp.square(difference), axis=-1))


def _rigid_motion(moving: Doubles, fixed: Doubles) -> tuple[Doubles, Doubles]:
    moving_centre, fixed_centre = moving.mean(axis=0), fixed.mean(axis=0)
    left, _, right = np.linalg.svd((fixed - fixed_centre).T @ (moving - moving_centre))
    # The last axis is mirrored where the best orthogonal map would be a reflection.
    signs = np.array([1.0, 1.0, np.sign(np.linalg.det(left @ right)) or 1.0])
    rotation = (left * signs) @ right
    return rotation, fixed_centre - rotation @ moving_centre


def _gdt(
    predicted: ArrayLike,
    true: ArrayLike,
    mask: ArrayLike,
    thresholds: tuple[float, ...],
    search: bool,
) -> float:
    known = np.asarray(mask) > 0
    moving = np.asarray(predicted, dtype=np.float64)[known]
    fixed = np.asarray(true, dtype=np.float64)[known]
    count = len(fixed)
    if count < _MIN_SUPERPOSED or not np.isfinite(moving).all():
        return float("nan")
    windows = _search_windows(count) if search else [slice(0, count)]
    best = dict.fromkeys(thresholds, 0)
    for window in windows:
        for threshold in thresholds:
            best[threshold] = max(
                best[threshold], _within(moving, fixed, window, threshold, refine=search)
            )
    return sum(best.values()) / (len(thresholds) * count)


def _within(
    moving: Doubles, fixed: Doubles, window: slice, threshold: float, *, refine: bool
) -> int:
    """Largest number of points within `threshold`, superposing first on `window`.

    With `refine` the superposition is repeated on the points that are within until these do not
    change.
    """
    chosen = np.zeros(len(fixed), dtype=bool)
    chosen[window] = True
    most = 0
    for _ in range(_MAX_REFINEMENTS if refine else 1):
        rotation, shift = _rigid_motion(moving[chosen], fixed[chosen])
        deviation = np.linalg.norm(moving @ rotation.T + shift - fixed, axis=1)
        within = deviation <= threshold
        most = max(most, int(within.sum()))
        if within.sum() < _MIN_SUPERPOSED or np.array_equal(within, chosen):
            break
        chosen = within
    return most


def _search_windows(count: int) -> list[slice]:
    """All residues, then stretches of halving length down to four, half overlapping."""
    windows = [slice(0, count)]
    length = count // 2
    while length >= 4:
        step = max(1, length // 2, count // 32)
        windows.extend(slice(at, at + length) for at in range(0, count - length + 1, step))
        length //= 2
    return windows
