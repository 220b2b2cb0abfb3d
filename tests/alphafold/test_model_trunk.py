"""The trunk's train step: it learns, and its shapes are as promised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold.config import trunk_config
from models.alphafold.trunk import TrunkState, make_trunk_step
from tests.alphafold.small_model import compile_quickly, random_batch, random_params

SIZES = {
    "num_blocks": 2,
    "num_extra_blocks": 1,
    "num_residues": 10,
    "num_msa": 5,
    "num_extra_msa": 6,
    "msa_channel": 16,
    "pair_channel": 8,
    "extra_msa_channel": 8,
}


def compiled_step(**options):
    """A compiled step, a state with drawn parameters and a batch."""
    config = trunk_config(**SIZES, **options)
    config.model.global_config.deterministic = True
    step, init, spec = make_trunk_step(config)
    shapes = jax.eval_shape(init, jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.opt_state)
    state = TrunkState(random_params(shapes.params), zeros, jax.random.key(1), jnp.zeros((), int))
    batch = random_batch(spec)
    return compile_quickly(step, state, batch), state, batch


def test_training_on_one_batch_lowers_the_loss() -> None:
    step, state, batch = compiled_step(checkpoint_blocks=True, attention_chunk_size=4)
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.02
    assert int(state.step) == 12


def test_batch_spec_follows_the_configuration() -> None:
    _, _, spec = make_trunk_step(trunk_config(**SIZES))
    assert spec["msa_feat"].shape == (5, 10, 49)
    assert spec["extra_msa"].shape == (6, 10)
    assert spec["true_msa"].dtype == jnp.int32
