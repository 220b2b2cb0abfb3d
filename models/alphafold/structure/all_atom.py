"""From backbone frames and torsion angles to atoms, and between atom orders (Algorithm 24).

For the structure module, its losses and the data pipeline. The trap: the chi groups hang on each
other, so chi3 turns about an axis that chi1 and chi2 have already moved; the unknown residue has
neither atoms nor frames, its groups are zero matrices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from models.alphafold.structure import residue_constants as rc
from models.alphafold.structure import rigid
from models.alphafold.structure.rigid import Rigid


def torsions_to_frames(aatype: jax.Array, backbone: Rigid, sin_cos: jax.Array) -> Rigid:
    """Compute the 8 rigid groups of each residue.

    Args:
        aatype: residue types [residues].
        backbone: frames [residues], Angstrom.
        sin_cos: torsion angles [residues, 7, 2] as (sin, cos), unit length.

    Returns:
        Global frames [residues, 8].
    """
    defaults = jnp.asarray(rc.GROUP_DEFAULT_FRAME)[aatype]  # [residues, 8, 4, 4]
    at_zero = Rigid(defaults[..., :3, :3], defaults[..., :3, 3])

    # The backbone group is not turned.
    ones, zeros = jnp.ones_like(sin_cos[:, :1, 0]), jnp.zeros_like(sin_cos[:, :1, 0])
    sin = jnp.concatenate([zeros, sin_cos[..., 0]], axis=1)
    cos = jnp.concatenate([ones, sin_cos[..., 1]], axis=1)
    one, zero = jnp.ones_like(sin), jnp.zeros_like(sin)
    rows = [[one, zero, zero], [zero, cos, -sin], [zero, sin, cos]]
    turn = jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)
    in_parent = Rigid(rigid.multiply_rotations(at_zero.rotation, turn), at_zero.translation)

    chi = [rigid.index(in_parent, (slice(None), 4))]
    for group in (5, 6, 7):
        chi.append(rigid.compose(chi[-1], rigid.index(in_parent, (slice(None), group))))
    in_backbone = Rigid(
        jnp.concatenate(
            [in_parent.rotation[:, :4], jnp.stack([frame.rotation for frame in chi], axis=1)],
            axis=1,
        ),
        jnp.concatenate(
            [in_parent.translation[:, :4], jnp.stack([frame.translation for frame in chi], axis=1)],
            axis=1,
        ),
    )
    return rigid.compose(
        Rigid(backbone.rotation[:, None], backbone.translation[:, None]), in_backbone
    )


def frames_to_atom14(aatype: jax.Array, frames: Rigid) -> jax.Array:
    """Place every atom in its rigid group.

    Args:
        aatype: residue types [residues].
        frames: global frames of the rigid groups [residues, 8].

    Returns:
        Positions [residues, 14, 3]; zero for atoms that the residue does not have.
    """
    group = jnp.asarray(rc.ATOM14_TO_GROUP)[aatype]
    # A one-hot sum, not a gather: its gradient is dense arithmetic, not a scatter.
    choice = jax.nn.one_hot(group, rc.NUM_GROUPS)[..., None]  # [residues, 14, 8, 1]
    rotation = jnp.sum(choice[..., None] * frames.rotation[:, None], axis=2)
    translation = jnp.sum(choice * frames.translation[:, None], axis=2)
    local = jnp.asarray(rc.ATOM14_POSITIONS)[aatype]
    mask = jnp.asarray(rc.ATOM14_MASK)[aatype]
    return rigid.apply(Rigid(rotation, translation), local) * mask[..., None]


def atom14_to_atom37(
    atom14: jax.Array, atom37_to_atom14: jax.Array, atom37_exists: jax.Array
) -> jax.Array:
    """Reorder per-atom data.

    Args:
        atom14: [residues, 14, ...].
        atom37_to_atom14: index of each of the 37 atoms among the 14, [residues, 37].
        atom37_exists: which atoms the residue has, [residues, 37].

    Returns:
        [residues, 37, ...], zero for atoms that the residue does not have.
    """
    return _reorder(atom14, atom37_to_atom14, atom37_exists)


def atom37_to_atom14(
    atom37: jax.Array, atom14_to_atom37: jax.Array, atom14_exists: jax.Array
) -> jax.Array:
    """Reorder per-atom data the other way; see `atom14_to_atom37`."""
    return _reorder(atom37, atom14_to_atom37, atom14_exists)


def _reorder(source: jax.Array, indices: jax.Array, exists: jax.Array) -> jax.Array:
    extra = (1,) * (source.ndim - 2)
    taken = jnp.take_along_axis(source, indices.reshape(indices.shape + extra), axis=1)
    return taken * exists.reshape(exists.shape + extra).astype(taken.dtype)


def atom_features(aatype: jax.Array) -> dict[str, jax.Array]:
    """Return the index tables and masks of each residue, under the field's feature names."""
    return {
        "residx_atom14_to_atom37": jnp.asarray(rc.ATOM14_TO_ATOM37)[aatype],
        "residx_atom37_to_atom14": jnp.asarray(rc.ATOM37_TO_ATOM14)[aatype],
        "atom14_atom_exists": jnp.asarray(rc.ATOM14_MASK)[aatype],
        "atom37_atom_exists": jnp.asarray(rc.ATOM37_MASK)[aatype],
    }
