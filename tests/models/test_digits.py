"""The network of data-dependent depth over handwritten digits."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from models.digits import data
from models.digits.network import (
    NARROW,
    SKIPPED,
    WIDE,
    Network,
    Settings,
    forward,
    initial_parameters,
)
from models.digits.train import make
from models.training import accuracy
from models.workload import State, Workload
from tests.models.workloads import (
    assert_batches_are_static_and_deterministic,
    assert_managed_is_plain,
    trained,
)

pytest.importorskip("sklearn")

LEAST_ACCURACY = 0.6  # small, after 80 steps; of the whole training see docs/workloads.md


def test_difficulty_compares_the_nearest_with_the_nearest_of_another_class() -> None:
    known = np.zeros((3, 8, 8), np.float32)
    known[:, 0, 0] = [0, 3, 10]
    image = np.zeros((1, 8, 8), np.float32)
    image[0, 0, 0] = 1
    labels = np.array([0, 0, 1])
    np.testing.assert_allclose(data.difficulties(image, known, labels), [1 / 9], rtol=1e-4)
    # One of the known is not compared with itself.
    np.testing.assert_allclose(data.difficulties(known[:1], known, labels), [3 / 10], rtol=1e-4)


def test_splits_are_whole_and_test_batches_go_from_easy_to_hard() -> None:
    training, testing = data.load("train"), data.load("test")
    assert (len(training.labels), len(testing.labels)) == (1440, 357)
    batches = list(data.batches("test", 48, 0))
    assert sum(batch.weights.sum() for batch in batches) == 357
    order = testing.difficulty.argsort(kind="stable")
    np.testing.assert_array_equal(batches[0].labels, testing.labels[order[:48]])
    with pytest.raises(ValueError, match="'dev'"):
        data.load("dev")


def test_batches_are_static_and_deterministic() -> None:
    assert_batches_are_static_and_deterministic(make())


def test_noisy_batches_differ_in_their_noise() -> None:
    assert_batches_are_static_and_deterministic(make(form="noisy"))
    noisy = [batch.images for batch in data.batches("test", 60, 0, "noisy")]
    assert np.all(noisy[0] * 16 == np.round(noisy[0] * 16))  # as scanned
    black = [np.mean(images == 1) for images in noisy[1:]]  # the more noise, the more is clipped
    assert black == sorted(black)
    shares = [np.mean(batch.images == 1) for batch in data.batches("train", 60, 0, "noisy")]
    assert max(shares) > 1.5 * min(shares)
    with pytest.raises(ValueError, match="'blurred'"):
        make(form="blurred")


@pytest.mark.parametrize(
    ("nearly_sure", "sure", "what"),
    [(0.0, 0.0, SKIPPED), (0.0, 1.1, NARROW), (1.1, 1.1, WIDE)],
)
def test_sureness_decides_what_every_block_does(nearly_sure: float, sure: float, what: int) -> None:
    network = Network(Settings(3, 8, (8, 16), sure=sure, nearly_sure=nearly_sure))
    batch = next(data.batches("train", 16, 0))
    parameters = initial_parameters(network, jax.random.key(0))
    logits, path = jax.jit(partial(forward, network))(parameters, batch)
    np.testing.assert_array_equal(path, [what] * 3)
    assert logits.shape == (4, 16, 10)
    if what == SKIPPED:
        np.testing.assert_array_equal(logits[1:], logits[:-1])


@pytest.fixture(scope="module", params=data.FORMS)
def after_training(request: pytest.FixtureRequest) -> tuple[Workload, State]:
    workload = make(form=request.param)
    return workload, trained(workload, 80)


def test_it_learns_and_then_takes_fewer_blocks_for_easy_batches(
    after_training: tuple[Workload, State],
) -> None:
    workload, state = after_training
    assert workload.baseline < 0.2 < LEAST_ACCURACY <= accuracy(workload, state.parameters)
    score = jax.jit(workload.score)
    easy, *_, hard = workload.batches("test", 0)
    costs = [int(score(state.parameters, batch)["path"].sum()) for batch in (easy, hard)]
    assert costs[0] < costs[1]


def test_managed_training_takes_the_same_paths_to_the_same_results(
    after_training: tuple[Workload, State],
) -> None:
    paths = assert_managed_is_plain(*after_training, passes_before=10)
    assert len({path.tobytes() for path in paths}) > 1
