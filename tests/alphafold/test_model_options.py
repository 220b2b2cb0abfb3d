"""Options at the edge of their range: nothing to embed, no blocks, no templates, no weight."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest

from models.alphafold.model import batch_spec, make_model
from models.alphafold.network.embeddings_and_evoformer import EmbeddingsAndEvoformer
from models.alphafold.network.settings import Settings
from tests.alphafold.small_model import (
    compile_quickly,
    random_batch,
    random_params,
    small_config,
    small_inputs,
)

ITERATION = "alphafold/alphafold_iteration"


def tiny_config() -> ml_collections.ConfigDict:
    """A model without blocks and templates, one layer of structure: for what is around them."""
    config = small_config()
    network = config.model.embeddings_and_evoformer
    network.update({"evoformer_num_block": 0, "extra_msa_stack_num_block": 0})
    network.template.update({"enabled": False, "embed_torsion_angles": False})
    config.model.heads.structure_module.num_layer = 1
    return config


def slices(batch: dict[str, jax.Array], *order: int) -> dict[str, jax.Array]:
    """The batch with these slices of it; counts of iterations are left out."""
    return {name: value[jnp.asarray(order)] for name, value in batch.items() if value.ndim}


def predictor(config: ml_collections.ConfigDict, params: Any, batch: Any) -> Callable[..., Any]:
    """A compiled function of parameters and batches of these shapes, see `predict`."""
    model = make_model(config)

    def run(params: Any, batch: Any) -> dict[str, jax.Array]:
        out = model.predict(params, None, batch)
        return {**out["representations"], "num_recycled": out["num_recycled"]}

    compiled = compile_quickly(run, params, batch)
    return lambda params, batch: jax.tree.map(np.asarray, compiled(params, batch))


def predict(config: ml_collections.ConfigDict, params: Any, batch: Any) -> dict[str, np.ndarray]:
    """The representations and how often was recycled."""
    return predictor(config, params, batch)(params, batch)


def assert_same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_allclose(value, second[name], rtol=2e-4, atol=2e-4, err_msg=name)


def trunk(config: ml_collections.ConfigDict, batch: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """Parameters and outputs of the trunk, features without recycling axis."""
    network = config.model.embeddings_and_evoformer
    transformed = hk.without_apply_rng(
        hk.transform(lambda x: EmbeddingsAndEvoformer(network, Settings(deterministic=True))(x))
    )
    params = random_params(jax.eval_shape(transformed.init, jax.random.key(0), batch))
    return params, compile_quickly(transformed.apply, params, batch)(params, batch)


def features(config: ml_collections.ConfigDict) -> dict[str, jax.Array]:
    batch = random_batch(batch_spec(config, training=False))
    return {name: value[0] for name, value in batch.items() if value.ndim}


def test_a_trunk_of_nothing_is_its_embedders() -> None:
    config = tiny_config()
    config.model.embeddings_and_evoformer.max_relative_feature = 0
    batch = features(config)
    # The configuration recycles, but the batch has nothing from before.
    params, out = trunk(config, batch)
    assert not any("pair_activiations" in path or "prev" in path for path in params)
    assert not any("evoformer_iteration" in path for path in params)
    left, right, query, rows = (
        np.asarray(batch[source]) @ params[f"evoformer/{name}"]["weights"]
        + params[f"evoformer/{name}"]["bias"]
        for name, source in (
            ("left_single", "target_feat"),
            ("right_single", "target_feat"),
            ("preprocess_1d", "target_feat"),
            ("preprocess_msa", "msa_feat"),
        )
    )
    np.testing.assert_allclose(out["pair"], left[:, None] + right[None], rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(out["msa"], rows + query[None], rtol=1e-4, atol=1e-3)
    assert int(out["evoformer_blocks_run"]) == 0


@pytest.mark.parametrize("present", ["prev_pos", "prev_msa_first_row", "prev_pair"])
def test_what_is_recycled_is_embedded_where_it_is_present(present: str) -> None:
    config = tiny_config()
    batch = features(config)
    shape = {"prev_pos": (6, 37, 3), "prev_msa_first_row": (6, 8), "prev_pair": (6, 6, 8)}[present]
    batch[present] = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    params, _ = trunk(config, batch)
    names = {path.split("/")[1] for path in params if "prev" in path}
    assert names == {f"{present}_{'linear' if present == 'prev_pos' else 'norm'}"}


@pytest.mark.parametrize("skip_absent", [False, True])
def test_no_template_slots_equal_templates_that_are_masked(skip_absent: bool) -> None:
    config = small_config(skip_absent_templates=skip_absent)
    network = config.model.embeddings_and_evoformer
    network.update({"evoformer_num_block": 1, "extra_msa_stack_num_block": 0})
    network.template.template_pair_stack.num_block = 0
    batch = features(config)
    masked = {k: jnp.zeros_like(v) if k.startswith("template_") else v for k, v in batch.items()}
    none = {k: v[:0] if k.startswith("template_") else v for k, v in batch.items()}
    params, expected = trunk(config, masked)
    few, out = trunk(config, none)
    assert jax.tree.map(jnp.shape, few) == jax.tree.map(jnp.shape, params)
    assert_same(out, expected)


def test_a_masked_slot_beside_a_template_changes_nothing() -> None:
    config = small_config()
    network = config.model.embeddings_and_evoformer
    network.update({"evoformer_num_block": 1, "extra_msa_stack_num_block": 0})
    network.template.template_pair_stack.num_block = 0
    batch = features(config)
    names = [name for name in batch if name.startswith("template_")]
    padded = {**batch, **{name: batch[name].at[1].set(0) for name in names}}
    alone = {**batch, **{name: batch[name][:1] for name in names}}
    _, with_padding = trunk(config, padded)
    _, without = trunk(config, alone)
    assert_same(with_padding, without)
    nothing = {**batch, **{name: jnp.zeros_like(batch[name]) for name in names}}
    assert not np.allclose(trunk(config, nothing)[1]["pair"], without["pair"], atol=1e-2)


def test_the_number_of_iterations_may_be_a_vector_and_is_capped() -> None:
    config = tiny_config()
    params, batch = small_inputs(config)

    def with_count(count: Any) -> dict[str, jax.Array]:
        return {**batch, "num_iter_recycling": jnp.asarray(count, jnp.int32)}

    run = predictor(config, params, with_count(1))
    one = run(params, with_count(1))
    assert int(one["num_recycled"]) == 1
    assert_same(predict(config, params, with_count([1, 1, 1])), one)
    many = run(params, with_count(9))
    assert int(many["num_recycled"]) == 2
    assert_same(many, run(params, with_count(2)))
    config.model.resample_msa_in_recycling = False
    assert int(predict(config, params, with_count(9))["num_recycled"]) == 2


@pytest.mark.parametrize(("tolerance", "recycled"), [(1e6, 2), (1e-12, 4)])
def test_recycling_stops_early_also_where_positions_are_not_recycled(
    tolerance: float, recycled: int
) -> None:
    config = tiny_config()
    config.model.num_recycle = 4
    config.model.embeddings_and_evoformer.recycle_pos = False
    config.model.global_config.recycle_early_stop_tolerance = tolerance
    params, batch = small_inputs(config)
    assert int(predict(config, params, batch)["num_recycled"]) == recycled


def test_an_ensemble_is_the_mean_of_its_samples() -> None:
    config = tiny_config()
    params, batch = small_inputs(config)
    config.model.num_recycle = 0
    run = predictor(config, params, slices(batch, 0))
    singles = [run(params, slices(batch, i)) for i in range(3)]
    assert not np.allclose(singles[0]["pair"], singles[1]["pair"])
    config.model.ensemble_representations = True
    out = predict(config, params, slices(batch, 0, 1, 2))
    for name in ("single", "pair", "msa_first_row"):
        mean = np.mean([single[name] for single in singles], axis=0)
        np.testing.assert_allclose(out[name], mean, rtol=1e-4, atol=1e-4, err_msg=name)
    np.testing.assert_allclose(out["msa"], singles[0]["msa"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("resample", [True, False])
def test_an_ensemble_of_equal_samples_changes_nothing(resample: bool) -> None:
    config = tiny_config()
    config.model.num_recycle = 1
    params, batch = small_inputs(config)
    config.model.resample_msa_in_recycling = resample
    one, two = ((0, 1), (0, 0, 1, 1)) if resample else ((0,), (0, 0))
    expected = predict(config, params, slices(batch, *one))
    config.model.ensemble_representations = True
    assert_same(predict(config, params, slices(batch, *two)), expected)


def test_a_batch_of_too_many_slices_is_refused() -> None:
    config = tiny_config()
    config.model.num_recycle = 1
    params, batch = small_inputs(config)

    def error(*order: int) -> str:
        with pytest.raises(ValueError, match="slices") as caught:
            jax.eval_shape(make_model(config).predict, params, None, slices(batch, *order))
        return str(caught.value)

    assert "3 slices" in error(0, 0, 0)
    assert "at most 2" in error(0, 0, 0)
    config.model.resample_msa_in_recycling = False
    assert "1, or 2 equal ones" in error(0, 0, 0)
    config.model.update({"ensemble_representations": True, "resample_msa_in_recycling": True})
    assert "multiple of 2" in error(0, 0, 1)


def heads_that_run(config: ml_collections.ConfigDict, params: Any, batch: Any) -> set[str]:
    out = jax.eval_shape(make_model(config).predict, params, None, batch)
    return {name for name, value in out.items() if isinstance(value, dict) and "logits" in value}


def parameters(config: ml_collections.ConfigDict) -> dict[str, Any]:
    spec = batch_spec(config, training=False)
    return jax.eval_shape(make_model(config).init, jax.random.key(0), spec)


def heads_of(params: dict[str, Any]) -> set[str]:
    found = (re.search(r"/(\w+)_head/", path + "/") for path in params)
    return {match.group(1) for match in found if match}


def test_heads_without_weight_have_no_parameters_and_do_not_run() -> None:
    config = tiny_config()
    everything = {"distogram", "masked_msa", "predicted_lddt", "experimentally_resolved"}
    batch = batch_spec(config, training=False)
    params = parameters(config)
    assert heads_of(params) == heads_that_run(config, params, batch) == everything
    config.model.heads.masked_msa.weight = 0.0
    fewer = parameters(config)
    assert heads_of(fewer) == everything - {"masked_msa"}
    # Parameters that are there are used, weight or not; only without weight may they be absent.
    assert heads_that_run(config, params, batch) == everything
    assert heads_that_run(config, fewer, batch) == everything - {"masked_msa"}
    config.model.heads.masked_msa.weight = 1.0
    with pytest.raises(ValueError, match="masked_msa_head"):
        heads_that_run(config, fewer, batch)


def test_the_head_that_only_published_files_and_fine_tuning_use_may_be_absent() -> None:
    config = tiny_config()
    assert config.model.heads.experimentally_resolved.weight == 0.0
    batch = batch_spec(config)
    params = {k: v for k, v in parameters(config).items() if "experimentally_resolved" not in k}
    loss, out = jax.eval_shape(make_model(config).loss, params, None, batch)
    assert loss.shape == ()
    assert "experimentally_resolved" not in out
