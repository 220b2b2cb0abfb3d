"""The whole model: trunk, structure module, heads, losses and recycling (Algorithms 2, 30 and 31).

The batch carries a leading axis of recycling iterations: iteration k reads slice k, so that the MSA
can be sampled anew each time. The traps: only the last iteration has a gradient, so all before it
run on parameters without gradient; and the number of iterations that run may be smaller than the
axis is long (`num_iter_recycling`), in which case the *first* slices are used. What several losses
share goes to each through `zero_nonfinite_cotangents`, so that one bad label does not spoil the
gradient of the others.
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
from models.alphafold.losses.cotangents import zero_nonfinite_cotangents
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
# Iteration, whether to stop, what the next one recycles, positions to compare with.
_RecyclingState = tuple[jax.Array, jax.Array, Recycled, dict[str, jax.Array]]


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
    traj = zero_nonfinite_cotangents(out["traj"])
    backbone, last_layer = fape.backbone_fape(traj, batch, config)
    renamed = fape.rename_ground_truth(out["final_atom14_positions"], batch, chunk)
    frames, atoms = zero_nonfinite_cotangents((out["frames"][-1], out["atom14_pos"][-1]))
    frames = rigid.from_flat12(frames)
    side_chains = fape.sidechain_fape(frames, atoms, renamed, batch, config, chunk)
    angles = zero_nonfinite_cotangents(out["unnormalized_angles_sin_cos"])
    chi_losses = chi.supervised_chi_loss(angles, batch)

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
        atom14 = zero_nonfinite_cotangents(out["final_atom14_positions"])
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


def _representations(
    batch: Batch,
    recycled: Recycled,
    others: Batch | None,
    config: ml_collections.ConfigDict,
    settings: Settings,
) -> Output:
    """Run the trunk on one sample of the features, or on several and average.

    A function, because Haiku would put the name of a method into those of the parameters.

    Args:
        batch: features without recycling axis.
        recycled: outputs of the iteration before.
        others: more samples of the features, with a leading axis.
        config: the `embeddings_and_evoformer` tree.
        settings: shared settings.

    Returns:
        What `EmbeddingsAndEvoformer` returns; `msa` is that of `batch`.
    """

    def trunk(features: Batch) -> dict[str, jax.Array]:
        return EmbeddingsAndEvoformer(config, settings, name="evoformer")(features)

    features = {**batch, **recycled}
    if others is None:
        return trunk(features)
    params, apply = lift_function(trunk, features)
    rng = hk.next_rng_key() if settings.uses_dropout else None
    first = apply(params, rng, features)

    def add(
        total: dict[str, jax.Array], sample: tuple[jax.Array, Batch]
    ) -> tuple[dict[str, jax.Array], None]:
        number, features = sample
        key = None if rng is None else jax.random.fold_in(rng, number)
        out = apply(params, key, {**features, **recycled})
        return {name: value + out[name] for name, value in total.items()}, None

    total = {name: first[name] for name in ("single", "pair", "msa_first_row")}
    count = jax.tree.leaves(others)[0].shape[0]
    total, _ = jax.lax.scan(add, total, (jnp.arange(count), dict(others)))
    return {**first, **{name: value / (count + 1) for name, value in total.items()}}


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
        self,
        batch: Batch,
        recycled: Recycled,
        *,
        compute_heads: bool,
        compute_loss: bool,
        others: Batch | None = None,
    ) -> Output:
        """Run the network once.

        Args:
            batch: features without recycling axis.
            recycled: outputs of the iteration before, see `recycled_outputs`.
            others: more samples of the features, with a leading axis. The representations except
                that of the MSA become averages over all samples; the rest reads `batch`.
            compute_heads: run the heads other than the structure module.
            compute_loss: compute losses too.

        Returns:
            `representations`, one entry per head and, with losses, `total_loss`. The structure
            module always runs; see `_has_head` for the others.
        """
        c, settings = self._config, self._settings
        trunk = c.embeddings_and_evoformer
        representations = _representations(batch, recycled, others, trunk, settings)
        blocks_run = representations.pop("evoformer_blocks_run")
        # Prediction needs no gradient, so it stays free of the guard.
        guard = zero_nonfinite_cotangents if compute_loss else lambda tree: tree

        structure_module = StructureModule(c.heads.structure_module, settings)
        structure = structure_module(guard(representations), batch)
        representations["structure_module"] = structure["act"]
        out: Output = {"structure_module": structure}
        if compute_heads:
            for key, (head, name) in _HEADS.items():
                if key in c.heads and self._has_head(key, name):
                    module = head(c.heads[key], settings, name)
                    out[key] = guard(module(guard(representations)))

        total = jnp.zeros(())
        if compute_loss:
            losses = structure_losses(structure, batch, c.heads.structure_module, settings)
            out["structure_module"] = {**structure, **losses}
            _head_losses(out, batch, c.heads)
            for key, value in out.items():
                if c.heads[key].weight:
                    total = total + c.heads[key].weight * value["loss"]
        result = {**out, "representations": representations, "evoformer_blocks_run": blocks_run}
        return {**result, "total_loss": total} if compute_loss else result

    def _has_head(self, key: str, name: str) -> bool:
        """Whether a head runs: if it has a weight, or if there are parameters for it.

        A fresh model has parameters for heads with a weight and for `experimentally_resolved`,
        which the published files hold and fine-tuning turns on.
        """
        if self._config.heads[key].weight:
            return True
        if hk.running_init():
            return key == "experimentally_resolved"
        prefix = f"{self.module_name}/{name}/"
        return any(f"{path}/".startswith(prefix) for path in hk.get_params())


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


def _iterations_and_samples(slices: int, config: ml_collections.ConfigDict) -> tuple[int, int]:
    """Tell from the length of a batch's leading axis how it is to be read.

    Args:
        slices: length of the axis.
        config: the `model` tree.

    Returns:
        How often to recycle at most, and slices per iteration.

    Raises:
        ValueError: if the length does not fit.
    """
    resampled, most = config.resample_msa_in_recycling, config.num_recycle
    passes = most + 1 if resampled else 1
    if config.get("ensemble_representations", False):
        if slices % passes:
            raise ValueError(
                f"The batch has {slices} slices; with ensemble_representations that must be a "
                f"multiple of {passes} (num_recycle {most}, resample_msa_in_recycling {resampled})."
            )
        return most, slices // passes
    if slices > most + 1 or (not resampled and slices not in (1, most + 1)):
        allowed = f"at most {most + 1}" if resampled else f"1, or {most + 1} equal ones"
        raise ValueError(
            f"The batch has {slices} slices; num_recycle {most} with resample_msa_in_recycling "
            f"{resampled} reads {allowed}. Set ensemble_representations to average over more."
        )
    return (min(most, slices - 1) if resampled else most), 1


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
            batch: features with a leading axis of `num_recycle + 1` iterations, or fewer (without
                `resample_msa_in_recycling` one slice, which every iteration reads, or
                `num_recycle + 1` equal ones). With `ensemble_representations` in the
                configuration that many times as many slices: those of one iteration follow each
                other, and the trunk's representations are averaged over them. An integer
                `num_iter_recycling`, or the first of several, says how often to recycle, 0 to
                `num_recycle`; without it that often.
            is_training: use dropout, unless the configuration says `deterministic`.
            compute_loss: compute losses; needs the ground-truth features.

        Returns:
            The last iteration's output, see `AlphaFoldIteration`, and `num_recycled`, the number
            of iterations before it (int32 scalar).

        Raises:
            ValueError: if the leading axis has a length that means none of these.
        """
        c = self._config
        settings = Settings.from_config({**c.global_config, "is_training": is_training})
        embeddings = c.embeddings_and_evoformer
        batch = dict(batch)
        wanted = batch.pop("num_iter_recycling", None)
        limit, samples = _iterations_and_samples(batch["aatype"].shape[0], c)

        def at(iteration: int | jax.Array) -> tuple[Batch, Batch | None]:
            start = samples * iteration if c.resample_msa_in_recycling else 0
            first = {
                name: jax.lax.dynamic_index_in_dim(value, start, 0, keepdims=False)
                for name, value in batch.items()
            }
            if samples == 1:
                return first, None
            others = {
                name: jax.lax.dynamic_slice_in_dim(value, start + 1, samples - 1)
                for name, value in batch.items()
            }
            return first, others

        def last(features: tuple[Batch, Batch | None], recycled: Recycled) -> Output:
            first, others = features
            return AlphaFoldIteration(c, settings)(
                first, recycled, others=others, compute_heads=True, compute_loss=compute_loss
            )

        def earlier(features: tuple[Batch, Batch | None], recycled: Recycled) -> Output:
            first, others = features
            return AlphaFoldIteration(c, settings)(
                first, recycled, others=others, compute_heads=False, compute_loss=False
            )

        recycled = initial_recycled(at(0)[0], embeddings)
        params, apply_last = lift_function(last, at(0), recycled)
        rng = hk.next_rng_key() if settings.uses_dropout else None
        if hk.running_init() or limit == 0:
            out = apply_last(params, rng, at(0), recycled)
            return {**out, "num_recycled": jnp.zeros((), jnp.int32)}

        limit = jnp.asarray(limit, jnp.int32)
        if wanted is not None:
            limit = jnp.minimum(jnp.ravel(wanted)[0].astype(jnp.int32), limit)
        frozen = jax.tree.map(jax.lax.stop_gradient, params)
        apply_earlier = hk.transform(earlier).apply
        tolerance = settings.recycle_early_stop_tolerance

        # The last positions are needed twice, to be recycled and to see whether they settle, and
        # a configuration may ask for one without the other.
        def keep_going(state: _RecyclingState) -> jax.Array:
            iteration, settled, _, _ = state
            return (iteration < limit) & ~settled

        def recycle(state: _RecyclingState) -> _RecyclingState:
            iteration, settled, before, seen = state
            features = at(iteration)
            key = None if rng is None else jax.random.fold_in(rng, iteration)
            out = apply_earlier(frozen, key, features, before)
            if tolerance > 0:
                atoms = out["structure_module"]["final_atom_positions"]
                change = ca_distance_change(seen["atoms"], atoms, features[0]["seq_mask"])
                settled = (iteration > 0) & (change < tolerance)
                seen = {"atoms": atoms}
            return iteration + 1, settled, recycled_outputs(out, embeddings), seen

        seen = {}
        if tolerance > 0:
            seen["atoms"] = jnp.zeros((batch["aatype"].shape[1], rc.NUM_ATOM37, 3))
        start = (jnp.zeros((), jnp.int32), jnp.asarray(False), recycled, seen)
        iteration, _, recycled, _ = jax.lax.while_loop(keep_going, recycle, start)
        recycled = jax.tree.map(jax.lax.stop_gradient, recycled)
        key = None if rng is None else jax.random.fold_in(rng, iteration)
        return {**apply_last(params, key, at(iteration), recycled), "num_recycled": iteration}
