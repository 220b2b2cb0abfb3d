"""Votes of recalled steps carry to the counts next to theirs, as far as is learned."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jdynoff.pilot import recall

CLASSES = 41
WINDOW = jnp.asarray([[20, 5], [24, 5], [20, 30]])
VOTES = jnp.asarray([0.5, 0.3, 0.2])


def test_a_vote_falls_by_the_same_share_with_every_class() -> None:
    reach = jnp.asarray([0.4, 0.0])
    alone = recall.probabilities(jnp.asarray([1.0, 0.0, 0.0]), reach, WINDOW, CLASSES)
    share = float(recall.carried(reach)[0])
    assert 0.1 < share < 0.5
    np.testing.assert_allclose(alone[0, 21:25] / alone[0, 20:24], share, rtol=1e-4)
    np.testing.assert_allclose(alone[0, 16:20] / alone[0, 17:21], share, rtol=1e-4)
    assert float(recall.carried(reach)[1]) < 0.01  # nothing has been learned of this block


def test_what_is_learned_from_is_what_predicts() -> None:
    reach = jnp.asarray([0.5, 0.1])
    predicted = recall.probabilities(VOTES, reach, WINDOW, CLASSES)
    assert np.all(np.sum(predicted, axis=1) <= 1)
    for count in (19, 20, 22, 24):
        chosen = jnp.asarray([[count, 5]])
        found = jnp.exp(recall.log_likelihood(VOTES[None], reach, chosen, WINDOW))[0]
        floor = found[0] - predicted[0, count]  # what is left to counts that nobody had
        np.testing.assert_allclose(floor, 0.01, atol=1e-4)


def test_no_parameter_makes_it_infinite() -> None:
    def loss(reach: jax.Array) -> jax.Array:
        return jnp.sum(recall.log_likelihood(VOTES[None], reach, jnp.asarray([[20, 7]]), WINDOW))

    for extreme in (-100.0, 100.0):
        value, gradient = jax.value_and_grad(loss)(jnp.full(2, extreme))
        assert np.isfinite(value)
        assert np.all(np.isfinite(gradient))
