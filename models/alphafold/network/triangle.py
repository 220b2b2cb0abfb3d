"""Triangle updates of the pair representation (Algorithms 11 to 14).

The edge (i, j) is updated from the edges (i, k) and (j, k), either as a product or as attention.
Each module returns the update. The trap: "incoming" and "ending node" are the same computation on
the transposed edges, but the two triangle multiplications swap left and right as well.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.network.attention import Attention, pair_bias_weights
from models.alphafold.network.chunking import map_rows
from models.alphafold.network.layers import LayerNorm, Linear, final_linear
from models.alphafold.network.settings import Settings

_OUTGOING = "ikc,jkc->ijc"
_INCOMING = "kjc,kic->ijc"


class TriangleAttention(hk.Module):
    """Algorithms 13 and 14: attention among the edges of one node.

    Args:
        config: `num_head`, `gating`, `orientation` (`per_row` starting, `per_column` ending node).
        settings: shared settings.
        name: module name.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, settings: Settings, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(self, pair_act: jax.Array, pair_mask: jax.Array) -> jax.Array:
        """Return the update [residues, residues, c_z]."""
        ending = self._config.orientation == "per_column"
        if ending:
            pair_act, pair_mask = jnp.swapaxes(pair_act, 0, 1), jnp.swapaxes(pair_mask, 0, 1)
        pair_act = LayerNorm("query_norm")(pair_act)
        weights = pair_bias_weights(pair_act.shape[-1], self._config.num_head, pair_act.dtype)
        bias = jnp.einsum("qkc,ch->hqk", pair_act, weights)
        attention = Attention(self._config, self._settings, pair_act.shape[-1])
        out = map_rows(
            lambda rows: attention(rows[0], rows[0], rows[1], bias),
            (pair_act, pair_mask),
            self._settings,
        )
        return jnp.swapaxes(out, 0, 1) if ending else out


class TriangleMultiplication(hk.Module):
    """Algorithms 11 and 12: gated products of the other two edges of every triangle.

    Args:
        config: `num_intermediate_channel`, `equation`, and optionally `fuse_projection_weights`
            (left and right projections in one matrix, as in the later published weights).
        settings: shared settings.
        name: module name.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, settings: Settings, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        if config.equation not in (_OUTGOING, _INCOMING):
            raise ValueError(
                f"equation {config.equation!r} must be {_OUTGOING!r} or {_INCOMING!r}."
            )
        self._config = config
        self._settings = settings

    def __call__(self, pair_act: jax.Array, pair_mask: jax.Array) -> jax.Array:
        """Return the update [residues, residues, c_z]."""
        num_channel = self._config.num_intermediate_channel
        num_output = pair_act.shape[-1]
        fused = self._config.get("fuse_projection_weights", False)
        act = LayerNorm("left_norm_input" if fused else "layer_norm_input")(pair_act)
        mask = pair_mask.astype(act.dtype)[..., None]

        def gate(num_gates: int, name: str) -> jax.Array:
            return jax.nn.sigmoid(Linear(num_gates, "zeros", bias_init=1.0, name=name)(act))

        if fused:
            both = mask * Linear(2 * num_channel, name="projection")(act)
            left, right = jnp.split(both * gate(2 * num_channel, "gate"), 2, axis=-1)
        else:
            left = mask * Linear(num_channel, name="left_projection")(act)
            right = mask * Linear(num_channel, name="right_projection")(act)
            left = left * gate(num_channel, "left_gate")
            right = right * gate(num_channel, "right_gate")

        center_norm = LayerNorm("center_norm" if fused else "center_layer_norm")
        project = final_linear(num_output, self._settings.zero_init, "output_projection")
        if self._config.equation == _OUTGOING:
            edges, others = left, right
        else:
            edges, others = jnp.swapaxes(right, 0, 1), jnp.swapaxes(left, 0, 1)
        update = map_rows(
            lambda rows: project(center_norm(jnp.einsum("ikc,jkc->ijc", rows, others))),
            edges,
            self._settings,
        )
        return update * gate(num_output, "gating_linear")
