"""Rigid frames: a rotation and a translation from local to global coordinates.

For the structure module, ground truth and losses. Products are written as sums of elementwise
products, not as matrix products. The trap this avoids: accelerators round matrix products of
float32 to fewer bits by default, which moves atoms by hundredths of an Angstrom.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rigid(NamedTuple):
    """Frames of any batch shape; a pytree."""

    rotation: jax.Array  # shape=(..., 3, 3), dtype=float32
    translation: jax.Array  # shape=(..., 3), dtype=float32


def rotate(rotation: jax.Array, vector: jax.Array) -> jax.Array:
    """Return `rotation @ vector`, with broadcasting batch axes."""
    return jnp.sum(rotation * vector[..., None, :], axis=-1)


def rotate_back(rotation: jax.Array, vector: jax.Array) -> jax.Array:
    """Return the transposed rotation times the vector, with broadcasting batch axes."""
    return jnp.sum(rotation * vector[..., :, None], axis=-2)


def multiply_rotations(first: jax.Array, second: jax.Array) -> jax.Array:
    """Return `first @ second`, with broadcasting batch axes."""
    return jnp.sum(first[..., :, :, None] * second[..., None, :, :], axis=-2)


def apply(frame: Rigid, point: jax.Array) -> jax.Array:
    """Map local points [..., 3] to global ones."""
    return rotate(frame.rotation, point) + frame.translation


def invert_apply(frame: Rigid, point: jax.Array) -> jax.Array:
    """Map global points [..., 3] to local ones."""
    return rotate_back(frame.rotation, point - frame.translation)


def compose(outer: Rigid, inner: Rigid) -> Rigid:
    """Return the frame that applies `inner` first, then `outer`."""
    return Rigid(
        multiply_rotations(outer.rotation, inner.rotation), apply(outer, inner.translation)
    )


def index(frame: Rigid, where: object) -> Rigid:
    """Index the batch axes of a frame."""
    return Rigid(frame.rotation[where], frame.translation[where])


def _unit(vector: jax.Array) -> jax.Array:
    return vector / jnp.sqrt(jnp.sum(jnp.square(vector), axis=-1, keepdims=True) + 1e-8)


def from_three_points(
    on_negative_x_axis: jax.Array, origin: jax.Array, on_xy_plane: jax.Array
) -> Rigid:
    """Make frames by Gram-Schmidt (Algorithm 21); safe, but meaningless, for equal points.

    Args:
        on_negative_x_axis: points [..., 3].
        origin: points [..., 3].
        on_xy_plane: points [..., 3], with positive y.

    Returns:
        Frames [...].
    """
    x = _unit(origin - on_negative_x_axis)
    in_plane = on_xy_plane - origin
    y = _unit(in_plane - x * jnp.sum(x * in_plane, axis=-1, keepdims=True))
    return Rigid(jnp.stack([x, y, jnp.cross(x, y)], axis=-1), origin)


def to_flat12(frame: Rigid) -> jax.Array:
    """Return [..., 12]: the rotation row by row, then the translation."""
    flat = frame.rotation.reshape((*frame.rotation.shape[:-2], 9))
    return jnp.concatenate([flat, frame.translation], axis=-1)


def from_flat12(flat: jax.Array) -> Rigid:
    """Read what `to_flat12` wrote."""
    return Rigid(flat[..., :9].reshape((*flat.shape[:-1], 3, 3)), flat[..., 9:])
