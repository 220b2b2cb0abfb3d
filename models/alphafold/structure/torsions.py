"""Torsion angles of a structure, for templates and ground truth (sections 1.2.9 and 1.8).

Seven angles per residue, each as (sin, cos): pre-omega and phi (which need the previous residue),
psi, chi1 to chi4. The traps: psi is measured on the O atom, so its sign is flipped, and the
previous residue is the previous *row*, also across a chain break. Angles whose mask is 0 are
whatever atoms at the origin give.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.alphafold.structure import residue_constants as rc
from models.alphafold.structure import rigid

_N, _CA, _C, _O = (rc.ATOM_ORDER[name] for name in ("N", "CA", "C", "O"))


class Torsions(NamedTuple):
    """Torsion angles of residues."""

    sin_cos: jax.Array  # shape=(..., residues, 7, 2), dtype=float32
    alternative_sin_cos: jax.Array  # the same for the other naming of symmetric atoms
    mask: jax.Array  # shape=(..., residues, 7), dtype=float32


def _shift(x: jax.Array) -> jax.Array:
    """Give each residue its predecessor's value, zero for the first; residues are axis -3 or -2."""
    return jnp.concatenate([jnp.zeros_like(x[:1]), x[:-1]])


def _torsions(
    aatype: jax.Array, positions: jax.Array, mask: jax.Array, placeholder: bool
) -> Torsions:
    """Compute torsions of one chain: [residues], [residues, 37, 3], [residues, 37]."""
    aatype = jnp.minimum(aatype, rc.UNKNOWN)
    previous, previous_mask = _shift(positions), _shift(mask)

    def four(atoms: list[tuple[jax.Array, int]]) -> jax.Array:
        return jnp.stack([source[:, atom] for source, atom in atoms], axis=1)

    def present(atoms: list[tuple[jax.Array, int]]) -> jax.Array:
        return jnp.prod(four(atoms), axis=1)

    def backbone(source: jax.Array, before: jax.Array) -> list[list[tuple[jax.Array, int]]]:
        return [
            [(before, _CA), (before, _C), (source, _N), (source, _CA)],
            [(before, _C), (source, _N), (source, _CA), (source, _C)],
            [(source, _N), (source, _CA), (source, _C), (source, _O)],
        ]

    atoms = [four(names) for names in backbone(positions, previous)]
    masks = [present(names) for names in backbone(mask, previous_mask)]

    chi_indices = jnp.asarray(rc.CHI_ATOM37_INDICES)[aatype]  # [residues, 4, 4]
    residues = jnp.arange(aatype.shape[0])[:, None, None]
    chi_atoms = positions[residues, chi_indices]
    chi_mask = jnp.asarray(rc.CHI_MASK)[aatype] * jnp.prod(mask[residues, chi_indices], axis=-1)

    points = jnp.concatenate([jnp.stack(atoms, axis=1), chi_atoms], axis=1)  # [residues, 7, 4, 3]
    all_masks = jnp.concatenate([jnp.stack(masks, axis=1), chi_mask], axis=1)

    frames = rigid.from_three_points(points[:, :, 1], points[:, :, 2], points[:, :, 0])
    end = rigid.invert_apply(frames, points[:, :, 3])
    sin_cos = jnp.stack([end[..., 2], end[..., 1]], axis=-1)
    sin_cos = sin_cos / jnp.sqrt(jnp.sum(jnp.square(sin_cos), axis=-1, keepdims=True) + 1e-8)
    sin_cos = sin_cos * jnp.array([1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0])[None, :, None]

    periodic = jnp.asarray(rc.CHI_PI_PERIODIC)[aatype]
    sign = jnp.concatenate([jnp.ones((aatype.shape[0], 3)), 1.0 - 2.0 * periodic], axis=1)
    alternative = sin_cos * sign[..., None]
    if placeholder:
        absent = jnp.stack([1.0 - all_masks, jnp.zeros_like(all_masks)], axis=-1)
        sin_cos = sin_cos * all_masks[..., None] + absent
        alternative = alternative * all_masks[..., None] + absent
    return Torsions(sin_cos, alternative, all_masks)


def torsion_angles(
    aatype: jax.Array, positions: jax.Array, mask: jax.Array, *, placeholder: bool = False
) -> Torsions:
    """Compute the torsion angles of one or several structures.

    Args:
        aatype: residue types [..., residues], 20 or more for unknown.
        positions: atom37 positions [..., residues, 37, 3], Angstrom.
        mask: which atoms are present [..., residues, 37].
        placeholder: give undefined angles the value (1, 0).

    Returns:
        Angles, their values under the other naming of symmetric atoms, and masks.
    """
    fun = lambda *args: _torsions(*args, placeholder)  # noqa: E731
    for _ in range(aatype.ndim - 1):
        fun = jax.vmap(fun)
    return fun(aatype, positions, mask)
