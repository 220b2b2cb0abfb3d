"""Synthetic steps: how fast a pilot learns what kinds of paths, against trivial predictors.

    python -m benchmarks.pilot.streams

Each step is predicted before it is learned from. The trap: figures of one seed are luck.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.pilot.quality import TRIVIAL, replay, replay_pilot
from benchmarks.predictors import Steps, offline_best
from jdynoff.pilot.features import batch_features
from jdynoff.pilot.idioms import IDIOMS, position
from jdynoff.pilot.learner import Described, Learner

PATHS = 6
SUMMED = 72
_STEPS = 500
_SEEDS = 2
_PARTS = ((50, 100), (100, 200), (200, 500))

Stream = tuple[np.ndarray, np.ndarray]  # features f32[steps, F], counts i32[steps, PATHS]


def described(number: int, most: int | None = 1) -> list[Described]:
    """Blocks that differ in their position only."""
    work = np.linspace(0.1, 1, len(IDIOMS))
    return [
        Described(f"block {i}", np.concatenate([work, position(i, number)]), most)
        for i in range(number)
    ]


@functools.cache
def batch_of_six_paths(steps: int, seed: int = 0) -> Stream:
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


def chain_of_paths(steps: int, seed: int = 0) -> Stream:
    """The path follows from the last path, in 97 of 100 cases; features say nothing."""
    random = np.random.default_rng(seed)
    after, path, counts = (2, 0, 3, 5, 1, 4), 0, []
    for _ in range(steps):
        path = after[path] if random.random() < 0.97 else random.integers(PATHS)
        counts.append(np.eye(PATHS, dtype=np.int32)[path])
    return random.normal(size=(steps, 15)).astype(np.float32), np.array(counts)


def sums_of_choices(steps: int, seed: int = 0) -> Stream:
    """72 choices among six, with shares that drift; features say nothing."""
    random = np.random.default_rng(seed)
    logits, counts = random.normal(size=PATHS), []
    for _ in range(steps):
        logits += random.normal(0, 0.015, PATHS)
        counts.append(random.multinomial(SUMMED, np.exp(logits) / np.exp(logits).sum()))
    return random.normal(size=(steps, 15)).astype(np.float32), np.array(counts, np.int32)


STREAMS: dict[str, tuple[Callable[[int, int], Stream], int]] = {
    "six paths by the batch's spread, 3% at random": (batch_of_six_paths, 1),
    "chain of six paths, 3% at random": (chain_of_paths, 1),
    "72 choices among six, summed": (sums_of_choices, SUMMED),
}


def _shares(predicted: np.ndarray, counts: np.ndarray, first: int, last: int) -> float:
    return float((predicted == counts)[first:last].mean())


def main() -> None:
    """Prints the shares of counts that are right."""
    table = Table(title=f"counts right before the step, {_SEEDS} seeds", title_justify="left")
    table.add_column("")
    for first, last in _PARTS:
        table.add_column(f"steps {first} to {last}", justify="right")
    table.add_column("best trivial one, at the end")
    table.add_column("offline, on the first half")
    for name, (make, most) in STREAMS.items():
        rows, others = [], []
        for seed in range(_SEEDS):
            features, counts = make(_STEPS, seed)
            learner = Learner(described(PATHS, most), features.shape[1])
            predicted = replay_pilot(learner, features, counts)
            rows.append([_shares(predicted, counts, *part) for part in _PARTS])
            others.append(
                {
                    other: _shares(replay(trivial(PATHS), features, counts), counts, *_PARTS[-1])
                    for other, trivial in TRIVIAL.items()
                    if other != "size only"  # half of these features are no statistics
                }
            )
            half = _STEPS // 2
            offline = offline_best(
                Steps(features[:half], counts[:half]), Steps(features[half:], counts[half:])
            )
        means = {other: np.mean([found[other] for found in others]) for other in others[0]}
        best = max(means, key=lambda other: means[other])
        table.add_row(
            name,
            *(f"{share:.2f}" for share in np.mean(rows, axis=0)),
            f"{means[best]:.2f}, {best}",
            f"{offline.block_accuracy:.2f}, {offline.name}",
        )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
