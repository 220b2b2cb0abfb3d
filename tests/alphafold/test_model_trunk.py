"""The trunk's train step: it learns, its shapes are as promised, checkpointing changes nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold.config import trunk_config
from models.alphafold.trunk import make_trunk_step

# Compiling dominates these tests; the code that it makes need not be fast.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

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


def random_batch(spec: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    batch = {}
    for name, leaf in spec.items():
        if name.endswith("mask"):
            batch[name] = jnp.ones(leaf.shape, leaf.dtype)
        elif jnp.issubdtype(leaf.dtype, jnp.integer):
            batch[name] = jnp.asarray(rng.integers(0, 20, leaf.shape), leaf.dtype)
        else:
            batch[name] = jnp.asarray(rng.normal(size=leaf.shape) * 5, leaf.dtype)
    return batch


def compiled_step(**options):
    config = trunk_config(**SIZES, **options)
    config.model.global_config.deterministic = True
    step, init, spec = make_trunk_step(config)
    state = init(jax.random.key(0))
    batch = random_batch(spec)
    return jax.jit(step).lower(state, batch).compile(compiler_options=QUICK_COMPILE), state, batch


@pytest.fixture(scope="module")
def plain():
    return compiled_step()


def test_training_on_one_batch_lowers_the_loss(plain) -> None:
    step, state, batch = plain
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.02
    assert int(state.step) == 12


@pytest.mark.parametrize(
    "options", [{"checkpoint_blocks": True}, {"attention_chunk_size": 4}], ids=["remat", "chunks"]
)
def test_checkpointing_and_chunking_change_memory_not_numbers(plain, options) -> None:
    step, state, batch = plain
    other, other_state, _ = compiled_step(**options)
    for _ in range(3):
        state, metrics = step(state, batch)
        other_state, other_metrics = other(other_state, batch)
    for name in metrics:
        np.testing.assert_allclose(metrics[name], other_metrics[name], rtol=2e-5)


def test_batch_spec_follows_the_configuration() -> None:
    _, _, spec = make_trunk_step(trunk_config(**SIZES))
    assert spec["msa_feat"].shape == (5, 10, 49)
    assert spec["extra_msa"].shape == (6, 10)
    assert spec["true_msa"].dtype == jnp.int32
