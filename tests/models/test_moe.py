"""The mixture of experts over source text."""

from __future__ import annotations

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.moe import data
from models.moe.network import balance_loss, forward, initial_parameters
from models.moe.train import SIZES, make
from models.training import accuracy
from models.workload import State, Workload
from tests.models.workloads import (
    assert_batches_are_static_and_deterministic,
    assert_managed_is_plain,
    trained,
)

SETTINGS = SIZES["small"].settings
run = jax.jit(partial(forward, SETTINGS))


def test_kinds_of_text_are_told_apart() -> None:
    code = "x\n    def f(self):\n        return self.x\n    y = f(3)\nx"
    prose = "x\nThis module reads files of the old format,\nwhich some programs still write.\nx"
    table = "x\n    0x0041: 0x0061,\n    0x0042: 0x0062,\n    0x0043: 0x0063,\nx"
    assert [data.KINDS[data.kind_of(text)] for text in (code, prose, table)] == [
        "code",
        "prose",
        "table",
    ]


def test_batches_are_static_and_deterministic() -> None:
    workload = make()
    assert_batches_are_static_and_deterministic(workload, most=20)  # a training pass is long
    batch = next(workload.batches("train", 0))
    assert batch.characters.max() < data.CHARACTERS


def test_a_batch_of_training_is_stretches_in_a_row_and_the_next_one_is_somewhere_else() -> None:
    one, other = (batch.characters for batch in itertools.islice(make().batches("train", 0), 2))
    np.testing.assert_array_equal(one[:-1, -1], one[1:, 0])
    text = data.text("train").tobytes()
    places = [text.find(rows[:, :-1].astype(np.uint8).tobytes()) for rows in (one, other)]
    assert min(places) >= 0
    assert places[1] - places[0] != one[:, :-1].size


def test_the_load_is_balanced_at_one() -> None:
    chosen = jnp.array([0, 1, 2, 3])
    np.testing.assert_allclose(balance_loss(jnp.full((4, 4), 0.25), chosen), 1.0)
    np.testing.assert_allclose(balance_loss(jnp.eye(4)[jnp.zeros(4, int)], 0 * chosen), 4.0)


def test_what_is_scored_does_not_depend_on_what_comes_later() -> None:
    parameters = initial_parameters(SETTINGS, jax.random.key(0))
    text = jax.random.randint(jax.random.key(1), (2, SETTINGS.length), 0, data.CHARACTERS)
    for place in (SETTINGS.context, SETTINGS.length - 1):
        changed = text.at[:, place].add(1) % data.CHARACTERS
        before, path, _ = run(parameters, text)
        after, same_path, _ = run(parameters, changed)
        np.testing.assert_array_equal(path, same_path)
        np.testing.assert_allclose(before[:, :place], after[:, :place], atol=1e-5)
        assert not np.allclose(before[:, place], after[:, place], atol=1e-3)


def test_a_sequence_is_its_experts_alone() -> None:
    parameters = initial_parameters(SETTINGS, jax.random.key(0))
    text = jax.random.randint(jax.random.key(1), (4, SETTINGS.length), 0, data.CHARACTERS)
    together, path, _ = run(parameters, text)
    for number in range(4):
        alone, own_path, _ = run(parameters, text[number : number + 1])
        np.testing.assert_array_equal(own_path[:, 0], path[:, number])
        np.testing.assert_allclose(alone[0], together[number], atol=1e-4)


@pytest.fixture(scope="module")
def after_training() -> tuple[Workload, State]:
    workload = make()
    return workload, trained(workload, 150)


def test_it_learns(after_training: tuple[Workload, State]) -> None:
    workload, state = after_training
    assert accuracy(workload, state.parameters) > workload.baseline + 0.02


def test_managed_training_takes_the_same_paths_to_the_same_results(
    after_training: tuple[Workload, State],
) -> None:
    paths = assert_managed_is_plain(*after_training, passes_before=1)
    assert len({path.tobytes() for path in paths}) > 1
