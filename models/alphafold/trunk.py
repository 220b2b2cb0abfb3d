"""A train step for the trunk alone: Evoformer with masked-MSA and distogram losses.

The smallest complete training problem of the model, for demos and benchmarks of memory. The step is
plain JAX (jit it, or give it to `jdynoff.managed`). The trap: the random key is part of the state,
so that two runs from one state are identical with dropout on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import optax

from models.alphafold.compiling import run_once
from models.alphafold.losses.distogram import distogram_loss
from models.alphafold.losses.masked_msa import masked_msa_loss
from models.alphafold.network.embeddings_and_evoformer import EmbeddingsAndEvoformer
from models.alphafold.network.heads import DistogramHead, MaskedMsaHead
from models.alphafold.network.settings import Settings
from models.alphafold.optimizer import make_optimizer

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


class TrunkState(NamedTuple):
    """What training the trunk carries from step to step."""

    params: hk.Params
    opt_state: optax.OptState
    rng: jax.Array  # PRNG key
    step: jax.Array  # shape=(), dtype=int32


def trunk_batch_spec(config: ml_collections.ConfigDict) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and types of the features that the trunk and its losses read.

    Args:
        config: a tree of `trunk_config` or `model_config`; `data` gives the sizes.

    Returns:
        Feature name to `jax.ShapeDtypeStruct`, without a batch axis.
    """
    data = config.data
    n, s, e = data.crop_size, data.max_msa_clusters, data.max_extra_msa
    floats = {
        "target_feat": (n, 22),
        "msa_feat": (s, n, 49),
        "msa_mask": (s, n),
        "seq_mask": (n,),
        "bert_mask": (s, n),
        "extra_msa_mask": (e, n),
        "extra_has_deletion": (e, n),
        "extra_deletion_value": (e, n),
        "pseudo_beta": (n, 3),
        "pseudo_beta_mask": (n,),
    }
    integers = {
        "aatype": (n,),
        "residue_index": (n,),
        "true_msa": (s, n),
        "extra_msa": (e, n),
    }
    spec = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in floats.items()}
    spec |= {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in integers.items()}
    return spec


def _trunk_losses(config: ml_collections.ConfigDict, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Haiku function: total loss and its parts."""
    model = config.model
    settings = Settings.from_config({**model.global_config, "is_training": True})
    out = EmbeddingsAndEvoformer(model.embeddings_and_evoformer, settings)(batch)
    masked = MaskedMsaHead(model.heads.masked_msa, settings, "masked_msa_head")(out)
    distogram = DistogramHead(model.heads.distogram, settings, "distogram_head")(out)
    masked_loss = masked_msa_loss(masked["logits"], batch["true_msa"], batch["bert_mask"])
    distance_loss, _ = distogram_loss(
        distogram["logits"],
        distogram["bin_edges"],
        batch["pseudo_beta"],
        batch["pseudo_beta_mask"],
    )
    total = (
        model.heads.masked_msa.weight * masked_loss + model.heads.distogram.weight * distance_loss
    )
    return total, {"loss": total, "masked_msa": masked_loss, "distogram": distance_loss}


def make_trunk_step(
    config: ml_collections.ConfigDict,
) -> tuple[
    Callable[[TrunkState, Batch], tuple[TrunkState, Metrics]],
    Callable[[jax.Array], TrunkState],
    dict[str, jax.ShapeDtypeStruct],
]:
    """Make the train step of the trunk.

    Args:
        config: a tree of `trunk_config`.

    Returns:
        `train_step(state, batch) -> (state, metrics)` (not jitted), `init(rng) -> state`, and the
        shapes of a batch.
    """
    spec = trunk_batch_spec(config)
    network = hk.transform(lambda batch: _trunk_losses(config, batch))
    optimizer = make_optimizer(config.train)

    def init(rng: jax.Array) -> TrunkState:
        init_rng, rng = jax.random.split(rng)
        zeros = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in spec.items()}
        params = run_once(network.init, init_rng, zeros)
        return TrunkState(params, optimizer.init(params), rng, jnp.zeros((), jnp.int32))

    def train_step(state: TrunkState, batch: Batch) -> tuple[TrunkState, Metrics]:
        step_rng, rng = jax.random.split(state.rng)

        def loss_fn(params: hk.Params) -> Any:
            return network.apply(params, step_rng, batch)

        grads, metrics = jax.grad(loss_fn, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["grad_norm"] = optax.tree.norm(grads)
        return TrunkState(params, opt_state, rng, state.step + 1), metrics

    return train_step, init, spec
