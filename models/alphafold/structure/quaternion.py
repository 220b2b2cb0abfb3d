"""Quaternions for the backbone update (Algorithm 23), used by the structure module only.

A backbone frame is 7 numbers: quaternion (w, x, y, z), then translation. The trap: a quaternion is
used as it is given, never normalised on reading, also in gradients; only an update normalises.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.alphafold.structure import rigid
from models.alphafold.structure.rigid import Rigid


class Affine(NamedTuple):
    """Frames as quaternion and translation, with the rotation kept beside them."""

    quaternion: jax.Array  # shape=(..., 4), dtype=float32
    rotation: jax.Array  # shape=(..., 3, 3), dtype=float32
    translation: jax.Array  # shape=(..., 3), dtype=float32

    @property
    def rigid(self) -> Rigid:
        """The frame without its quaternion."""
        return Rigid(self.rotation, self.translation)

    def to_tensor(self) -> jax.Array:
        """Return [..., 7]."""
        return jnp.concatenate([self.quaternion, self.translation], axis=-1)


def to_rotation(quaternion: jax.Array) -> jax.Array:
    """Return the rotation matrices [..., 3, 3] of quaternions [..., 4] (homogeneous form)."""
    w, x, y, z = jnp.moveaxis(quaternion, -1, 0)
    rows = [
        [w * w + x * x - y * y - z * z, 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), w * w - x * x + y * y - z * z, 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), w * w - x * x - y * y + z * z],
    ]
    return jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)


def from_tensor(tensor: jax.Array) -> Affine:
    """Read frames [..., 7]."""
    quaternion, translation = tensor[..., :4], tensor[..., 4:]
    return Affine(quaternion, to_rotation(quaternion), translation)


def identity(batch_shape: tuple[int, ...]) -> Affine:
    """Return frames at the origin ("black hole" start of the structure module)."""
    quaternion = jnp.broadcast_to(jnp.array([1.0, 0.0, 0.0, 0.0]), (*batch_shape, 4))
    rotation = jnp.broadcast_to(jnp.eye(3), (*batch_shape, 3, 3))
    return Affine(quaternion, rotation, jnp.zeros((*batch_shape, 3)))


def update(affine: Affine, change: jax.Array) -> Affine:
    """Compose frames with a small local change (Algorithm 23).

    Args:
        affine: frames [...].
        change: [..., 6]: the vector part of a quaternion with real part 1, then a translation in
            the local frame.

    Returns:
        New frames with unit quaternions.
    """
    w, x, y, z = jnp.moveaxis(affine.quaternion, -1, 0)
    b, c, d = jnp.moveaxis(change[..., :3], -1, 0)
    product = jnp.stack(
        [
            w - x * b - y * c - z * d,
            x + w * b + y * d - z * c,
            y + w * c - x * d + z * b,
            z + w * d + x * c - y * b,
        ],
        axis=-1,
    )
    quaternion = product / jnp.linalg.norm(product, axis=-1, keepdims=True)
    translation = affine.translation + rigid.rotate(affine.rotation, change[..., 3:])
    return Affine(quaternion, to_rotation(quaternion), translation)


def stop_rotation_gradient(affine: Affine) -> Affine:
    """Cut gradients through the orientation (Algorithm 20, line 20)."""
    stop = jax.lax.stop_gradient
    return Affine(stop(affine.quaternion), stop(affine.rotation), affine.translation)


def scale_translation(affine: Affine, factor: float) -> Affine:
    """Change the unit of length."""
    return affine._replace(translation=affine.translation * factor)
