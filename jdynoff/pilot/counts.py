"""What a prediction is a distribution over: classes of a block's number of runs.

Small counts are classes of their own, so that a branch or a short loop is predicted exactly. Beyond
them a class is a range of counts, a quarter of an octave wide, which bounds both the number of
classes and the relative error (a tenth). The trap: a block that can run at most n times must never
be predicted to run more often, so the last class of a block is cut at its own n.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

EXACT = 128  # counts below this are classes of their own
LARGEST = 2**24 - 1  # largest count that a float32 holds exactly, with all smaller ones
_CLASSES_PER_OCTAVE = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Classes:
    """How the counts of B blocks fall into K classes.

    Attributes:
        first: i32[K], the smallest count of each class.
        typical: i32[K], the count that each class stands for.
        most: i32[B], the largest possible count of each block.
        possible: bool[B, K], whether a block can have a count of that class.
    """

    first: np.ndarray
    typical: np.ndarray
    most: np.ndarray
    possible: np.ndarray

    @property
    def number(self) -> int:
        """K."""
        return len(self.first)

    def to_class(self, counts: jax.Array) -> jax.Array:
        """The classes of counts.

        Args:
            counts: i32[..., B]; what is impossible is taken as the nearest possible count.

        Returns:
            i32[..., B].
        """
        bounded = jnp.clip(jnp.asarray(counts, jnp.int32), 0, self.most)
        found = jnp.searchsorted(self.first, bounded, side="right", method="compare_all")
        return found.astype(jnp.int32) - 1

    def to_count(self, classes: jax.Array) -> jax.Array:
        """The counts that classes stand for.

        Args:
            classes: i32[..., B].

        Returns:
            i32[..., B], at most what the block can have.
        """
        return jnp.minimum(jnp.asarray(self.typical)[classes], self.most)


def classes(most: Sequence[int | None]) -> Classes:
    """Chooses the classes for some blocks.

    Args:
        most: the largest possible count of each block; None where nothing bounds it.

    Returns:
        As many classes as the block with the largest bound needs.
    """
    bounds = np.array([LARGEST if m is None else min(m, LARGEST) for m in most], np.int32)
    largest = int(bounds.max(initial=1))
    octaves = np.log2((LARGEST + 1) / EXACT)
    exponents = np.arange(int(octaves * _CLASSES_PER_OCTAVE)) / _CLASSES_PER_OCTAVE
    starts = np.concatenate([np.arange(EXACT), np.round(EXACT * 2**exponents)]).astype(np.int32)
    starts = starts[starts <= largest]
    last = np.append(starts[1:], starts[-1] + 1 if largest < EXACT else largest + 1) - 1
    return Classes(
        first=starts,
        typical=((starts + last) // 2).astype(np.int32),
        most=bounds,
        possible=starts[None, :] <= bounds[:, None],
    )
