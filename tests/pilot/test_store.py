"""A pilot goes on where it was saved, and in its own program only."""

from __future__ import annotations

import numpy as np
import pytest

from jdynoff.errors import ConfigurationError
from jdynoff.pilot.learner import Learner
from jdynoff.pilot.store import restore, save
from tests.pilot.learning import PATHS, batch_of_six_paths, described


@pytest.fixture(scope="module")
def saved(six_paths, tmp_path_factory):
    learner, shown = six_paths
    features, counts = batch_of_six_paths(500)
    state, _ = shown(learner.initial(), features, counts)
    directory = tmp_path_factory.mktemp("pilot") / "saved"
    save(directory, learner, learner.initial())
    save(directory, learner, state)
    return directory, np.asarray(state)


def test_goes_on_bit_for_bit(saved, six_paths) -> None:
    directory, state = saved
    learner, shown = six_paths
    restored = restore(directory, Learner(described(PATHS), learner.feature_count))
    np.testing.assert_array_equal(restored, state)
    features, counts = batch_of_six_paths(500)
    np.testing.assert_array_equal(
        shown(restored, features, counts)[0], shown(state, features, counts)[0]
    )


def test_keeps_only_the_latest_save(saved) -> None:
    directory, _ = saved
    assert [path.name for path in directory.iterdir() if path.is_dir()] == ["1"]


@pytest.mark.parametrize(
    ("number", "most", "features", "reason"),
    [
        (PATHS - 1, 1, 34, "this program has no blocks block 5"),
        (PATHS + 1, 1, 34, "the saved one has no blocks block 6"),
        (PATHS, 2, 34, "block 0.*another description or largest count"),
        (PATHS, 1, 35, "features: 34 there, 35 here"),
    ],
)
def test_refuses_another_program_with_the_reason(saved, number, most, features, reason) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        restore(saved[0], Learner(described(number, most), features))


def test_refuses_a_directory_without_a_pilot(tmp_path, six_paths) -> None:
    with pytest.raises(ConfigurationError, match="no pilot"):
        restore(tmp_path / "none", six_paths[0])
    with pytest.raises(ConfigurationError, match="no pilot"):
        restore(tmp_path, six_paths[0])
