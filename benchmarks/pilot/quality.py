"""Part 2: how often the pilot is right before it sees a step, and how often others are.

Every prediction is made before its step and learned from afterwards, so all of them are of data
not seen yet; the first half of the steps is left out, since everybody has to begin. The offline
classifiers have seen that first half as often as they like.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.harness import Claim
from benchmarks.pilot.recording import Recording
from benchmarks.predictors import (
    LastPath,
    Markov,
    MostFrequent,
    Predictor,
    SizeOnly,
    Steps,
    offline_best,
)
from jdynoff.pilot.guide import describe
from jdynoff.pilot.idioms import equation_counts
from jdynoff.pilot.learner import Described, Learner
from jdynoff.planning.by_path import held_bytes

TRIVIAL: dict[str, Callable[[int], Predictor]] = {
    "last path": LastPath,
    "most frequent": MostFrequent,
    "Markov": Markov,
    "size only": SizeOnly,
}
_RIGHT = 0.95
_NEAR_OFFLINE = 0.02
_STRETCH = 10  # steps


def accuracy(predicted: np.ndarray, counters: np.ndarray) -> tuple[float, float]:
    """Per block, and of whole paths, in the second half of the steps."""
    half = len(counters) // 2
    right = predicted[half:] == counters[half:]
    return float(right.mean()), float(right.all(axis=1).mean())


def distance(predicted: np.ndarray, counters: np.ndarray) -> float:
    """How far counts are from what was predicted, on average in the second half of the steps."""
    half = len(counters) // 2
    return float(np.mean(np.abs(predicted[half:] - counters[half:])))


def difference_error(one: np.ndarray, other: np.ndarray, counters: np.ndarray) -> float:
    """Standard error of the difference of two accuracies in the second half of the steps.

    It is that of the means of stretches of steps, since neighbouring steps are not independent.
    """
    half = len(counters) // 2
    ahead = np.mean((one == counters).astype(float) - (other == counters), axis=1)[half:]
    stretches = [np.mean(part) for part in np.array_split(ahead, max(2, len(ahead) // _STRETCH))]
    return float(np.std(stretches, ddof=1) / np.sqrt(len(stretches)))


def replay(predictor: Predictor, features: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """The predictions of a trivial predictor, i32[steps, n]."""
    predicted = []
    for seen, happened in zip(features, counters, strict=True):
        predicted.append(predictor.predict(seen))
        predictor.update(seen, happened)
    return np.asarray(predicted)


def replay_pilot(learner: Learner, features: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """The predictions of a pilot that starts anew, i32[steps, n]."""

    def step(state: jax.Array, inputs: Any) -> Any:
        seen, happened = inputs
        return learner.update(state, seen, happened), learner.predict(state, seen)

    run = jax.jit(lambda state: jax.lax.scan(step, state, (features, counters))[1])
    return np.asarray(run(learner.initial()))


def descriptions(recording: Recording) -> dict[str, np.ndarray]:
    """What the pilot may be told of the blocks, f32[n, D] each: the ablation."""
    blocks = recording.guide.learned
    place = [describe(block, number, len(blocks)) for number, block in enumerate(blocks)]
    regions = [block.region for block in blocks if block.region is not None]
    names = np.eye(len(blocks), dtype=np.float32)
    found = {
        "idioms": np.stack(place),
        "nothing": np.concatenate([names, np.zeros((len(blocks), 1), np.float32)], axis=1),
    }
    if len(regions) == len(blocks):
        found["equation counts"] = np.asarray(equation_counts(regions), np.float32)
    return found


def claims(recording: Recording, bounds: bool) -> list[Claim]:
    """Accuracy of everybody, and the ablation; `bounds` compares with what must be reached."""
    name = recording.workload.name
    found = []
    sliced = ~recording.learned
    if sliced.any():
        per_block, _ = accuracy(recording.predicted[:, sliced], recording.counters[:, sliced])
        found.append(
            Claim(f"{name}: sliced blocks right", "", 100 * per_block, "%", 100.0, at_least=True)
        )
    if not recording.learned.any():
        return found
    counters = recording.counters[:, recording.learned]
    features = recording.features
    mine = recording.predicted[:, recording.learned]
    ours = accuracy(mine, counters)
    half = len(counters) // 2
    said = {
        other: replay(make(counters.shape[1]), features, counters)
        for other, make in TRIVIAL.items()
    }
    others = {other: accuracy(one, counters) for other, one in said.items()}
    best = max(others, key=lambda other: others[other][0])
    listed = ", ".join(
        f"{other} {100 * block:.0f} ({100 * path:.0f})" for other, (block, path) in others.items()
    )
    series = {"pilot": 100 * ours[0]}
    series.update((other, 100 * block) for other, (block, _) in others.items())
    bound: float | None = None
    if bounds:
        train = Steps(features[:half], counters[:half])
        known = offline_best(train, Steps(features[half:], counters[half:]))
        listed += (
            f"; offline {known.name} {100 * known.block_accuracy:.0f} "
            f"({100 * known.path_accuracy:.0f})"
        )
        bound = min(_RIGHT, known.block_accuracy - _NEAR_OFFLINE)
        series[f"offline, {known.name}"] = 100 * known.block_accuracy
    found.append(
        Claim(
            f"{name}: block counts right",
            "",
            100 * ours[0],
            "%",
            None if bound is None else 100 * bound,
            at_least=True,
            note=f"whole paths {100 * ours[1]:.0f}%, {len(np.unique(counters, axis=0))} paths in "
            f"{len(counters)} steps. {listed}",
            series=series,
        )
    )
    error = 100 * difference_error(mine, said[best], counters)
    found.append(
        Claim(
            f"{name}: better than the best trivial one",
            "",
            100 * (ours[0] - others[best][0]),
            "points",
            0.0 if bounds else None,
            at_least=True,
            note=f"{best}; standard error {error:.2g}",
        )
    )
    found.append(
        Claim(
            f"{name}: block counts off",
            "",
            distance(mine, counters),
            "",
            None,
            note="mean distance; "
            + ", ".join(f"{other} {distance(one, counters):.2g}" for other, one in said.items()),
        )
    )
    found.append(expected_bytes(recording))
    return found + ablation(recording)


def expected_bytes(recording: Recording) -> Claim:
    """How far off the bytes are that the manager is told to expect: what counts are for."""
    traced = recording.managed._last
    decisions = traced.ready.choice.decisions
    needed = held_bytes(traced.program, traced.blocks, decisions).by_path
    half = len(recording.counters) // 2
    happened = np.asarray([needed.of(row) for row in recording.counters])

    def off(predicted: np.ndarray) -> float:
        expected = np.asarray([needed.of(row) for row in predicted])
        relative = np.abs(expected - happened) / np.maximum(happened, 1)
        return 100 * float(np.median(relative[half:]))

    others = {
        name: off(replay(make(recording.counters.shape[1]), recording.features, recording.counters))
        for name, make in TRIVIAL.items()
    }
    return Claim(
        f"{recording.workload.name}: expected bytes off",
        "",
        off(recording.predicted),
        "%",
        None,
        note="median; " + ", ".join(f"{name} {value:.2g}" for name, value in others.items()),
    )


def ablation(recording: Recording) -> list[Claim]:
    """The pilot told less of its blocks, and a pilot of whole paths."""
    counters = recording.counters[:, recording.learned]
    features = recording.features
    found = []
    name = recording.workload.name
    for told, rows in descriptions(recording).items():
        blocks = [
            Described(block.name, row, block.most)
            for block, row in zip(recording.guide.learned, rows, strict=True)
        ]
        learner = Learner(blocks, features.shape[1])
        block, path = accuracy(replay_pilot(learner, features, counters), counters)
        found.append(
            Claim(
                f"{name}: told {told}",
                "",
                100 * block,
                "%",
                None,
                note=f"whole paths {100 * path:.0f}%, {4 * learner.size / 1e3:.0f} kB",
            )
        )
    paths, numbers = np.unique(counters, axis=0, return_inverse=True)
    whole = Learner([Described("path", np.zeros(1, np.float32), len(paths) - 1)], features.shape[1])
    chosen = replay_pilot(whole, features, numbers.reshape(-1, 1).astype(np.int32))[:, 0]
    block, path = accuracy(paths[np.minimum(chosen, len(paths) - 1)], counters)
    found.append(
        Claim(
            f"{name}: whole paths at once",
            "",
            100 * block,
            "%",
            None,
            note=f"whole paths {100 * path:.0f}%; told all {len(paths)} paths beforehand",
        )
    )
    return found
