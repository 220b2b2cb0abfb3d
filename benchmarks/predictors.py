"""What the pilot is compared with: trivial predictors, an oracle, and offline classifiers.

Each trivial predictor is asked for the counts of a step before it sees them, and then told them,
as the pilot is. The offline classifiers see all training steps at once, as often as they like, and
are a bound on what the features hold rather than rivals.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from jdynoff.pilot.features import LEAF_FEATURES

Path = tuple[int, ...]


class Predictor(Protocol):
    """Predicts the counts of a step from its features and the steps before it."""

    def predict(self, features: np.ndarray) -> np.ndarray:
        """The counts of the step to come, i32[B]."""

    def update(self, features: np.ndarray, counts: np.ndarray) -> None:
        """Takes note of a finished step."""


class LastPath:
    """The counts of the step before."""

    def __init__(self, blocks: int) -> None:
        self._last = np.zeros(blocks, np.int32)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """See `Predictor`."""
        return self._last

    def update(self, features: np.ndarray, counts: np.ndarray) -> None:
        """See `Predictor`."""
        self._last = np.asarray(counts, np.int32)


class MostFrequent:
    """The path seen most often; of equals, the one seen first."""

    def __init__(self, blocks: int) -> None:
        self._seen: collections.Counter[Path] = collections.Counter()
        self._blocks = blocks

    def predict(self, features: np.ndarray) -> np.ndarray:
        """See `Predictor`."""
        return _most_common(self._seen, self._blocks)

    def update(self, features: np.ndarray, counts: np.ndarray) -> None:
        """See `Predictor`."""
        self._seen[_path(counts)] += 1


class Markov:
    """The path that has most often followed the last one; a new one is followed by itself."""

    def __init__(self, blocks: int) -> None:
        self._followed: dict[Path, collections.Counter[Path]] = {}
        self._last = (0,) * blocks

    def predict(self, features: np.ndarray) -> np.ndarray:
        """See `Predictor`."""
        followed = self._followed.get(self._last)
        return np.array(self._last if not followed else followed.most_common(1)[0][0], np.int32)

    def update(self, features: np.ndarray, counts: np.ndarray) -> None:
        """See `Predictor`."""
        path = _path(counts)
        self._followed.setdefault(self._last, collections.Counter())[path] += 1
        self._last = path


class SizeOnly:
    """The path of the earlier step with the most similar sizes; of equals, the latest.

    Args:
        blocks: B.
        columns: of the features, the sizes; None for "log size" of `batch_features`.
    """

    def __init__(self, blocks: int, columns: Sequence[int] | None = None) -> None:
        self._columns = columns
        self._blocks = blocks
        self._sizes: list[np.ndarray] = []
        self._paths: list[np.ndarray] = []

    def predict(self, features: np.ndarray) -> np.ndarray:
        """See `Predictor`."""
        if not self._paths:
            return np.zeros(self._blocks, np.int32)
        distances = np.abs(np.stack(self._sizes) - self._size(features)).sum(axis=1)
        return self._paths[len(distances) - 1 - int(np.argmin(distances[::-1]))]

    def update(self, features: np.ndarray, counts: np.ndarray) -> None:
        """See `Predictor`."""
        self._sizes.append(self._size(features))
        self._paths.append(np.asarray(counts, np.int32))

    def _size(self, features: np.ndarray) -> np.ndarray:
        if self._columns is None:
            return np.asarray(features)[LEAF_FEATURES.index("log size") :: len(LEAF_FEATURES)]
        return np.asarray(features)[list(self._columns)]


class Oracle:
    """Is told the counts of all steps in advance."""

    def __init__(self, counts: Iterable[np.ndarray]) -> None:
        self._counts = collections.deque(np.asarray(row, np.int32) for row in counts)

    def predict(self, features: np.ndarray) -> np.ndarray:
        """See `Predictor`."""
        return self._counts[0]

    def update(self, features: np.ndarray, counts: np.ndarray) -> None:
        """See `Predictor`."""
        self._counts.popleft()


def _path(counts: np.ndarray) -> Path:
    return tuple(int(count) for count in counts)


def _most_common(seen: collections.Counter[Path], blocks: int) -> np.ndarray:
    return np.array(seen.most_common(1)[0][0] if seen else (0,) * blocks, np.int32)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Recorded steps."""

    features: np.ndarray  # f32[n, F]
    counts: np.ndarray  # i32[n, B]


@dataclasses.dataclass(frozen=True)
class Offline:
    """The best of the offline classifiers on the test steps."""

    name: str
    predicted: np.ndarray  # i32[n, B]
    block_accuracy: float
    path_accuracy: float
    all_block_accuracies: dict[str, float]  # by name


def offline_best(train: Steps, test: Steps, *, seed: int = 0) -> Offline:
    """Trains classifiers of scikit-learn, one for each block, and takes the best kind.

    Each sees the features and the path before the step, as the pilot does. The kind is chosen on
    the test steps, which favours it.

    Args:
        train: to learn from, in order.
        test: the steps that follow, in order.
        seed: of the classifiers.
    """
    train_inputs = _with_previous(train, np.zeros_like(train.counts[0]))
    test_inputs = _with_previous(test, train.counts[-1])
    found = []
    for name, model in _classifiers(seed).items():
        columns = [
            _fitted_prediction(model, train_inputs, column, test_inputs)
            for column in train.counts.T
        ]
        predicted = np.stack(columns, axis=1).astype(np.int32)
        right = predicted == test.counts
        found.append((float(right.mean()), float(right.all(axis=1).mean()), name, predicted))
    accuracies = {name: accuracy for accuracy, _, name, _ in found}
    block_accuracy, path_accuracy, name, predicted = max(found, key=lambda entry: entry[:2])
    return Offline(name, predicted, block_accuracy, path_accuracy, accuracies)


def _classifiers(seed: int) -> dict[str, Any]:
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return {
        "random forest": RandomForestClassifier(200, random_state=seed),
        "gradient boosting": HistGradientBoostingClassifier(max_iter=50, random_state=seed),
        "MLP": make_pipeline(
            StandardScaler(), MLPClassifier((64, 64), max_iter=500, random_state=seed)
        ),
    }


def _fitted_prediction(
    model: Any, inputs: np.ndarray, counts: np.ndarray, test_inputs: np.ndarray
) -> np.ndarray:
    from sklearn.base import clone

    if len(np.unique(counts)) == 1:
        return np.full(len(test_inputs), counts[0])
    return np.asarray(clone(model).fit(inputs, counts).predict(test_inputs))


def _with_previous(steps: Steps, before: np.ndarray) -> np.ndarray:
    previous = np.concatenate([before[None], steps.counts[:-1]])
    return np.concatenate([steps.features, np.log1p(previous)], axis=1)
