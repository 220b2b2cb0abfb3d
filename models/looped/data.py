"""Stretches of source text, each batch with a depth of its own.

How often a batch goes through the block is drawn anew for each, as in recurrent-depth language
models (Geiping et al., 2025): one more than a Poisson number whose mean is log-normal. Most batches
are shallow and few are deep, so that the network learns to be of use at any depth. The trap: a test
pass takes one depth only, or its accuracy would be a matter of luck.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from models.moe import data as source_text

CHARACTERS = source_text.CHARACTERS
_SPREAD = 0.6  # of the logarithm of the mean


class Batch(NamedTuple):
    """Stretches of source text."""

    characters: np.ndarray  # int32[sequences, length + 1]
    depth: np.ndarray  # int32[], how often to go through the block


def drawn_depth(random: np.random.Generator, mean: float, most: int) -> int:
    """A depth from 1 to `most`, `mean` on average but for the limit."""
    rate = (mean - 1) * np.exp(random.normal(-(_SPREAD**2) / 2, _SPREAD))
    return int(min(1 + random.poisson(rate), most))


def batches(
    split: str, size: int, length: int, mean: float, most: int, seed: int
) -> Iterator[Batch]:
    """One pass over a split; test batches have the mean depth.

    Args:
      split: "train" or "test".
      size: sequences in a batch.
      length: characters of a sequence, beside the one that is predicted last.
      mean: of the depth.
      most: of the depth.
      seed: of the pass.
    """
    random = np.random.default_rng(seed)
    for batch in source_text.batches(split, size, length, seed, mixed=True):
        depth = drawn_depth(random, mean, most) if split == "train" else round(mean)
        yield Batch(batch.characters, np.asarray(depth, np.int32))
