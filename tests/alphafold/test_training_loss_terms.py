"""Loss terms: they add up to the model's loss, and one that is not finite does no harm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold.losses.cotangents import zero_nonfinite_cotangents
from models.alphafold.training.loss_terms import (
    finite_gradient,
    loss_terms,
    total_loss,
    zero_unusable,
)
from models.alphafold.training.settings import training_config


def made_output() -> dict:
    """What a model returns, with terms that are told apart by their size."""
    heads = ("distogram", "masked_msa", "predicted_lddt", "experimentally_resolved")
    parts = {
        "backbone_fape": 5.0,
        "sidechain_fape": 7.0,
        "chi_loss": 11.0,
        "angle_norm_loss": 13.0,
        "violation_loss": 17.0,
    }
    output = {name: {"loss": jnp.asarray(float(n))} for n, name in enumerate(heads, start=1)}
    structure = {name: jnp.asarray(value) for name, value in parts.items()}
    return {**output, "structure_module": structure}


def test_terms_times_weights_are_the_loss_of_the_paper() -> None:
    heads = training_config("finetuning").model.heads
    terms, weights = loss_terms(made_output(), heads)
    expected = (
        0.3 * 1 + 2.0 * 2 + 0.01 * 3 + 0.01 * 4 + 0.5 * (5 + 7) + 0.5 * 11 + 0.01 * 13 + 1.0 * 17
    )
    np.testing.assert_allclose(total_loss(terms, weights), expected, rtol=1e-6)


def test_a_term_that_is_not_finite_counts_as_zero_and_is_counted() -> None:
    terms, zeroed = zero_unusable({"fape": jnp.nan, "distogram": jnp.asarray(2.0), "tm": jnp.inf})
    assert float(total_loss(terms, {"fape": 1.0, "distogram": 0.5, "tm": 1.0})) == 1.0
    assert {name: float(flag) for name, flag in zeroed.items()} == {
        "fape": 1.0,
        "distogram": 0.0,
        "tm": 1.0,
    }


def test_the_gradient_of_a_zeroed_term_is_cleaned() -> None:
    def loss(x: jax.Array) -> jax.Array:
        terms, _ = zero_unusable({"good": x[0] ** 2, "bad": jnp.sqrt(x[1]) / x[1]})
        return total_loss(terms, {"good": 1.0, "bad": 1.0})

    gradient = jax.grad(loss)(jnp.array([3.0, 0.0]))
    assert np.isnan(gradient[1])
    np.testing.assert_array_equal(finite_gradient(gradient), [6.0, 0.0])


def test_a_term_without_weight_is_reported_but_not_differentiated() -> None:
    @jax.custom_vjp
    def violation(x: jax.Array) -> jax.Array:
        return x * jnp.inf

    def refuse(_: None, cotangent: jax.Array) -> tuple[jax.Array]:
        raise AssertionError("a term of weight 0 was differentiated")

    violation.defvjp(lambda x: (x * jnp.inf, None), refuse)
    heads = training_config("initial_training").model.heads

    def loss(x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        output = made_output()
        output["structure_module"]["violation_loss"] = violation(x)
        output["distogram"]["loss"] = x**2
        terms, weights = loss_terms(output, heads)
        assert weights["violation"] == weights["experimentally_resolved"] == 0.0
        return total_loss(terms, weights), terms

    gradient, terms = jax.grad(loss, has_aux=True)(jnp.asarray(3.0))
    np.testing.assert_allclose(gradient, 0.3 * 2 * 3.0, rtol=1e-6)
    assert np.isinf(terms["violation"])
    assert float(terms["experimentally_resolved"]) == 4.0


def test_a_zeroed_term_leaves_the_gradient_of_what_it_shares_with_others() -> None:
    def loss(x: jax.Array) -> jax.Array:
        good, bad = zero_nonfinite_cotangents(x), zero_nonfinite_cotangents(x)
        terms, _ = zero_unusable({"good": jnp.sum(good**2), "bad": jnp.sum(jnp.log(-bad))})
        return total_loss(terms, {"good": 1.0, "bad": 1.0})

    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([3.0, 0.0])), [6.0, 0.0])
