"""One compiled pilot for the tests that look at its predictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jdynoff.pilot.learner import Learner
from tests.pilot.learning import PATHS, batch_of_six_paths, described, show


@pytest.fixture(scope="session")
def six_paths() -> tuple[Learner, Callable[..., Any]]:
    features, _ = batch_of_six_paths(500)
    learner = Learner(described(PATHS), features.shape[1])
    return learner, show(learner)
