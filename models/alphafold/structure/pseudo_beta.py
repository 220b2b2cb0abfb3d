"""The one point that stands for a residue in distance maps, for embedders, heads and data.

C-beta, or C-alpha for glycine. The trap: atoms are in the order of `atom37`, and the position of a
residue whose atom is absent is meaningless; use the mask.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_GLYCINE = 7
_CA, _CB = 1, 3  # in atom37


def pseudo_beta(
    aatype: jax.Array, positions: jax.Array, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Pick the pseudo-beta atom of each residue.

    Args:
        aatype: residue types [..., residues].
        positions: [..., residues, 37, 3].
        mask: which atoms are present, [..., residues, 37].

    Returns:
        Positions [..., residues, 3] and, if a mask was given, which of them are present.
    """
    is_glycine = aatype == _GLYCINE
    beta = jnp.where(is_glycine[..., None], positions[..., _CA, :], positions[..., _CB, :])
    if mask is None:
        return beta, None
    return beta, jnp.where(is_glycine, mask[..., _CA], mask[..., _CB]).astype(jnp.float32)
