"""The network that looks at noisy digits until they have settled."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.digits.data import CLASSES
from models.frames import data
from models.frames.network import Network, change, forward
from models.frames.train import SIZES, make
from models.training import accuracy
from models.workload import State, Workload
from tests.models.workloads import (
    assert_batches_are_static_and_deterministic,
    assert_managed_is_plain,
    trained,
)

pytest.importorskip("sklearn")

SETTINGS = SIZES["small"].settings
NETWORK = Network(SETTINGS)
run = jax.jit(partial(forward, NETWORK))


def test_batches_are_static_and_deterministic() -> None:
    assert_batches_are_static_and_deterministic(make())


def test_frames_differ_by_noise_of_the_strength_of_their_batch() -> None:
    test = list(data.batches("test", 48, 8, 0))
    quantiles = (np.arange(len(test)) + 0.5) / len(test)
    for batch, quantile in zip(test, quantiles, strict=True):
        noise = batch.frames - batch.frames.mean(axis=0)
        found = noise.std() * np.sqrt(8 / 7)
        np.testing.assert_allclose(found, data.strength_at(quantile), rtol=0.05)
    assert data.strength_at(0.5) == pytest.approx(0.3)
    assert data.strength_at(0.95) == pytest.approx(1.12, rel=0.01)
    noise = [batch.frames.std(axis=0).mean() for batch in data.batches("train", 48, 8, 0)]
    assert max(noise) > 4 * min(noise)


def test_change_is_none_for_equal_readings_and_one_for_certain_other_ones() -> None:
    sure = 1e3 * jnp.eye(CLASSES)[:3]
    other = 1e3 * jnp.eye(CLASSES)[3:6]
    weights = jnp.array([1.0, 1.0, 0.0])
    assert change(sure, sure + 1, weights) == 0
    np.testing.assert_allclose(change(sure, other, weights), 1, rtol=1e-6)
    even = jnp.zeros_like(sure)  # a tenth for each class
    np.testing.assert_allclose(change(even, sure, weights), 0.9, rtol=1e-6)
    # Padding does not count.
    np.testing.assert_allclose(change(sure, sure.at[2].set(other[2]), weights), 0, atol=1e-6)


@pytest.fixture(scope="module")
def after_training() -> tuple[Workload, State]:
    workload = make()
    return workload, trained(workload, 150)


def test_it_learns_and_looks_longer_at_noisier_batches(
    after_training: tuple[Workload, State],
) -> None:
    workload, state = after_training
    assert accuracy(workload, state.parameters) > 0.8
    test = list(workload.batches("test", 0))
    looks = [int(run(state.parameters, batch)[1].sum()) for batch in test]
    assert looks[0] < looks[-1]


def test_looking_ends_for_good_with_the_first_look_that_changes_little(
    after_training: tuple[Workload, State],
) -> None:
    workload, state = after_training
    for batch in workload.batches("test", 0):
        readings, path = map(np.asarray, run(state.parameters, batch))
        looks = int(path.sum())
        assert looks >= 1
        assert path[:looks].all()
        before = np.concatenate([np.zeros_like(readings[:1]), readings[:-1]])
        changes = [
            float(change(one, other, batch.weights))
            for one, other in zip(before, readings, strict=True)
        ]
        assert all(value >= SETTINGS.settled for value in changes[: looks - 1])
        if looks < SETTINGS.most:
            assert changes[looks - 1] < SETTINGS.settled
            assert not np.any(changes[looks:])


def test_an_untrained_network_looks_once() -> None:
    workload = make()
    batch = next(workload.batches("train", 0))
    assert run(workload.state.parameters, batch)[1].sum() == 1


def test_managed_training_takes_the_same_paths_to_the_same_results(
    after_training: tuple[Workload, State],
) -> None:
    paths = assert_managed_is_plain(*after_training, passes_before=1)
    assert len({path.tobytes() for path in paths}) > 1
