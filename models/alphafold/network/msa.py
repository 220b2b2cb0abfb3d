"""Updates of the MSA representation and the outer product mean (Algorithms 7 to 10 and 19).

Each module returns the update; the residual addition and dropout are in `evoformer.py`. Shapes: MSA
[rows, residues, c_m], pair [residues, residues, c_z]. The trap: the outer product mean divides by
the number of rows where *both* residues are present, so fully masked pairs hold bias / 1e-3.
"""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.network.attention import Attention, GlobalAttention, pair_bias_weights
from models.alphafold.network.chunking import map_rows
from models.alphafold.network.layers import LayerNorm, Linear, final_initializer, final_linear
from models.alphafold.network.settings import Settings


class _Update(hk.Module):
    """A module that holds its configuration and the shared settings."""

    def __init__(
        self, config: ml_collections.ConfigDict, settings: Settings, name: str | None = None
    ) -> None:
        super().__init__(name=name)
        self.config = config
        self.settings = settings


class MSARowAttentionWithPairBias(_Update):
    """Algorithm 7: each row attends along the sequence, biased by the pair representation."""

    def __call__(self, msa_act: jax.Array, msa_mask: jax.Array, pair_act: jax.Array) -> jax.Array:
        """Return the update [rows, residues, c_m]."""
        query_norm = LayerNorm("query_norm")
        pair = LayerNorm("feat_2d_norm")(pair_act)
        weights = pair_bias_weights(pair.shape[-1], self.config.num_head, pair.dtype)
        bias = jnp.einsum("qkc,ch->hqk", pair, weights)
        attention = Attention(self.config, self.settings, msa_act.shape[-1])

        def attend(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
            act, mask = rows
            act = query_norm(act)
            return attention(act, act, mask, bias)

        return map_rows(attend, (msa_act, msa_mask), self.settings)


class MSAColumnAttention(_Update):
    """Algorithm 8: each residue attends along its column of the alignment."""

    def __call__(self, msa_act: jax.Array, msa_mask: jax.Array) -> jax.Array:
        """Return the update [rows, residues, c_m]."""
        query_norm = LayerNorm("query_norm")
        attention = Attention(self.config, self.settings, msa_act.shape[-1])

        def attend(columns: tuple[jax.Array, jax.Array]) -> jax.Array:
            act, mask = columns
            act = query_norm(act)
            return attention(act, act, mask)

        columns = (jnp.swapaxes(msa_act, 0, 1), jnp.swapaxes(msa_mask, 0, 1))
        return jnp.swapaxes(map_rows(attend, columns, self.settings), 0, 1)


class MSAColumnGlobalAttention(_Update):
    """Algorithm 19: column attention with one averaged query, for the extra MSA."""

    def __call__(self, msa_act: jax.Array, msa_mask: jax.Array) -> jax.Array:
        """Return the update [rows, residues, c_m]; without gating one row for all."""
        query_norm = LayerNorm("query_norm")
        attention = GlobalAttention(self.config, self.settings, msa_act.shape[-1])

        def attend(columns: tuple[jax.Array, jax.Array]) -> jax.Array:
            act, mask = columns
            return attention(query_norm(act), mask)

        columns = (jnp.swapaxes(msa_act, 0, 1), jnp.swapaxes(msa_mask, 0, 1))
        return jnp.swapaxes(map_rows(attend, columns, self.settings), 0, 1)


class Transition(_Update):
    """Algorithms 9 and 15: a two-layer network on every position of the MSA or pair."""

    def __call__(self, act: jax.Array, mask: jax.Array) -> jax.Array:
        """Return the update, shaped like `act`."""
        del mask  # Masked positions are updated too; nothing unmasked ever reads them.
        channels = act.shape[-1]
        hidden = int(channels * self.config.num_intermediate_factor)
        norm = LayerNorm("input_layer_norm")
        expand = Linear(hidden, "relu", name="transition1")
        contract = final_linear(channels, self.settings.zero_init, "transition2")
        return map_rows(lambda rows: contract(jax.nn.relu(expand(norm(rows)))), act, self.settings)


class OuterProductMean(_Update):
    """Algorithm 10: what two columns of the alignment have in common, for each pair.

    Args:
        config: `num_outer_channel`.
        settings: shared settings.
        num_output_channel: channels of the pair representation.
        name: module name.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        settings: Settings,
        num_output_channel: int,
        name: str = "outer_product_mean",
    ) -> None:
        super().__init__(config, settings, name=name)
        self._num_output_channel = num_output_channel

    def __call__(self, act: jax.Array, mask: jax.Array) -> jax.Array:
        """Return the update [residues, residues, c_z]."""
        mask = mask.astype(act.dtype)
        num_outer = self.config.num_outer_channel
        act = LayerNorm("layer_norm_input")(act)
        left = mask[..., None] * Linear(num_outer, name="left_projection")(act)
        right = mask[..., None] * Linear(num_outer, name="right_projection")(act)
        init = final_initializer(num_outer * num_outer, self.settings.zero_init)
        shape = (num_outer, num_outer, self._num_output_channel)
        output_w = hk.get_parameter("output_w", shape, jnp.float32, init).astype(act.dtype)
        output_b = hk.get_parameter(
            "output_b", shape[-1:], jnp.float32, hk.initializers.Constant(0.0)
        ).astype(act.dtype)

        def products(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
            left_rows, mask_rows = rows  # [residue, row, outer], [residue, row]
            outer = jnp.einsum("iac,ajd->icdj", left_rows, right)
            total = jnp.einsum("icdj,cde->ije", outer, output_w) + output_b
            count = jnp.einsum("ia,aj->ij", mask_rows, mask)
            return total / (1e-3 + count[..., None])

        rows = (jnp.swapaxes(left, 0, 1), jnp.swapaxes(mask, 0, 1))
        return map_rows(products, rows, self.settings)
