"""The whole model: trunk, structure module, heads, losses and recycling (Algorithms 2, 30 and 31).

The batch carries a leading axis of recycling iterations: iteration k reads slice k, so that the MSA
can be sampled anew each time. The traps: only the last iteration has a gradient, so all before it
run on parameters without gradient; and the number of iterations that run may be smaller than the
axis is long (`num_iter_recycling`), in which case the *first* slices are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.losses import (
    chi,
    distogram,
    fape,
    masked_msa,
    pae,
    plddt,
    resolved,
    violations,
)
from models.alphafold.network import heads
from models.alphafold.network.embeddings_and_evoformer import EmbeddingsAndEvoformer
from models.alphafold.network.settings import Settings
from models.alphafold.network.stack import lift_function
from models.alphafold.structure import residue_constants as rc
from models.alphafold.structure import rigid
from models.alphafold.structure.structure_module import StructureModule

Batch = Mapping[str, jax.Array]
Recycled = dict[str, jax.Array]
Output = dict[str, Any]


def structure_losses(
    out: Mapping[str, jax.Array],
    batch: Batch,
    config: ml_collections.ConfigDict,
    settings: Settings,
) -> Output:
    """Compute the losses of the structure module (section 1.9).

    Args:
        out: what `StructureModule` returned.
        batch: features and ground truth.
        config: the `structure_module` tree.
        settings: chunking.

    Returns:
        `loss`, its parts `backbone_fape`, `backbone_fape_last_layer`, `sidechain_fape`,
        `chi_loss`, `angle_norm_loss` and `violation_loss`, `alt_naming_is_better`, `violations`
        and `metrics`.
    """
    chunk = settings.attention_chunk_size
    atom14 = out["final_atom14_positions"]
    backbone, last_layer = fape.backbone_fape(out["traj"], batch, config)
    renamed = fape.rename_ground_truth(atom14, batch, chunk)
    frames = rigid.from_flat12(out["frames"][-1])
    side_chains = fape.sidechain_fape(frames, out["atom14_pos"][-1], renamed, batch, config, chunk)
    chi_losses = chi.supervised_chi_loss(out["unnormalized_angles_sin_cos"], batch)

    fraction = config.sidechain.weight_frac
    loss = (1.0 - fraction) * backbone + fraction * side_chains
    loss = loss + config.chi_weight * chi_losses.chi_loss
    loss = loss + config.angle_norm_weight * chi_losses.angle_norm_loss
    result: Output = {
        "backbone_fape": backbone,
        "backbone_fape_last_layer": last_layer,
        "sidechain_fape": side_chains,
        **chi_losses._asdict(),
        "alt_naming_is_better": renamed.alt_naming_is_better,
    }
    weight = config.structural_violation_loss_weight
    if weight or config.compute_in_graph_metrics:
        found = violations.find_violations(atom14, batch, config, chunk)
        result["violations"] = found
        result["violation_loss"] = violations.violation_loss(found, batch["atom14_atom_exists"])
        if weight:
            loss = loss + weight * result["violation_loss"]
        if config.compute_in_graph_metrics:
            result["metrics"] = violations.violation_metrics(found, atom14, batch)
    return {**result, "loss": loss}


def _head_losses(out: Output, batch: Batch, config: ml_collections.ConfigDict) -> None:
    """Add `loss` to each head's output."""
    atoms = out["structure_module"]["final_atom_positions"]
    for name, head in out.items():
        if name == "masked_msa":
            head["loss"] = masked_msa.masked_msa_loss(
                head["logits"], batch["true_msa"], batch["bert_mask"]
            )
        elif name == "distogram":
            head["loss"], head["true_dist"] = distogram.distogram_loss(
                head["logits"], head["bin_edges"], batch["pseudo_beta"], batch["pseudo_beta_mask"]
            )
        elif name == "predicted_lddt":
            head["loss"], head["lddt_ca"] = plddt.predicted_lddt_loss(
                head["logits"], atoms, batch, config[name]
            )
        elif name == "experimentally_resolved":
            head["loss"] = resolved.experimentally_resolved_loss(
                head["logits"], batch, config[name]
            )
        elif name == "predicted_aligned_error":
            head["loss"] = pae.predicted_aligned_error_loss(
                head["logits"],
                head["breaks"],
                out["structure_module"]["final_affines"],
                batch,
                config[name],
            )


_HEADS = {
    "masked_msa": (heads.MaskedMsaHead, "masked_msa_head"),
    "distogram": (heads.DistogramHead, "distogram_head"),
    "predicted_lddt": (heads.PredictedLddtHead, "predicted_lddt_head"),
    "predicted_aligned_error": (heads.PredictedAlignedErrorHead, "predicted_aligned_error_head"),
    "experimentally_resolved": (heads.ExperimentallyResolvedHead, "experimentally_resolved_head"),
}


class AlphaFoldIteration(hk.Module):
    """One pass through the network.

    Args:
        config: the `model` tree.
        settings: shared settings.
        name: module name.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        settings: Settings,
        name: str = "alphafold_iteration",
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings

    def __call__(
        self, batch: Batch, recycled: Recycled, *, compute_heads: bool, compute_loss: bool
    ) -> Output:
        """Run the network once.

        Args:
            batch: features without recycling axis.
            recycled: outputs of the iteration before, see `recycled_outputs`.
            compute_heads: run the heads other than the structure module.
            compute_loss: compute losses too.

        Returns:
            `representations`, one entry per head and, with losses, `total_loss`. Heads with weight
            0 are left out, except `experimentally_resolved`, which published parameters include.
        """
        c, settings = self._config, self._settings
        trunk = EmbeddingsAndEvoformer(c.embeddings_and_evoformer, settings, name="evoformer")
        representations = dict(trunk({**batch, **recycled}))
        blocks_run = representations.pop("evoformer_blocks_run")

        structure = StructureModule(c.heads.structure_module, settings)(representations, batch)
        representations["structure_module"] = structure["act"]
        out: Output = {"structure_module": structure}
        if compute_heads:
            for key, (head, name) in _HEADS.items():
                optional = key == "predicted_aligned_error"
                if key in c.heads and not (optional and not c.heads[key].weight):
                    out[key] = head(c.heads[key], settings, name)(representations)

        total = jnp.zeros(())
        if compute_loss:
            losses = structure_losses(structure, batch, c.heads.structure_module, settings)
            out["structure_module"] = {**structure, **losses}
            _head_losses(out, batch, c.heads)
            for key, value in out.items():
                total = total + c.heads[key].weight * value["loss"]
        result = {**out, "representations": representations, "evoformer_blocks_run": blocks_run}
        return {**result, "total_loss": total} if compute_loss else result


def initial_recycled(batch: Batch, config: ml_collections.ConfigDict) -> Recycled:
    """Return what the first iteration recycles: zeros.

    Args:
        batch: features without recycling axis.
        config: the `embeddings_and_evoformer` tree.
    """
    num_residues = batch["aatype"].shape[0]
    recycled = {}
    if config.recycle_pos:
        recycled["prev_pos"] = jnp.zeros((num_residues, rc.NUM_ATOM37, 3))
    if config.recycle_features:
        recycled["prev_msa_first_row"] = jnp.zeros((num_residues, config.msa_channel))
        recycled["prev_pair"] = jnp.zeros((num_residues, num_residues, config.pair_channel))
    return recycled


def recycled_outputs(out: Output, config: ml_collections.ConfigDict) -> Recycled:
    """Return what the next iteration recycles, without gradient."""
    recycled = {}
    if config.recycle_pos:
        recycled["prev_pos"] = out["structure_module"]["final_atom_positions"]
    if config.recycle_features:
        recycled["prev_msa_first_row"] = out["representations"]["msa_first_row"]
        recycled["prev_pair"] = out["representations"]["pair"]
    return jax.tree.map(jax.lax.stop_gradient, recycled)


def ca_distance_change(before: jax.Array, after: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the root mean square change of C-alpha distances between two iterations.

    Args:
        before: atom37 positions [residues, 37, 3], Angstrom.
        after: the same, one iteration later.
        mask: [residues].

    Returns:
        Angstrom, scalar.
    """

    def distances(positions: jax.Array) -> jax.Array:
        ca = positions[:, rc.ATOM_ORDER["CA"]]
        squared = jnp.sum(jnp.square(ca[:, None] - ca[None, :]), axis=-1)
        return jnp.sqrt(squared + 1e-10)

    pairs = mask[:, None] * mask[None, :]
    change = jnp.square(distances(after) - distances(before))
    return jnp.sqrt(jnp.sum(pairs * change) / (jnp.sum(pairs) + 1e-10))


class AlphaFold(hk.Module):
    """The model with recycling.

    Args:
        config: the `model` tree.
        name: module name.
    """

    def __init__(self, config: ml_collections.ConfigDict, name: str = "alphafold") -> None:
        super().__init__(name=name)
        self._config = config

    def __call__(self, batch: Batch, *, is_training: bool, compute_loss: bool = False) -> Output:
        """Predict a structure.

        Args:
            batch: features with a leading axis of `num_recycle + 1` iterations (without
                `resample_msa_in_recycling` every iteration reads the first slice). A scalar
                `num_iter_recycling` (int32) says how often to recycle, 0 to `num_recycle`;
                without it that often.
            is_training: use dropout, unless the configuration says `deterministic`.
            compute_loss: compute losses; needs the ground-truth features.

        Returns:
            The last iteration's output, see `AlphaFoldIteration`, and `num_recycled`, the number
            of iterations before it (int32 scalar).
        """
        c = self._config
        settings = Settings.from_config({**c.global_config, "is_training": is_training})
        embeddings = c.embeddings_and_evoformer
        batch = dict(batch)
        num_recycle = batch.pop("num_iter_recycling", None)

        def at(iteration: int | jax.Array) -> Batch:
            where = iteration if c.resample_msa_in_recycling else 0
            return {
                name: jax.lax.dynamic_index_in_dim(value, where, 0, keepdims=False)
                for name, value in batch.items()
            }

        def last(features: Batch, recycled: Recycled) -> Output:
            return AlphaFoldIteration(c, settings)(
                features, recycled, compute_heads=True, compute_loss=compute_loss
            )

        def earlier(features: Batch, recycled: Recycled) -> Output:
            return AlphaFoldIteration(c, settings)(
                features, recycled, compute_heads=False, compute_loss=False
            )

        recycled = initial_recycled(at(0), embeddings)
        params, apply_last = lift_function(last, at(0), recycled)
        rng = hk.next_rng_key() if settings.uses_dropout else None
        limit = c.num_recycle
        if c.resample_msa_in_recycling:
            limit = jax.tree.leaves(batch)[0].shape[0] - 1
        if hk.running_init() or limit == 0:
            out = apply_last(params, rng, at(0), recycled)
            return {**out, "num_recycled": jnp.zeros((), jnp.int32)}

        limit = jnp.asarray(limit if num_recycle is None else num_recycle, jnp.int32)
        frozen = jax.tree.map(jax.lax.stop_gradient, params)
        apply_earlier = hk.transform(earlier).apply
        tolerance = settings.recycle_early_stop_tolerance

        def keep_going(state: tuple[jax.Array, jax.Array, Recycled]) -> jax.Array:
            iteration, settled, _ = state
            return (iteration < limit) & ~settled

        def recycle(
            state: tuple[jax.Array, jax.Array, Recycled],
        ) -> tuple[jax.Array, jax.Array, Recycled]:
            iteration, settled, before = state
            features = at(iteration)
            key = None if rng is None else jax.random.fold_in(rng, iteration)
            out = apply_earlier(frozen, key, features, before)
            after = recycled_outputs(out, embeddings)
            if tolerance > 0:
                change = ca_distance_change(
                    before["prev_pos"], after["prev_pos"], features["seq_mask"]
                )
                settled = (iteration > 0) & (change < tolerance)
            return iteration + 1, settled, after

        start = (jnp.zeros((), jnp.int32), jnp.asarray(False), recycled)
        iteration, _, recycled = jax.lax.while_loop(keep_going, recycle, start)
        recycled = jax.tree.map(jax.lax.stop_gradient, recycled)
        key = None if rng is None else jax.random.fold_in(rng, iteration)
        return {**apply_last(params, key, at(iteration), recycled), "num_recycled": iteration}
