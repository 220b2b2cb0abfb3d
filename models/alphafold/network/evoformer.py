"""One Evoformer block and the stacks made of it (Algorithms 6 and 18).

The block couples the MSA representation with the pair representation; the extra-MSA stack is the
same block with global column attention and fewer channels. The trap: the outer product mean comes
after the MSA updates and before the triangle updates, unless its `first` option says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.network.layers import dropout
from models.alphafold.network.msa import (
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttentionWithPairBias,
    OuterProductMean,
    Transition,
)
from models.alphafold.network.settings import Settings
from models.alphafold.network.triangle import TriangleAttention, TriangleMultiplication

Activations = dict[str, jax.Array]
Masks = Mapping[str, jax.Array]


def apply_dropout(
    update: jax.Array, config: ml_collections.ConfigDict, settings: Settings
) -> jax.Array:
    """Drop entries of a residual update, one draw shared along its rows or columns."""
    shared_axis = None
    if config.get("shared_dropout", False):
        shared_axis = 1 if config.get("orientation", "per_row") == "per_column" else 0
    return dropout(
        update, config.dropout_rate, active=settings.uses_dropout, shared_axis=shared_axis
    )


class EvoformerIteration(hk.Module):
    """One block.

    Args:
        config: a subtree for each update.
        settings: shared settings.
        is_extra_msa: whether this is a block of the extra-MSA stack.
        name: module name; `evoformer_iteration` or `extra_msa_stack` in published parameters.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        settings: Settings,
        is_extra_msa: bool,
        name: str = "evoformer_iteration",
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings
        self._is_extra_msa = is_extra_msa

    def __call__(self, activations: Activations, masks: Masks) -> Activations:
        """Update both representations.

        Args:
            activations: `msa` [rows, residues, c_m] and `pair` [residues, residues, c_z].
            masks: `msa` [rows, residues] and `pair` [residues, residues].

        Returns:
            The new `msa` and `pair`.
        """
        c, settings = self._config, self._settings
        msa, pair = activations["msa"], activations["pair"]
        msa_mask, pair_mask = masks["msa"], masks["pair"]

        def dropped(update: jax.Array, name: str) -> jax.Array:
            return apply_dropout(update, c[name], settings)

        def outer_product_mean() -> jax.Array:
            name = "outer_product_mean"
            module = OuterProductMean(c[name], settings, pair.shape[-1], name=name)
            return dropped(module(msa, msa_mask), name)

        if c.outer_product_mean.get("first", False):
            pair = pair + outer_product_mean()

        name = "msa_row_attention_with_pair_bias"
        row_attention = MSARowAttentionWithPairBias(c[name], settings, name=name)
        msa = msa + dropped(row_attention(msa, msa_mask, pair), name)

        column = MSAColumnGlobalAttention if self._is_extra_msa else MSAColumnAttention
        suffix = "msa_column_global_attention" if self._is_extra_msa else "msa_column_attention"
        column_attention = column(c.msa_column_attention, settings, name=suffix)
        msa = msa + dropped(column_attention(msa, msa_mask), "msa_column_attention")

        transition = Transition(c.msa_transition, settings, name="msa_transition")
        msa = msa + dropped(transition(msa, msa_mask), "msa_transition")

        if not c.outer_product_mean.get("first", False):
            pair = pair + outer_product_mean()

        for name in ("triangle_multiplication_outgoing", "triangle_multiplication_incoming"):
            pair = pair + dropped(
                TriangleMultiplication(c[name], settings, name)(pair, pair_mask), name
            )
        for name in ("triangle_attention_starting_node", "triangle_attention_ending_node"):
            pair = pair + dropped(TriangleAttention(c[name], settings, name)(pair, pair_mask), name)

        transition = Transition(c.pair_transition, settings, name="pair_transition")
        pair = pair + dropped(transition(pair, pair_mask), "pair_transition")
        return {"msa": msa, "pair": pair}


def pair_has_settled(before: Activations, after: Activations, threshold: float) -> jax.Array:
    """Return whether a block changed the pair representation by less than `threshold` of its norm.

    Args:
        before: activations given to a block.
        after: activations it returned.
        threshold: fraction of the norm.

    Returns:
        Boolean scalar; carries no gradient.
    """
    old = jax.lax.stop_gradient(before["pair"]).astype(jnp.float32)
    new = jax.lax.stop_gradient(after["pair"]).astype(jnp.float32)
    return jnp.sum(jnp.square(new - old)) < threshold**2 * jnp.sum(jnp.square(old))
