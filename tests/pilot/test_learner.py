"""The pilot learns which path a batch takes, and nothing that it is given can break it."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.predictors import LastPath, Markov
from jdynoff.errors import ConfigurationError
from jdynoff.pilot.learner import MOST_BYTES, Described, Learner
from tests.pilot.learning import (
    PATHS,
    SUMMED,
    batch_of_six_paths,
    chain_of_paths,
    described,
    path_accuracy,
    show,
    sums_of_choices,
)


def online_accuracy(predictor, features, counts, start):
    right = []
    for row, path in zip(features, counts, strict=True):
        right.append((predictor.predict(row) == path).all())
        predictor.update(row, path)
    return float(np.mean(right[start:]))


def test_learns_a_path_that_depends_on_the_batch(six_paths) -> None:
    learner, shown = six_paths
    features, counts = batch_of_six_paths(500)
    _, predicted = shown(learner.initial(), features, counts)
    assert path_accuracy(predicted[200:], counts[200:]) >= 0.9
    assert online_accuracy(LastPath(PATHS), features, counts, 200) < 0.3


def test_learns_a_path_that_depends_on_the_last_path() -> None:
    features, counts = chain_of_paths(400)
    learner = Learner(described(PATHS), features.shape[1])
    _, predicted = show(learner)(learner.initial(), features, counts)
    accuracy = path_accuracy(predicted[200:], counts[200:])
    assert accuracy >= 0.9
    assert accuracy >= online_accuracy(Markov(PATHS), features, counts, 200) - 0.02


def test_counts_that_sum_many_choices_are_predicted_near_their_mean() -> None:
    features, counts = sums_of_choices(300)
    learner = Learner(described(PATHS, most=SUMMED), features.shape[1])
    _, predicted = show(learner)(learner.initial(), features, counts)
    off = np.abs(predicted - counts)[150:].mean()
    assert off < 0.85 * np.abs(counts[149:-1] - counts[150:]).mean()  # of the last path
    assert (predicted == counts)[150:].mean() > 1.2 * (counts[149:-1] == counts[150:]).mean()


def test_two_runs_learn_the_same(six_paths) -> None:
    learner, shown = six_paths
    features, counts = batch_of_six_paths(500)
    first, _ = shown(learner.initial(), features, counts)
    second, _ = shown(learner.initial(), features, counts)
    np.testing.assert_array_equal(first, second)


@pytest.fixture(scope="module")
def small():
    learner = Learner(described(3, 4), 2, window=8, samples=4, optimizer_steps=2)
    return learner, jax.jit(learner.predict), jax.jit(learner.update)


def test_ignores_features_that_are_not_finite_but_keeps_the_path(small) -> None:
    learner, _, update = small
    state = update(learner.initial(), np.ones(2, np.float32), np.array([1, 0, 0]))
    after = update(state, np.array([np.nan, 1], np.float32), np.array([0, 1, 0]))
    assert int(np.sum(np.asarray(after) != np.asarray(state))) == 2


@pytest.mark.parametrize("size", [0.0, 1e-38, 1e30, -3e38, np.inf, np.nan])
def test_stays_finite_whatever_the_features(small, size) -> None:
    learner, predict, update = small
    state = learner.initial()
    for step in range(6):
        features = np.array([size * (-1) ** step, 1.0], np.float32)
        state = update(state, features, np.array([step, 10**9, -1]))
        assert np.isfinite(state).all()
        predicted = np.asarray(predict(state, features))
        assert ((predicted >= 0) & (predicted <= 4)).all()


def test_never_predicts_more_runs_than_possible() -> None:
    blocks = [Described(f"{most}", np.ones(2), most) for most in (1, 0, 200, 300)]
    learner = Learner(blocks, 3, window=8, samples=4)
    state, update = learner.initial(), jax.jit(learner.update)
    for _ in range(30):
        state = update(state, np.zeros(3, np.float32), np.full(4, 300))
    predicted = np.asarray(learner.predict(state, np.zeros(3, np.float32)))
    assert predicted[:2].tolist() == [1, 0]
    assert 170 <= predicted[2] <= 200
    assert 270 <= predicted[3] <= 300


def test_packing_is_exact(small) -> None:
    learner, _, update = small
    state = update(learner.initial(), np.ones(2, np.float32), np.array([1, 2, 3]))
    again = learner._layout.pack(learner._layout.unpack(state))
    np.testing.assert_array_equal(again, state)
    assert learner.size == len(state)


def test_a_large_pilot_is_small_enough() -> None:
    learner = Learner(described(32, None), 16 * 17)
    assert 4 * learner.size <= MOST_BYTES


class MostFrequentCount(nn.Module):
    classes: int = 0

    @nn.compact
    def __call__(self, features, blocks, previous):
        bias = self.param("bias", nn.initializers.zeros, (self.classes,))
        return jnp.broadcast_to(bias, (len(features), len(blocks), self.classes))


class WrongShape(nn.Module):
    @nn.compact
    def __call__(self, features, blocks, previous):
        return nn.Dense(3)(features)


def test_learns_with_a_module_of_ones_own() -> None:
    learner = Learner(described(3, 4), 2, MostFrequentCount())
    state, update = learner.initial(), jax.jit(learner.update)
    for _ in range(20):
        state = update(state, np.zeros(2, np.float32), np.full(3, 2))
    assert np.asarray(learner.predict(state, np.zeros(2, np.float32))).tolist() == [2, 2, 2]


def test_refuses_a_module_with_other_results() -> None:
    with pytest.raises(ConfigurationError, match=r"WrongShape.*\(2, 3, 5\)"):
        Learner(described(3, 4), 2, WrongShape())


def test_refuses_a_state_that_is_too_large() -> None:
    with pytest.raises(ConfigurationError, match="fewer features"):
        Learner(described(3), 10_000)
