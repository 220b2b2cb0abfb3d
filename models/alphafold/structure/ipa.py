"""Invariant point attention (Algorithm 22).

Each residue attends to others by features, by pair representation and by how near points that it
places in its own frame come to points that the others place in theirs. The result does not change
when the whole structure moves. The traps: point projections are laid out coordinate by coordinate
(all x, then all y, then all z), and masked pairs get -1e5 *added* to their logits.
"""

from __future__ import annotations

import math

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from models.alphafold.network.layers import Linear, final_linear
from models.alphafold.network.settings import Settings
from models.alphafold.structure import rigid
from models.alphafold.structure.rigid import Rigid

_MASKED_LOGIT = 1e5


def _place_points(
    act: jax.Array, num_head: int, num_points: int, name: str, frames: Rigid
) -> jax.Array:
    """Project to points and map them to global coordinates: [residues, head, point, 3]."""
    local = Linear(num_head * 3 * num_points, name=name)(act)
    local = jnp.moveaxis(local.reshape(-1, 3, num_head, num_points), 1, -1)
    broadcast = Rigid(frames.rotation[:, None, None], frames.translation[:, None, None])
    return rigid.apply(broadcast, local)


class InvariantPointAttention(hk.Module):
    """The module.

    Args:
        config: the `structure_module` tree.
        settings: shared settings.
        name: module name.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        settings: Settings,
        name: str = "invariant_point_attention",
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(
        self, inputs_1d: jax.Array, inputs_2d: jax.Array, mask: jax.Array, frames: Rigid
    ) -> jax.Array:
        """Attend.

        Args:
            inputs_1d: single representation [residues, c_s].
            inputs_2d: pair representation [residues, residues, c_z].
            mask: [residues, 1].
            frames: backbone frames [residues], internal unit of length.

        Returns:
            Update [residues, num_channel].
        """
        c = self._config
        num_residues = inputs_1d.shape[0]
        heads = c.num_head

        query = Linear(heads * c.num_scalar_qk, name="q_scalar")(inputs_1d)
        query = query.reshape(num_residues, heads, c.num_scalar_qk)
        kv = Linear(heads * (c.num_scalar_qk + c.num_scalar_v), name="kv_scalar")(inputs_1d)
        key, value = jnp.split(kv.reshape(num_residues, heads, -1), [c.num_scalar_qk], axis=-1)

        query_points = _place_points(inputs_1d, heads, c.num_point_qk, "q_point_local", frames)
        kv_points = _place_points(
            inputs_1d, heads, c.num_point_qk + c.num_point_v, "kv_point_local", frames
        )
        key_points, value_points = jnp.split(kv_points, [c.num_point_qk], axis=2)

        # Weights that give the three kinds of logits the same variance at the start.
        point_weights = hk.get_parameter(
            "trainable_point_weights",
            (heads,),
            jnp.float32,
            hk.initializers.Constant(np.log(np.exp(1.0) - 1.0)),
        )
        point_variance = max(c.num_point_qk, 1) * 9.0 / 2.0
        head_weights = jax.nn.softplus(point_weights) * math.sqrt(1.0 / (3.0 * point_variance))
        logits = jnp.einsum("qhc,khc->hqk", query, key) * math.sqrt(
            1.0 / (3.0 * max(c.num_scalar_qk, 1))
        )
        distance = query_points[:, None] - key_points[None, :]  # [query, key, head, point, xyz]
        squared = jnp.sum(jnp.square(distance), axis=(-1, -2))
        logits = logits - 0.5 * jnp.moveaxis(head_weights * squared, -1, 0)
        pair_bias = Linear(heads, name="attention_2d")(inputs_2d)
        logits = logits + math.sqrt(1.0 / 3.0) * jnp.moveaxis(pair_bias, -1, 0)
        logits = logits - _MASKED_LOGIT * (1.0 - mask * jnp.swapaxes(mask, 0, 1))
        weights = jax.nn.softmax(logits, axis=-1)

        scalars = jnp.einsum("hqk,khc->qhc", weights, value)
        global_points = jnp.einsum("hqk,khpx->qhpx", weights, value_points)
        broadcast = Rigid(frames.rotation[:, None, None], frames.translation[:, None, None])
        points = rigid.invert_apply(broadcast, global_points)
        norms = jnp.sqrt(jnp.sum(jnp.square(points), axis=-1) + 1e-8)
        pairs = jnp.einsum("hqk,qkc->qhc", weights, inputs_2d)

        flat = (num_residues, -1)
        features = [
            scalars.reshape(flat),
            *(points[..., axis].reshape(flat) for axis in range(3)),
            norms.reshape(flat),
            pairs.reshape(flat),
        ]
        output = final_linear(c.num_channel, self._settings.zero_init, "output_projection")
        return output(jnp.concatenate(features, axis=-1))
