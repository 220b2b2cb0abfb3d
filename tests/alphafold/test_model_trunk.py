"""The trunk's train step: it learns, its shapes are as promised, managing does not change it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

import jdynoff
from models.alphafold.compiling import RUN_ONCE
from models.alphafold.config import trunk_config
from models.alphafold.trunk import TrunkState, make_trunk_step
from tests.alphafold.small_model import compile_quickly, random_batch, random_params
from tests.programs.example import difference_in_ulps

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


def small_trunk(*, deterministic: bool, **options: Any) -> tuple[Any, TrunkState, Any]:
    """The step, a state with drawn parameters and a batch."""
    config = trunk_config(**{**SIZES, **options})
    config.model.global_config.deterministic = deterministic
    step, init, spec = make_trunk_step(config)
    shapes = jax.eval_shape(init, jax.random.key(0))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.opt_state)
    state = TrunkState(random_params(shapes.params), zeros, jax.random.key(1), jnp.zeros((), int))
    return step, state, random_batch(spec)


def test_training_on_one_batch_lowers_the_loss() -> None:
    train_step, state, batch = small_trunk(
        deterministic=True, checkpoint_blocks=True, attention_chunk_size=4
    )
    step = compile_quickly(train_step, state, batch)
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


# In units of the last place of each output's largest magnitude. Both programs do the same
# arithmetic, but XLA fuses it, and so rounds it, differently.
ULPS = 32
# Enough blocks that what is moved outweighs the manager's pool; their number costs no compile time.
DEEP = {
    "num_blocks": 12,
    "num_extra_blocks": 0,
    "num_residues": 16,
    "num_msa": 8,
    "pair_channel": 16,
}
MIN_BYTES = 4096  # little in so small a trunk exceeds the default


@pytest.fixture(scope="module")
def trunk() -> tuple[Any, TrunkState, Any]:
    """A small trunk with dropout, and everything that plain JAX makes of one step."""
    step, state, batch = small_trunk(deterministic=False, **DEEP)
    return jax.jit(step, compiler_options=RUN_ONCE), state, batch


@pytest.fixture(scope="module")
def expected(trunk: tuple[Any, TrunkState, Any]) -> Any:
    step, state, batch = trunk
    return step(state, batch)


@pytest.fixture(scope="module")
def least(trunk: tuple[Any, TrunkState, Any]) -> Any:
    step, _, _ = trunk
    return jdynoff.managed(step, budget="min", min_bytes=MIN_BYTES)


def test_the_trunk_in_the_least_memory_equals_plain_jax(trunk, expected, least) -> None:
    _, state, batch = trunk
    found = least(state, batch)
    assert least.stats().bytes_offloaded > 0
    assert difference_in_ulps(expected, found) <= ULPS


def test_the_trunk_half_way_to_plain_memory_equals_plain_jax(trunk, expected, least) -> None:
    step, state, batch = trunk
    plan = least.plan(state, batch)
    budget = (plan.device_peak_bytes + plan.plain_peak_bytes) // 2
    managed = jdynoff.managed(step, budget=budget, min_bytes=MIN_BYTES)
    found = managed(state, batch)
    assert managed.plan(state, batch).device_peak_bytes <= budget
    # It may keep what the least memory has to move, and compute the rest again.
    assert managed.stats().bytes_offloaded <= least.stats().bytes_offloaded
    assert difference_in_ulps(expected, found) <= ULPS
