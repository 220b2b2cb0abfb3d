"""Dynamic options: they skip work exactly when they should, and change nothing else."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold.model import make_model
from tests.alphafold.small_model import compile_quickly, small_config, small_inputs

NEVER = {"halt_threshold": 1e-12, "recycle_early_stop_tolerance": 1e-12}
ALWAYS = {"halt_threshold": 1e6, "halt_min_blocks": 2, "recycle_early_stop_tolerance": 1e6}
BRANCHES = {"skip_absent_templates": True, "extra_msa_min_depth": 3}


@pytest.fixture(scope="module")
def inputs():
    return small_inputs(small_config())


def predictor(inputs, **options):
    """Compiled inference that returns what the tests look at."""
    model = make_model(small_config(**options))

    def predict(params, batch):
        out = model.predict(params, None, batch)
        return {
            "atoms": out["structure_module"]["final_atom_positions"],
            "pair": out["representations"]["pair"],
            "blocks": out["evoformer_blocks_run"],
            "recycled": out["num_recycled"],
        }

    return compile_quickly(predict, *inputs)


@pytest.fixture(scope="module")
def static(inputs):
    return predictor(inputs)


@pytest.fixture(scope="module")
def dynamic(inputs):
    return predictor(inputs, **NEVER, **BRANCHES)


def without_templates(batch):
    zeros = {k: jnp.zeros_like(v) for k, v in batch.items() if k.startswith("template_")}
    return {**batch, **zeros}


def assert_same(first, second) -> None:
    for name in first:
        scale = np.max(np.abs(first[name])) + 1e-6
        np.testing.assert_allclose(first[name] / scale, second[name] / scale, atol=2e-4)


def test_options_that_never_fire_change_nothing(inputs, static, dynamic) -> None:
    out = dynamic(*inputs)
    assert_same(static(*inputs), out)
    assert int(out["blocks"]) == 3
    assert int(out["recycled"]) == 2


def test_skipped_templates_equal_templates_that_are_masked(inputs, static, dynamic) -> None:
    params, batch = inputs
    assert_same(static(params, without_templates(batch)), dynamic(params, without_templates(batch)))


def test_shallow_alignment_skips_the_extra_msa_stack(inputs, static, dynamic) -> None:
    params, batch = inputs
    shallow = {**batch, "extra_msa_mask": batch["extra_msa_mask"].at[:, 2:].set(0.0)}
    assert not np.allclose(static(params, shallow)["pair"], dynamic(params, shallow)["pair"])
    # What the skipped rows hold does not matter any more.
    other = {**shallow, "extra_msa": (shallow["extra_msa"] + 1) % 20}
    np.testing.assert_array_equal(dynamic(params, shallow)["pair"], dynamic(params, other)["pair"])
    assert not np.allclose(static(params, shallow)["pair"], static(params, other)["pair"])


def test_convergence_halts_blocks_and_recycling(inputs) -> None:
    out = predictor(inputs, **ALWAYS)(*inputs)
    assert int(out["blocks"]) == 2
    # The first iteration has nothing to compare with, so two run before the last one.
    assert int(out["recycled"]) == 2


def test_number_of_recycling_iterations_is_data(inputs, static) -> None:
    params, batch = inputs
    once = static(params, {**batch, "num_iter_recycling": jnp.asarray(0, jnp.int32)})
    twice = static(params, {**batch, "num_iter_recycling": jnp.asarray(1, jnp.int32)})
    assert int(once["recycled"]) == 0
    assert int(twice["recycled"]) == 1
    assert not np.allclose(once["pair"], twice["pair"])
    # Without recycling only the first slice of the features is read.
    changed = {k: v.at[1:].set(0) if v.ndim else v for k, v in batch.items()}
    changed["num_iter_recycling"] = jnp.asarray(0, jnp.int32)
    np.testing.assert_array_equal(static(params, changed)["pair"], once["pair"])


def test_all_dynamic_options_together_are_differentiable(inputs) -> None:
    params, batch = inputs
    model = make_model(small_config(**NEVER, **BRANCHES, checkpoint_blocks=True))

    def loss(params):
        out = model.predict(params, None, batch)
        return jnp.sum(out["structure_module"]["final_atom_positions"])

    gradients = jax.eval_shape(jax.grad(loss), params)
    assert jax.tree.structure(gradients) == jax.tree.structure(params)
