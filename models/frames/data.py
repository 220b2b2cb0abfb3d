"""Handwritten digits seen again and again through noise, whose strength is one for a batch.

A batch holds a number of frames: the same digits with new noise in each, as a sensor gives in poor
light. Averaging frames takes noise away, so the noisier a batch is, the more of them it needs.
Most batches are clear and a few are not. The traps: the network is not told the strength; and test
batches go through the strengths from weak to strong, so that their accuracy is not a matter of
luck.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from models.digits import data as digits

_MEDIAN = 0.3  # of the noise's standard deviation; the brightest pixel is 1
_SPREAD = 0.8  # of its logarithm


class Batch(NamedTuple):
    """Frames of some digits."""

    frames: np.ndarray  # float32[most, batch, 8, 8]
    labels: np.ndarray  # int32[batch]
    weights: np.ndarray  # float32[batch], 0 for padding


def strength_at(quantile: float) -> float:
    """The standard deviation of the noise that this share of the batches stays below."""
    return float(_MEDIAN * np.exp(_SPREAD * statistics.NormalDist().inv_cdf(quantile)))


def batches(split: str, size: int, most: int, seed: int) -> Iterator[Batch]:
    """One pass over a split.

    Args:
      split: "train" or "test".
      size: digits in a batch; in training, what remains is left out of the pass.
      most: frames of each.
      seed: of the pass.
    """
    images, labels, _ = digits.load(split)
    training = split == "train"
    random = np.random.default_rng(seed if training else 0)
    order = random.permutation(len(images))
    if training:
        order = order[: len(order) // size * size]
    starts = range(0, len(order), size)
    for number, start in enumerate(starts):
        chosen = order[start : start + size]
        weights = (np.arange(size) < len(chosen)).astype(np.float32)
        chosen = np.resize(chosen, size)
        quantile = random.uniform() if training else (number + 0.5) / len(starts)
        noise = random.normal(0, strength_at(quantile), (most, size, *images.shape[1:]))
        yield Batch((images[chosen] + noise).astype(np.float32), labels[chosen], weights)
