"""A fresh model on a real protein: every loss and gradient is finite, and every part learns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("gemmi")

from models.alphafold.data import FeatureConfig, make_example
from models.alphafold.data.shared_proteins import default_root, shared_proteins
from models.alphafold.model import batch_spec, initial_params, make_model
from tests.alphafold.small_model import compile_quickly, random_batch, small_config


def real_batch(config):
    """Features of a crop of a real protein, or made-up ones where the data are not there."""
    spec = batch_spec(config)
    if default_root() is None:
        pytest.skip("the shared proteins are not beside the repository")
    features = FeatureConfig.from_config(config, recycling_axis=True)
    example = make_example(shared_proteins(names=("1dtx_A",))[0], features)
    assert set(spec) <= set(example)
    for name, leaf in spec.items():
        assert example[name].shape == leaf.shape, name
        assert example[name].dtype == leaf.dtype, name
    return {name: jnp.asarray(example[name]) for name in spec}


def test_a_fresh_model_has_finite_losses_and_gradients_on_a_real_protein() -> None:
    config = small_config(deterministic=False, attention_chunk_size=4)
    config.data.crop_size = 12
    config.model.heads.structure_module.structural_violation_loss_weight = 1.0
    config.model.heads.experimentally_resolved.weight = 0.01
    config.model.num_recycle = 1
    batch = real_batch(config)
    params = initial_params(config, jax.random.key(0))
    model = make_model(config)

    def step(params, rng, batch):
        (loss, out), gradients = jax.value_and_grad(model.loss, has_aux=True)(params, rng, batch)
        losses = {k: v["loss"] for k, v in out.items() if isinstance(v, dict) and "loss" in v}
        return loss, losses, gradients

    run = compile_quickly(step, params, jax.random.key(1), batch)
    loss, losses, gradients = run(params, jax.random.key(1), batch)
    assert np.isfinite(loss)
    assert set(losses) == {
        "structure_module",
        "masked_msa",
        "distogram",
        "predicted_lddt",
        "experimentally_resolved",
    }
    assert all(np.isfinite(value) for value in losses.values())
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))
    # Layers that start at zero hold back all before them, but they learn themselves.
    head = gradients["alphafold/alphafold_iteration/structure_module/fold_iteration/affine_update"]
    assert np.max(np.abs(head["bias"])) > 0
    # Dropout draws again under another key, and is the same under the same key.
    again, _, _ = run(params, jax.random.key(1), batch)
    assert float(again) == float(loss)


def test_made_up_features_have_the_promised_shapes() -> None:
    spec = batch_spec(small_config())
    batch = random_batch(spec)
    assert {k: v.shape for k, v in batch.items()} == {k: v.shape for k, v in spec.items()}
