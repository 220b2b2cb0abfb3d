"""The model as pure functions: initialise, predict, compute the loss.

What a trainer or a predictor calls; the modules are in `network/`. The trap: `batch_spec` lists the
features with their recycling axis; a batch of several proteins is a `jax.vmap` or a scan over it,
and under `vmap` the dynamic options run both sides of their branches.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.compiling import run_once
from models.alphafold.network.model import AlphaFold
from models.alphafold.structure import residue_constants as rc

Batch = Mapping[str, jax.Array]
Spec = dict[str, jax.ShapeDtypeStruct]


class Model(NamedTuple):
    """Pure functions of one configuration; none is jitted."""

    init: Any  # (rng, batch) -> params
    predict: Any  # (params, rng, batch) -> output
    loss: Any  # (params, rng, batch) -> (total loss, output)


def make_model(config: ml_collections.ConfigDict) -> Model:
    """Make the model of a configuration.

    Args:
        config: a tree of `models.alphafold.config.model_config`.

    Returns:
        Its functions. `rng` may be None where there is no dropout.
    """
    training = hk.transform(
        lambda batch: AlphaFold(config.model)(batch, is_training=True, compute_loss=True)
    )
    inference = hk.transform(lambda batch: AlphaFold(config.model)(batch, is_training=False))

    def loss(params: hk.Params, rng: jax.Array | None, batch: Batch) -> tuple[jax.Array, Any]:
        out = training.apply(params, rng, batch)
        return out["total_loss"], out

    return Model(inference.init, inference.apply, loss)


def initial_params(config: ml_collections.ConfigDict, rng: jax.Array) -> hk.Params:
    """Draw the parameters of a fresh model.

    Args:
        config: a tree of `models.alphafold.config.model_config`.
        rng: random key.

    Returns:
        Haiku parameters, float32.
    """
    tiny = _tiny_features(config)
    spec = batch_spec(tiny, training=False)
    zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in spec.items()}
    return run_once(make_model(tiny).init, rng, zeros)


def _tiny_features(config: ml_collections.ConfigDict) -> ml_collections.ConfigDict:
    """Return the configuration with the smallest features; parameters do not depend on them."""
    tiny = config.copy_and_resolve_references()
    tiny.data.update({"crop_size": 4, "max_msa_clusters": 2, "max_extra_msa": 2})
    if tiny.data.max_templates:
        tiny.data.max_templates = 1
    return tiny


def batch_spec(config: ml_collections.ConfigDict, *, training: bool = True) -> Spec:
    """Return shapes and types of the features of one protein.

    Args:
        config: a tree of `models.alphafold.config.model_config`.
        training: include the ground truth.

    Returns:
        Feature name to `jax.ShapeDtypeStruct`; all but `num_iter_recycling` have a leading axis of
        `num_recycle + 1` iterations.
    """
    data, network = config.data, config.model.embeddings_and_evoformer
    n, s, e = data.crop_size, data.max_msa_clusters, data.max_extra_msa
    if data.reduce_msa_clusters_by_max_templates:
        s -= data.max_templates
    integers: dict[str, tuple[int, ...]] = {
        "aatype": (n,),
        "residue_index": (n,),
        "extra_msa": (e, n),
        "residx_atom14_to_atom37": (n, rc.NUM_ATOM14),
        "residx_atom37_to_atom14": (n, rc.NUM_ATOM37),
    }
    floats: dict[str, tuple[int, ...]] = {
        "seq_mask": (n,),
        "target_feat": (n, 22),
        "msa_feat": (s, n, 49),
        "msa_mask": (s, n),
        "extra_msa_mask": (e, n),
        "extra_has_deletion": (e, n),
        "extra_deletion_value": (e, n),
        "atom14_atom_exists": (n, rc.NUM_ATOM14),
        "atom37_atom_exists": (n, rc.NUM_ATOM37),
    }
    if network.template.enabled:
        t = data.max_templates
        integers["template_aatype"] = (t, n)
        floats |= {
            "template_mask": (t,),
            "template_all_atom_positions": (t, n, rc.NUM_ATOM37, 3),
            "template_all_atom_masks": (t, n, rc.NUM_ATOM37),
            "template_pseudo_beta": (t, n, 3),
            "template_pseudo_beta_mask": (t, n),
        }
    if training:
        integers["true_msa"] = (s, n)
        floats |= {
            "bert_mask": (s, n),
            "all_atom_positions": (n, rc.NUM_ATOM37, 3),
            "all_atom_mask": (n, rc.NUM_ATOM37),
            "atom14_gt_positions": (n, rc.NUM_ATOM14, 3),
            "atom14_gt_exists": (n, rc.NUM_ATOM14),
            "atom14_alt_gt_positions": (n, rc.NUM_ATOM14, 3),
            "atom14_alt_gt_exists": (n, rc.NUM_ATOM14),
            "atom14_atom_is_ambiguous": (n, rc.NUM_ATOM14),
            "rigidgroups_gt_frames": (n, rc.NUM_GROUPS, 12),
            "rigidgroups_alt_gt_frames": (n, rc.NUM_GROUPS, 12),
            "rigidgroups_gt_exists": (n, rc.NUM_GROUPS),
            "backbone_affine_tensor": (n, 7),
            "backbone_affine_mask": (n,),
            "chi_angles": (n, 4),
            "chi_mask": (n, 4),
            "pseudo_beta": (n, 3),
            "pseudo_beta_mask": (n,),
            "resolution": (),
            "use_clamped_fape": (),
        }
    iterations = (config.model.num_recycle + 1,)
    spec = {
        name: jax.ShapeDtypeStruct(iterations + shape, dtype)
        for shapes, dtype in ((floats, jnp.float32), (integers, jnp.int32))
        for name, shape in shapes.items()
    }
    return {**spec, "num_iter_recycling": jax.ShapeDtypeStruct((), jnp.int32)}


def expected_shapes(config: ml_collections.ConfigDict) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter under its published key `module/path//name`.

    Nothing is computed; the model is only traced.

    Args:
        config: a tree of `models.alphafold.config.model_config`.
    """
    tiny = _tiny_features(config)
    spec = batch_spec(tiny, training=False)
    params = jax.eval_shape(make_model(tiny).init, jax.random.key(0), spec)
    return {
        f"{path}//{name}": tuple(value.shape)
        for path, values in params.items()
        for name, value in values.items()
    }
