"""Handwritten digits in batches of like difficulty, so that batches differ in what they need.

There are two forms. In "sorted" batches difficulty is that of the images; in "noisy" ones it is
noise, of a strength of its own in each batch, from none to as much as the digits.

The 1797 images of 8 x 8 pixels come with scikit-learn (`load_digits`; Alpaydin and Kaynak, 1998).
They are in the order of their writers, so the split is by position: most writers of the test images
are not in training. Difficulty is a figure of the image alone: how much nearer its nearest training
image is than the nearest of another class. It uses no label of the image itself, so test images are
sorted by the same rule as training images. The trap: the last test batch is padded, and `weights`
says with what.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

FORMS = ("sorted", "noisy")
CLASSES = 10
SIDE = 8
_TRAINING_IMAGES = 1440
_LARGEST_PIXEL = 16.0
# Of a pass's ranks by difficulty: how far an image may stray, so that batches are never twice the
# same.
_STRAY = 0.1
_PIXEL_NOISE = 0.1
_STRONGEST_NOISE = 0.7


class Batch(NamedTuple):
    """Images of like difficulty."""

    images: np.ndarray  # float32[batch, 8, 8], from 0 to 1
    labels: np.ndarray  # int32[batch]
    weights: np.ndarray  # float32[batch], 0 for padding


class Images(NamedTuple):
    """A split."""

    images: np.ndarray  # float32[images, 8, 8]
    labels: np.ndarray  # int32[images]
    difficulty: np.ndarray  # float32[images], from 0 (easy) to 1


def difficulties(images: np.ndarray, known: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Distance to the nearest known image, over that to the nearest one of another class.

    Args:
      images: float32[images, 8, 8].
      known: float32[known, 8, 8]; an image that is itself among them is not compared with itself.
      labels: int32[known].

    Returns:
      float32[images], from 0 to 1.
    """
    left, right = images.reshape(len(images), -1), known.reshape(len(known), -1)
    squares = (left**2).sum(1)[:, None] + (right**2).sum(1)[None] - 2 * left @ right.T
    distances = np.sqrt(np.maximum(squares, 0))
    distances[distances < 1e-2] = np.inf  # itself; rounding leaves it above zero
    nearest = distances.argmin(axis=1)
    other = np.where(labels[None] == labels[nearest][:, None], np.inf, distances).min(axis=1)
    return (distances.min(axis=1) / other).astype(np.float32)


@functools.cache
def load(split: str) -> Images:
    """Reads a split, "train" or "test".

    Raises:
      ValueError: there is no such split.
    """
    if split not in ("train", "test"):
        raise ValueError(f'split is {split!r}; it must be "train" or "test".')
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = (bunch.images / _LARGEST_PIXEL).astype(np.float32)
    labels = bunch.target.astype(np.int32)
    known, known_labels = images[:_TRAINING_IMAGES], labels[:_TRAINING_IMAGES]
    chosen = slice(_TRAINING_IMAGES) if split == "train" else slice(_TRAINING_IMAGES, None)
    return Images(images[chosen], labels[chosen], difficulties(images[chosen], known, known_labels))


def with_noise(images: np.ndarray, strength: float, random: np.random.Generator) -> np.ndarray:
    """Adds noise of a standard deviation; float32[images, 8, 8], from 0 to 1 as before."""
    return np.clip(images + random.normal(0, strength, images.shape), 0, 1).astype(np.float32)


def augment(images: np.ndarray, strength: float, random: np.random.Generator) -> np.ndarray:
    """Moves each image by up to one pixel and adds noise; float32[images, 8, 8]."""
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)))
    rows, columns = random.integers(0, 3, (2, len(images), 1))
    steps = np.arange(SIDE)
    number = np.arange(len(images))[:, None, None]
    moved = padded[number, (rows + steps)[:, :, None], (columns + steps)[:, None, :]]
    return with_noise(moved, strength, random)


def batches(split: str, size: int, seed: int, form: str = "sorted") -> Iterator[Batch]:
    """One pass, in batches of like difficulty.

    Training images are moved about and get noise, and their batches come in random order; test
    batches are the same in every pass, from easy to hard. Sorted training images stray among
    neighbouring batches.

    Args:
      split: "train" or "test".
      size: images in a batch; in training, what remains is left out of the pass.
      seed: of the pass.
      form: "sorted" or "noisy".
    """
    images, labels, difficulty = load(split)
    random = np.random.default_rng(seed if split == "train" else 0)
    ranks = difficulty.argsort(kind="stable").argsort(kind="stable").astype(np.float64)
    if form == "noisy":
        ranks = random.permutation(len(ranks)).astype(np.float64)
    elif split == "train":
        ranks += random.normal(0, _STRAY * len(ranks), len(ranks))
    order = ranks.argsort(kind="stable")
    if split == "train":
        groups = order[: len(order) // size * size].reshape(-1, size)
        for chosen in random.permutation(groups):
            strength = _PIXEL_NOISE
            if form == "noisy":
                strength = random.uniform(0, _STRONGEST_NOISE)
            moved = augment(images[chosen], strength, random)
            yield Batch(moved, labels[chosen], np.ones(size, np.float32))
        return
    for start in range(0, len(order), size):
        chosen = order[start : start + size]
        weights = (np.arange(size) < len(chosen)).astype(np.float32)
        chosen = np.resize(chosen, size)
        given = images[chosen]
        if form == "noisy":
            given = with_noise(given, _STRONGEST_NOISE * start / len(order), random)
        yield Batch(given, labels[chosen], weights)


def baseline() -> float:
    """The share of test images that show the most frequent digit of the training images."""
    frequent = np.bincount(load("train").labels).argmax()
    return float(np.mean(load("test").labels == frequent))
