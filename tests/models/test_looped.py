"""The language model of varying depth."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.looped import data
from models.looped.network import Network, forward, initial_parameters
from models.looped.train import SIZES, make
from models.training import accuracy
from models.workload import State, Workload
from tests.models.workloads import (
    assert_batches_are_static_and_deterministic,
    assert_managed_is_plain,
    trained,
)

SETTINGS = SIZES["small"].settings
NETWORK = Network(SETTINGS)
run = jax.jit(partial(forward, NETWORK))


def test_most_depths_are_small_and_some_are_large() -> None:
    random = np.random.default_rng(0)
    drawn = np.array([data.drawn_depth(random, 6.0, 24) for _ in range(4000)])
    assert (drawn.min(), drawn.max()) == (1, 24)
    assert 5.5 < drawn.mean() < 6.5
    assert np.median(drawn) < drawn.mean()
    assert 0.02 < np.mean(drawn > 12) < 0.2


def test_batches_are_static_and_deterministic() -> None:
    assert_batches_are_static_and_deterministic(make(), most=20)  # a training pass is long


def test_a_character_does_not_depend_on_what_comes_later() -> None:
    parameters = initial_parameters(NETWORK, jax.random.key(0))
    text = jax.random.randint(jax.random.key(1), (2, SETTINGS.length + 1), 0, data.CHARACTERS)
    place = SETTINGS.length // 2
    before = run(parameters, data.Batch(text, jnp.int32(3)))
    after = run(parameters, data.Batch(text.at[:, place].add(1) % 128, jnp.int32(3)))
    np.testing.assert_allclose(before[:, :place], after[:, :place], atol=1e-5)
    assert not np.allclose(before[:, place], after[:, place], atol=1e-3)


def test_the_block_runs_as_often_as_the_batch_says() -> None:
    parameters = initial_parameters(NETWORK, jax.random.key(0))
    text = jax.random.randint(jax.random.key(1), (2, SETTINGS.length + 1), 0, data.CHARACTERS)
    embedded = NETWORK.apply(parameters, text[:, :-1], method="embed")
    state = jnp.zeros_like(embedded)
    for depth in range(3):
        got = run(parameters, data.Batch(text, jnp.int32(depth)))
        want = NETWORK.apply(parameters, state, method="read")
        np.testing.assert_allclose(got, want, atol=1e-4)
        state = NETWORK.apply(parameters, state, embedded, method="block")


@pytest.fixture(scope="module")
def after_training() -> tuple[Workload, State]:
    workload = make()
    return workload, trained(workload, 150)


def test_it_learns(after_training: tuple[Workload, State]) -> None:
    workload, state = after_training
    assert accuracy(workload, state.parameters) > workload.baseline + 0.04


def test_managed_training_takes_the_same_paths_to_the_same_results(
    after_training: tuple[Workload, State],
) -> None:
    paths = assert_managed_is_plain(*after_training, passes_before=1)
    assert len({path.tobytes() for path in paths}) > 1
