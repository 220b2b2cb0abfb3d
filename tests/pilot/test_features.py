"""Which arrays are the batch, and that their statistics are cheap, finite and what they say."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdynoff.errors import ConfigurationError
from jdynoff.pilot.features import (
    LEAF_FEATURES,
    MOST_LEAVES,
    _grid,
    batch_features,
    batch_positions,
    checked_features,
    finite,
)


def typed(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


W, B, X, Y, KEY = typed(8, 4), typed(4), typed(32, 8), typed(32, dtype=np.int32), None


def positions(arguments, outputs):
    return batch_positions([(path, aval, donated) for path, aval, donated in arguments], outputs)


def test_what_is_donated_is_state() -> None:
    arguments = [("[0]['w']", W, True), ("[0]['b']", B, True), ("[1]", X, False), ("[2]", Y, False)]
    assert positions(arguments, [W, B, typed()]) == [2, 3]


def test_what_comes_back_is_state() -> None:
    arguments = [("[0]['w']", W, False), ("[0]['b']", B, False), ("[1]", X, False)]
    assert positions(arguments, [typed(), W, B]) == [2]


def test_labels_of_the_type_of_a_prediction_are_batch_beside_donated_state() -> None:
    arguments = [("[0]['w']", W, True), ("[1]", X, False), ("[2]", typed(32, 4), False)]
    assert positions(arguments, [W, typed(32, 4)]) == [1, 2]


def test_keys_are_never_batch() -> None:
    key = jax.eval_shape(lambda: jax.random.key(0))
    raw = typed(2, dtype=np.uint32)
    arguments = [("[0]", key, False), ("[1]", raw, False), ("[2]", X, False)]
    assert positions(arguments, [typed()]) == [2]


def test_if_all_comes_back_all_that_is_not_donated_is_batch() -> None:
    assert positions([("[0]", W, False), ("[1]", X, False)], [W, X]) == [0, 1]


def test_takes_the_largest_and_the_smallest_of_many() -> None:
    arguments = [(f"[0][{i}]", typed(i + 1), False) for i in range(40)]
    found = positions(arguments, [typed()])
    assert len(found) == MOST_LEAVES
    assert found[0] == 0
    assert found[-1] == 39


def of(leaf) -> dict[str, float]:
    return dict(zip(LEAF_FEATURES, np.asarray(batch_features([leaf])).tolist(), strict=True))


def test_statistics_are_what_they_say() -> None:
    leaf = np.zeros((4, 16), np.float32)
    leaf[0, :8], leaf[1, :4] = 2, -1
    found = of(leaf)
    assert found["mean"] == pytest.approx(leaf.mean())
    assert found["std"] == pytest.approx(leaf.std())
    assert (found["min"], found["max"]) == (-1, 2)
    assert found["share of nonzero"] == pytest.approx(12 / 64)
    assert found["largest share of nonzero in a row"] == 0.5
    assert found["log size"] == pytest.approx(np.log1p(12))
    assert found["std of row means"] == pytest.approx(leaf.mean(axis=1).std())
    assert found["mean of part 0"] == pytest.approx(0.25)
    assert found["mean of part 7"] == 0


@pytest.mark.parametrize(
    "leaf",
    [
        np.float32(3),
        np.array([True, False]),
        np.arange(5),
        np.array([np.nan, np.inf, 1], np.float32),
        np.full((3, 3), 3e38, np.float32),
        np.ones((2, 3), np.complex64),
        jnp.ones((2, 2), jnp.bfloat16),
        np.full((2, 2), 255, np.uint8),
    ],
)
def test_statistics_of_any_array_are_finite(leaf) -> None:
    assert np.isfinite(batch_features([jnp.asarray(leaf)])).all()


def test_missing_values_count_as_zero_and_are_reported() -> None:
    found = of(np.array([[np.nan, 1], [1, 1]], np.float32))
    assert found["mean"] == 0.75
    assert found["share of finite"] == 0.75


@pytest.mark.parametrize("shape", [(4096, 4096), (3, 1024, 1024, 3), (10**6,), (10**6, 3)])
def test_reads_a_fixed_number_of_elements_of_a_large_array(shape) -> None:
    grid = jax.eval_shape(_grid, typed(*shape))
    assert 2000 <= grid.size <= 16384


def test_sees_every_channel_of_an_image() -> None:
    image = np.zeros((2, 512, 512, 3), np.float32)
    image[..., 1] = 1
    assert of(image)["mean"] == pytest.approx(1 / 3, abs=0.05)


def test_finite_reports_and_replaces() -> None:
    features, usable = finite(jnp.array([1.0, jnp.nan]))
    assert features.tolist() == [1, 0]
    assert not usable
    assert finite(jnp.ones(2))[1]


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (jnp.ones((2, 2)), r"\(2, 2\)"),
        (jnp.ones(2, jnp.int32), "int32"),
        (jnp.ones(()), r"\(\)"),
        (3.0, "float"),
    ],
)
def test_refuses_features_of_another_kind(result, named) -> None:
    with pytest.raises(ConfigurationError, match=named):
        checked_features(lambda: result)()


def test_refuses_features_whose_number_varies() -> None:
    checked = checked_features(lambda x: x)
    assert checked(jnp.ones(3, jnp.bfloat16)).dtype == jnp.float32
    with pytest.raises(ConfigurationError, match="4 numbers, and 3"):
        checked(jnp.ones(4))
    assert checked(jnp.ones(3)).shape == (3,)
