"""Template stack and template pointwise attention (Algorithms 2, 16 and 17).

Each template's pair features go through a small pair stack of their own; every pair position then
attends over the templates, and the templates' torsion angles become extra MSA rows. The trap:
templates are padded, and with none present the update is zero although the stack still ran, unless
`skip_absent_templates` is set.
"""

from __future__ import annotations

from collections.abc import Mapping

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.network.attention import Attention
from models.alphafold.network.chunking import map_rows
from models.alphafold.network.embedders import distance_bins
from models.alphafold.network.evoformer import apply_dropout
from models.alphafold.network.layers import LayerNorm, Linear
from models.alphafold.network.msa import Transition
from models.alphafold.network.settings import Settings
from models.alphafold.network.stack import lift_function, run_if, scan_blocks
from models.alphafold.network.triangle import TriangleAttention, TriangleMultiplication
from models.alphafold.structure import residue_constants as rc
from models.alphafold.structure import rigid
from models.alphafold.structure.torsions import torsion_angles

Batch = Mapping[str, jax.Array]

_NUM_TEMPLATE_CLASSES = 22  # 20 residues, unknown, gap
_BLOCK_SCOPE = "__layer_stack_no_state"  # as in the published parameters


class TemplatePairStack(hk.Module):
    """Algorithm 16: triangle updates of one template's pair representation."""

    def __init__(self, config: ml_collections.ConfigDict, settings: Settings, name: str) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(self, pair: jax.Array, pair_mask: jax.Array) -> jax.Array:
        """Return the new pair representation [residues, residues, c_t]."""
        c, settings = self._config, self._settings

        def block(act: jax.Array, mask: jax.Array) -> jax.Array:
            for name in ("triangle_attention_starting_node", "triangle_attention_ending_node"):
                update = TriangleAttention(c[name], settings, name)(act, mask)
                act = act + apply_dropout(update, c[name], settings)
            for name in ("triangle_multiplication_outgoing", "triangle_multiplication_incoming"):
                update = TriangleMultiplication(c[name], settings, name)(act, mask)
                act = act + apply_dropout(update, c[name], settings)
            update = Transition(c.pair_transition, settings, "pair_transition")(act, mask)
            return act + apply_dropout(update, c.pair_transition, settings)

        out, _ = scan_blocks(block, c.num_block, pair, pair_mask, settings, scope=_BLOCK_SCOPE)
        return out


def _pair_features(template: Batch, config: ml_collections.ConfigDict) -> jax.Array:
    """Features [residues, residues, 88] of one template (section 1.2.9, table 1).

    Distances are those of whatever stands for an absent C-beta, as in the published model: only
    residues without a backbone frame are masked.
    """
    beta_mask = template["template_pseudo_beta_mask"]
    beta_pair_mask = beta_mask[:, None] * beta_mask[None, :]
    bins = distance_bins(
        template["template_pseudo_beta"],
        min_bin=config.dgram_features.min_bin,
        max_bin=config.dgram_features.max_bin,
        num_bins=config.dgram_features.num_bins,
    )
    residues = jax.nn.one_hot(template["template_aatype"], _NUM_TEMPLATE_CLASSES)
    num_residues = residues.shape[0]
    square = (num_residues, num_residues)

    n, ca, c = (rc.ATOM_ORDER[name] for name in ("N", "CA", "C"))
    atom_mask = template["template_all_atom_masks"]
    frame_mask = atom_mask[:, n] * atom_mask[:, ca] * atom_mask[:, c]
    frame_pair_mask = frame_mask[:, None] * frame_mask[None, :]
    if config.use_template_unit_vector:
        atoms = template["template_all_atom_positions"]
        # C on the positive x axis, as in the backbone frames of the structure module.
        mirrored_c = 2.0 * atoms[:, ca] - atoms[:, c]
        frames = rigid.from_three_points(mirrored_c, atoms[:, ca], atoms[:, n])
        row = rigid.Rigid(frames.rotation[:, None], frames.translation[:, None])
        local = rigid.invert_apply(row, frames.translation[None, :])
        unit = local * jax.lax.rsqrt(1e-6 + jnp.sum(jnp.square(local), axis=-1, keepdims=True))
        unit = unit * frame_pair_mask[..., None]
    else:
        unit = jnp.zeros((*square, 3))

    features = [
        bins,
        beta_pair_mask[..., None],
        jnp.broadcast_to(residues[None, :], (*square, _NUM_TEMPLATE_CLASSES)),
        jnp.broadcast_to(residues[:, None], (*square, _NUM_TEMPLATE_CLASSES)),
        unit,
        frame_pair_mask[..., None],
    ]
    return jnp.concatenate(features, axis=-1) * frame_pair_mask[..., None]


class SingleTemplateEmbedding(hk.Module):
    """Pair representation [residues, residues, c_t] of one template."""

    def __init__(self, config: ml_collections.ConfigDict, settings: Settings, name: str) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(self, template: Batch, pair_mask: jax.Array) -> jax.Array:
        """Return the representation; `template` has no template axis."""
        c, settings = self._config, self._settings
        stack = c.template_pair_stack
        channels = stack.triangle_attention_ending_node.value_dim
        features = settings.cast(_pair_features(template, c))
        act = Linear(channels, "relu", name="embedding2d")(features)
        act = TemplatePairStack(stack, settings, "template_pair_stack")(act, pair_mask)
        return LayerNorm("output_layer_norm")(act)


def _update_from_templates(
    pair: jax.Array,
    template_batch: Batch,
    pair_mask: jax.Array,
    config: ml_collections.ConfigDict,
    settings: Settings,
) -> jax.Array:
    """Embed every template, then let each pair attend over them (Algorithm 17)."""
    template_mask = template_batch["template_mask"]
    num_templates = template_mask.shape[0]
    num_residues, _, channels = pair.shape

    def embed(template: Batch, pair_mask: jax.Array) -> jax.Array:
        name = "single_template_embedding"
        return SingleTemplateEmbedding(config, settings, name)(template, pair_mask)

    first = jax.tree.map(lambda x: x[0], dict(template_batch))
    params, apply = lift_function(embed, first, pair_mask)
    rngs = jax.random.split(hk.next_rng_key(), num_templates) if settings.uses_dropout else None
    _, templates = jax.lax.scan(
        lambda carry, xs: (carry, apply(params, xs[1], xs[0], pair_mask)),
        None,
        (dict(template_batch), rngs),
    )  # [template, residue, residue, c_t]

    attention = Attention(config.attention, settings, channels)

    def attend(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        pair_rows, template_rows = rows
        query = pair_rows.reshape(-1, 1, channels)
        keys = template_rows.reshape(-1, num_templates, template_rows.shape[-1])
        mask = jnp.broadcast_to(template_mask[None], keys.shape[:2])
        return attention(query, keys, mask).reshape(-1, num_residues, channels)

    # [residue, residue, template, c_t]: each pair attends over the templates.
    return map_rows(attend, (pair, jnp.moveaxis(templates, 0, 2)), settings)


class TemplateEmbedding(hk.Module):
    """Update [residues, residues, c_z] of the pair representation from all templates.

    Args:
        config: the `template` tree.
        settings: shared settings.
        name: module name.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        settings: Settings,
        name: str = "template_embedding",
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(self, pair: jax.Array, template_batch: Batch, pair_mask: jax.Array) -> jax.Array:
        """Compute the update.

        Args:
            pair: pair representation, the query.
            template_batch: `template_*` features with a leading template axis, of any length.
            pair_mask: [residues, residues].

        Returns:
            The update; zero if no template is present.
        """
        config, settings = self._config, self._settings
        if template_batch["template_mask"].shape[0] == 0:
            if not hk.running_init():
                return jnp.zeros_like(pair)
            # Parameters do not depend on how many templates there are.
            template_batch = {
                name: jnp.zeros((1, *value.shape[1:]), value.dtype)
                for name, value in template_batch.items()
            }
        present = jnp.sum(template_batch["template_mask"]) > 0
        args = (pair, dict(template_batch), pair_mask)
        if not settings.skip_absent_templates:
            return _update_from_templates(*args, config, settings) * present.astype(pair.dtype)
        return run_if(
            present,
            lambda *xs: _update_from_templates(*xs, config, settings),
            args,
            otherwise=lambda pair, *_: jnp.zeros_like(pair),
            settings=settings,
        )


def template_torsion_rows(
    batch: Batch, config: ml_collections.ConfigDict, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """Make MSA rows from the templates' residues and torsion angles.

    Args:
        batch: `template_*` features.
        config: the `embeddings_and_evoformer` tree.
        settings: shared settings; without `zero_init` undefined angles are (1, 0).

    Returns:
        Rows [templates, residues, c_m] and their mask [templates, residues].
    """
    aatype = batch["template_aatype"]
    torsions = torsion_angles(
        aatype,
        batch["template_all_atom_positions"],
        batch["template_all_atom_masks"],
        placeholder=not settings.zero_init,
    )
    features = jnp.concatenate(
        [
            jax.nn.one_hot(aatype, _NUM_TEMPLATE_CLASSES),
            torsions.sin_cos.reshape(*aatype.shape, 14),
            torsions.alternative_sin_cos.reshape(*aatype.shape, 14),
            torsions.mask,
        ],
        axis=-1,
    )
    embed = Linear(config.msa_channel, "relu", name="template_single_embedding")
    project = Linear(config.msa_channel, name="template_projection")
    rows = project(jax.nn.relu(embed(settings.cast(features))))
    return rows, torsions.mask[:, :, 2]
