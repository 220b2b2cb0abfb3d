"""One broken term leaves the gradient of all others as it is, in a whole model with templates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold.losses.cotangents import zero_nonfinite_cotangents
from models.alphafold.model import batch_spec, make_model
from models.alphafold.training.loss_terms import finite_gradient, loss_terms, zero_unusable
from tests.alphafold.small_model import (
    compile_quickly,
    random_batch,
    random_params,
    small_config,
)

ITERATION = "alphafold/alphafold_iteration"
TERMS = {
    "distogram",
    "masked_msa",
    "fape",
    "supervised_chi",
    "plddt_loss",
    "experimentally_resolved",
    "violation",
    "tm",
}


class Problem:
    """A compiled gradient of chosen loss terms, with parameters and features."""

    def __init__(self) -> None:
        config = small_config()
        config.model.num_recycle = 0
        config.model.embeddings_and_evoformer.update(
            {"evoformer_num_block": 1, "extra_msa_stack_num_block": 1}
        )
        config.model.embeddings_and_evoformer.template.use_template_unit_vector = True
        heads = config.model.heads
        heads.structure_module.structural_violation_loss_weight = 1.0
        heads.experimentally_resolved.weight = 0.01
        heads.predicted_aligned_error.weight = 0.1
        model = make_model(config)
        spec = batch_spec(config)
        self.batch = random_batch(spec)
        self.batch |= {"resolution": jnp.full((1,), 2.0), "use_clamped_fape": jnp.full((1,), 0.5)}
        shapes = jax.eval_shape(model.init, jax.random.key(0), spec)
        self.params = random_params(shapes)

        def loss(params: Any, batch: Any, chosen: Any) -> Any:
            _, out = model.loss(params, None, batch)
            terms, weights = loss_terms(out, heads)
            assert terms.keys() == TERMS
            terms, zeroed = zero_unusable(terms)
            return sum(chosen[name] * weights[name] * terms[name] for name in terms), zeroed

        gradient = jax.grad(loss, has_aux=True)
        args = self.params, self.batch, self.chosen()
        self._run = compile_quickly(gradient, *args)

    def chosen(self, *without: str) -> dict[str, jax.Array]:
        return {name: jnp.asarray(float(name not in without)) for name in sorted(TERMS)}

    def gradient(self, params: Any, batch: Any, *without: str) -> tuple[Any, set[str]]:
        """The gradient of all terms but some, and the terms that were not finite."""
        gradient, zeroed = self._run(params, batch, self.chosen(*without))
        return gradient, {name for name, flag in zeroed.items() if flag}


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem()


def assert_same_gradients(actual: Any, expected: Any) -> None:
    scale = max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(expected))
    assert scale > 0.0
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7 * scale),
        actual,
        expected,
    )


def test_every_parameter_of_a_model_with_templates_has_a_finite_gradient(problem: Problem) -> None:
    gradient, zeroed = problem.gradient(problem.params, problem.batch)
    assert not zeroed
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
    templates = {path: leaf for path, leaf in gradient.items() if "template" in path}
    assert len(templates) > 10
    assert all(np.any(leaf) for values in templates.values() for leaf in values.values())


@pytest.mark.parametrize(
    ("feature", "value", "broken"),
    [
        ("chi_angles", jnp.nan, {"supervised_chi"}),
        ("bert_mask", jnp.inf, {"masked_msa"}),
        ("atom14_gt_positions", jnp.nan, {"fape"}),
        ("all_atom_mask", jnp.nan, {"plddt_loss", "experimentally_resolved"}),
    ],
)
def test_a_bad_label_costs_only_its_own_terms(
    problem: Problem, feature: str, value: float, broken: set[str]
) -> None:
    batch = {**problem.batch, feature: jnp.full_like(problem.batch[feature], value)}
    gradient, zeroed = problem.gradient(problem.params, batch)
    assert zeroed == broken
    # Not even cleaned: nothing that is not finite reaches a parameter.
    expected, _ = problem.gradient(problem.params, problem.batch, *broken)
    assert_same_gradients(gradient, expected)


def test_a_finite_term_may_have_a_gradient_that_is_not(problem: Problem) -> None:
    label = problem.batch["atom14_gt_positions"].at[0, 0, 0, 0].set(jnp.inf)
    gradient, zeroed = problem.gradient(
        problem.params, {**problem.batch, "atom14_gt_positions": label}
    )
    assert not zeroed  # An infinite error is clamped.
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("module", "broken", "either_way"),
    [
        ("distogram_head/half_logits", {"distogram"}, set()),
        # The aligned error of a structure that is not finite is another target, not NaN.
        (
            "structure_module/initial_projection",
            {"fape", "supervised_chi", "plddt_loss", "violation"},
            {"tm"},
        ),
    ],
)
def test_a_broken_head_costs_only_its_own_terms(
    problem: Problem, module: str, broken: set[str], either_way: set[str]
) -> None:
    path = f"{ITERATION}/{module}"
    values = {name: jnp.full_like(leaf, jnp.nan) for name, leaf in problem.params[path].items()}
    gradient, zeroed = problem.gradient(
        {**problem.params, path: values}, problem.batch, *either_way
    )
    assert zeroed == broken
    expected, _ = problem.gradient(problem.params, problem.batch, *broken, *either_way)
    assert_same_gradients(jax.jit(finite_gradient)(gradient), expected)


def test_cotangents_pass_unless_they_are_not_finite() -> None:
    def loss(x: jax.Array) -> jax.Array:
        good = jnp.sum(zero_nonfinite_cotangents(x) ** 2)
        bad = jnp.sum(jnp.sqrt(zero_nonfinite_cotangents({"x": x})["x"] * 0.0) + 3.0 * x)
        return good + bad

    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([1.0, 2.0])), [5.0, 7.0])
    np.testing.assert_array_equal(zero_nonfinite_cotangents(jnp.array([jnp.nan])), [jnp.nan])
