"""The loop that shows steps to a pilot, for its tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.pilot.streams import (
    PATHS,
    SUMMED,
    batch_of_six_paths,
    chain_of_paths,
    described,
    sums_of_choices,
)
from jdynoff.pilot.learner import Learner


def show(learner: Learner) -> Callable[[Any, np.ndarray, np.ndarray], tuple[Any, np.ndarray]]:
    """A function from a state and steps to the next state and what was predicted for each."""

    def step(state: Any, seen: tuple[Any, Any]) -> tuple[Any, Any]:
        return learner.update(state, *seen), learner.predict(state, seen[0])

    scanned = jax.jit(lambda state, *steps: jax.lax.scan(step, state, steps))

    def shown(state: Any, features: np.ndarray, counts: np.ndarray) -> tuple[Any, np.ndarray]:
        state, predicted = scanned(state, features, counts)
        return state, np.asarray(predicted)

    return shown


def path_accuracy(predicted: np.ndarray, counts: np.ndarray) -> float:
    return float((predicted == counts).all(axis=1).mean())


__all__ = [
    "PATHS",
    "SUMMED",
    "batch_of_six_paths",
    "chain_of_paths",
    "described",
    "path_accuracy",
    "show",
    "sums_of_choices",
]
