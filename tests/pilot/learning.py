"""Synthetic steps for the pilot's tests, and the loop that shows them to it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jdynoff.pilot.features import batch_features
from jdynoff.pilot.idioms import IDIOMS, position
from jdynoff.pilot.learner import Described, Learner

PATHS = 6
SUMMED = 72


def described(number: int, most: int | None = 1) -> list[Described]:
    work = np.linspace(0.1, 1, len(IDIOMS))
    return [
        Described(f"block {i}", np.concatenate([work, position(i, number)]), most)
        for i in range(number)
    ]


@functools.cache
def batch_of_six_paths(steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The spread of a batch chooses one of six paths; 3% of them are drawn at random."""
    random = np.random.default_rng(seed)
    statistics = jax.jit(lambda *leaves: batch_features(leaves))
    features, counts = [], []
    for _ in range(steps):
        path = random.integers(PATHS)
        images = random.normal(0, 0.5 + 0.1 * path, (32, 64)).astype(np.float32)
        labels = random.integers(0, 10, 32).astype(np.int32)
        features.append(np.asarray(statistics(images, labels)))
        taken = random.integers(PATHS) if random.random() < 0.03 else path
        counts.append(np.arange(PATHS) <= taken)
    return np.array(features), np.array(counts, np.int32)


def chain_of_paths(steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The path follows from the last path, in 97 of 100 cases; features say nothing."""
    random = np.random.default_rng(seed)
    after, path, counts = (2, 0, 3, 5, 1, 4), 0, []
    for _ in range(steps):
        path = after[path] if random.random() < 0.97 else random.integers(PATHS)
        counts.append(np.eye(PATHS, dtype=np.int32)[path])
    return random.normal(size=(steps, 15)).astype(np.float32), np.array(counts)


def sums_of_choices(steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """72 choices among six, with shares that drift; features say nothing."""
    random = np.random.default_rng(seed)
    logits, counts = random.normal(size=PATHS), []
    for _ in range(steps):
        logits += random.normal(0, 0.015, PATHS)
        counts.append(random.multinomial(SUMMED, np.exp(logits) / np.exp(logits).sum()))
    return random.normal(size=(steps, 15)).astype(np.float32), np.array(counts, np.int32)


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
