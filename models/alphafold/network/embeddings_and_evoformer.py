"""From features to the single, MSA and pair representations (Algorithm 2, lines 4 to 18).

Used by the whole model and by the trunk alone. The trap: the torsion rows of templates are
appended to the MSA only *after* the extra-MSA stack and are cut off again from the result.
"""

from __future__ import annotations

from collections.abc import Mapping

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.network import embedders
from models.alphafold.network.evoformer import (
    Activations,
    EvoformerIteration,
    Masks,
    pair_has_settled,
)
from models.alphafold.network.layers import Linear
from models.alphafold.network.settings import Settings
from models.alphafold.network.stack import run_if, scan_blocks
from models.alphafold.network.templates import TemplateEmbedding, template_torsion_rows

Batch = Mapping[str, jax.Array]

EXTRA_MSA_STACK = "extra_msa_stack"
EVOFORMER_ITERATION = "evoformer_iteration"


class EmbeddingsAndEvoformer(hk.Module):
    """Embedders, template stack, extra-MSA stack and Evoformer.

    Args:
        config: the `embeddings_and_evoformer` tree.
        settings: shared settings.
        name: `evoformer` in published parameters.
    """

    def __init__(
        self, config: ml_collections.ConfigDict, settings: Settings, name: str = "evoformer"
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(self, batch: Batch) -> dict[str, jax.Array]:
        """Run the trunk.

        Args:
            batch: features without a batch axis.

        Returns:
            `single` [residues, c_s], `pair` [residues, residues, c_z], `msa` [rows, residues, c_m]
            and `msa_first_row` [residues, c_m] in float32; `evoformer_blocks_run`, int32 scalar.
        """
        c, settings = self._config, self._settings
        num_rows = batch["msa_feat"].shape[0]
        seq_mask = batch["seq_mask"]
        pair_mask = seq_mask[:, None] * seq_mask[None, :]

        msa, pair = embedders.embed_input(batch, c, settings)
        msa, pair = embedders.embed_recycled(batch, msa, pair, c, settings)
        if c.max_relative_feature:
            pair = pair + embedders.embed_relative_position(batch["residue_index"], c, settings)

        if c.template.enabled:
            template_batch = {k: v for k, v in batch.items() if k.startswith("template_")}
            templates = TemplateEmbedding(c.template, settings, name="template_embedding")
            pair = pair + templates(pair, template_batch, pair_mask)

        pair = _update_from_extra_msa(batch, pair, pair_mask, c, settings)

        msa_mask = batch["msa_mask"]
        if c.template.enabled and c.template.embed_torsion_angles:
            rows, rows_mask = template_torsion_rows(batch, c, settings)
            msa = jnp.concatenate([msa, rows])
            msa_mask = jnp.concatenate([msa_mask, rows_mask.astype(msa_mask.dtype)])

        def block(activations: Activations, masks: Masks) -> Activations:
            module = EvoformerIteration(c.evoformer, settings, False, EVOFORMER_ITERATION)
            return module(activations, masks)

        threshold = settings.halt_threshold
        activations, blocks_run = scan_blocks(
            block,
            c.evoformer_num_block,
            {"msa": msa, "pair": pair},
            {"msa": msa_mask, "pair": pair_mask},
            settings,
            module=EVOFORMER_ITERATION,
            converged=(lambda old, new: pair_has_settled(old, new, threshold))
            if threshold > 0
            else None,
        )
        msa, pair = activations["msa"], activations["pair"]
        single = Linear(c.seq_channel, name="single_activations")(msa[0])
        return {
            "single": single.astype(jnp.float32),
            "pair": pair.astype(jnp.float32),
            "msa": msa[:num_rows].astype(jnp.float32),
            "msa_first_row": msa[0].astype(jnp.float32),
            "evoformer_blocks_run": blocks_run,
        }


def _update_from_extra_msa(
    batch: Batch,
    pair: jax.Array,
    pair_mask: jax.Array,
    config: ml_collections.ConfigDict,
    settings: Settings,
) -> jax.Array:
    """Algorithm 18: update the pair representation from the extra alignment rows."""
    if config.extra_msa_stack_num_block == 0:
        return pair
    names = ("extra_msa", "extra_msa_mask", "extra_has_deletion", "extra_deletion_value")
    extra_batch = {name: batch[name] for name in names}

    def block(activations: Activations, masks: Masks) -> Activations:
        module = EvoformerIteration(config.evoformer, settings, True, EXTRA_MSA_STACK)
        return module(activations, masks)

    def update(extra_batch: Batch, pair: jax.Array, pair_mask: jax.Array) -> jax.Array:
        activations, _ = scan_blocks(
            block,
            config.extra_msa_stack_num_block,
            {"msa": embedders.embed_extra_msa(extra_batch, config, settings), "pair": pair},
            {"msa": extra_batch["extra_msa_mask"], "pair": pair_mask},
            settings,
            module=EXTRA_MSA_STACK,
        )
        return activations["pair"]

    if settings.extra_msa_min_depth <= 0:
        return update(extra_batch, pair, pair_mask)
    depth = jnp.sum(jnp.any(extra_batch["extra_msa_mask"] > 0, axis=-1))
    return run_if(
        depth >= settings.extra_msa_min_depth,
        update,
        (extra_batch, pair, pair_mask),
        otherwise=lambda extra_batch, pair, pair_mask: pair,
        settings=settings,
    )
