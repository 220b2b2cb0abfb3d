"""Functions of the standard library in batches, their nodes in the order of their levels.

A level of a batch is all nodes of one height, of all its trees. Levels are cut into *rows* of a
fixed number of nodes, so that a row's children are in rows before it, and a batch is a list of
rows. Trees of like size are batched, so batches differ in how many rows they have: that number is
`rows`, and what the arrays hold beyond it is nothing. Arrays have one of a few lengths, the
buckets. The trap: the library repeats itself, in its codecs most of all. A function is in the split
of its module (`models.standard_library`), a tree counts once, and one that training has is not in
the test.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from models.standard_library import sources
from models.trees.syntax import ABSENT, Tree, functions, tree_of

_FEWEST_NODES = 8
# Of a pass's ranks by size: how far a tree may stray, so that batches are never twice the same.
_STRAY = 0.05


@dataclasses.dataclass(frozen=True)
class Shape:
    """Which trees there are, and sizes of batches.

    Attributes:
      files: of a split that are read, spread evenly over it; None for all.
      nodes: of a tree, at most.
      trees: in a batch, at most.
      width: nodes in a row.
      buckets: numbers of rows that arrays may have, rising.
    """

    files: int | None
    nodes: int
    trees: int
    width: int
    buckets: tuple[int, ...]


class Batch(NamedTuple):
    """Trees, level by level. A place is row * width + column; the place behind all is absent."""

    labels: np.ndarray  # int32[bucket, width]
    children: np.ndarray  # int32[bucket, width, 2], places
    rows: np.ndarray  # int32[], how many rows there are
    roots: np.ndarray  # int32[trees], places
    answers: np.ndarray  # int32[trees]
    weights: np.ndarray  # float32[trees], 0 for padding


@functools.cache
def trees(split: str, shape: Shape) -> tuple[Tree, ...]:
    """The different trees of a split with 8 to `shape.nodes` nodes, in the order of files."""
    read = sources(split)
    if shape.files is not None:
        read = read[:: max(1, len(read) // shape.files)]
    # Without its answer, so that no question of the test is one that was answered in training.
    seen = {_identity(tree)[:2] for tree in trees("train", shape)} if split == "test" else set()
    found: dict[tuple[bytes, bytes, int], Tree] = {}
    for tree in (tree_of(one) for source in read for one in functions(source.text)):
        identity = _identity(tree)
        if _FEWEST_NODES <= len(tree.labels) <= shape.nodes and identity[:2] not in seen:
            found.setdefault(identity, tree)
    return tuple(found.values())


def _identity(tree: Tree) -> tuple[bytes, bytes, int]:
    return tree.labels.tobytes(), tree.children.tobytes(), tree.answer


def level_sizes(tree: Tree) -> np.ndarray:
    """Nodes of each height, int64[height + 1]."""
    return np.bincount(tree.heights)


def rows_of(sizes: np.ndarray, width: int) -> int:
    """How many rows levels of these sizes take."""
    return int(np.sum(-(-sizes // width)))


def groups(found: Sequence[Tree], order: np.ndarray, shape: Shape) -> Iterator[list[Tree]]:
    """Cuts an order of trees into groups that fit the largest bucket."""
    group: list[Tree] = []
    sizes = np.zeros(0, np.int64)
    for number in order:
        own = level_sizes(found[number])
        length = max(len(sizes), len(own))
        together = np.pad(sizes, (0, length - len(sizes))) + np.pad(own, (0, length - len(own)))
        full = len(group) == shape.trees or rows_of(together, shape.width) > shape.buckets[-1]
        if group and full:
            yield group
            group, together = [], own
        group.append(found[number])
        sizes = together
    if group:
        yield group


def collate(group: Sequence[Tree], shape: Shape) -> Batch:
    """Lays trees out level by level.

    Raises:
      ValueError: they do not fit the largest bucket.
    """
    offsets = np.cumsum([0] + [len(tree.labels) for tree in group])
    heights = np.concatenate([tree.heights for tree in group])
    starts = np.repeat(offsets[:-1], np.diff(offsets))[:, None]
    children = np.concatenate([tree.children for tree in group])
    children = np.where(children == ABSENT, ABSENT, children + starts)
    sizes = np.bincount(heights)
    rows = rows_of(sizes, shape.width)
    bucket = next((bucket for bucket in shape.buckets if bucket >= rows), None)
    if bucket is None:
        raise ValueError(
            f"{len(group)} trees take {rows} rows of {shape.width} nodes, and the largest bucket "
            f"has {shape.buckets[-1]}. Give `groups` smaller trees, or add a bucket."
        )
    # Where each node lies: levels begin at a row, nodes of a level follow one another.
    first_row = np.concatenate([[0], np.cumsum(-(-sizes // shape.width))[:-1]])
    order = heights.argsort(kind="stable")
    within = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    places = np.empty(len(order) + 1, np.int32)
    places[order] = first_row[heights[order]] * shape.width + within
    places[-1] = bucket * shape.width  # index ABSENT

    labels = np.zeros(bucket * shape.width, np.int32)
    labels[places[:-1]] = np.concatenate([tree.labels for tree in group])
    below = np.full((bucket * shape.width, 2), places[-1], np.int32)
    below[places[:-1]] = places[children]
    count = len(group)
    roots = np.zeros(shape.trees, np.int32)
    roots[:count] = places[offsets[1:] - 1]
    answers = np.zeros(shape.trees, np.int32)
    answers[:count] = [tree.answer for tree in group]
    return Batch(
        labels.reshape(bucket, shape.width),
        below.reshape(bucket, shape.width, 2),
        np.int32(rows),
        roots,
        answers,
        (np.arange(shape.trees) < count).astype(np.float32),
    )


def batches(split: str, shape: Shape, seed: int) -> Iterator[Batch]:
    """One pass over a split, trees of like size together.

    Training trees stray among neighbouring batches, and batches come in random order; a test pass
    is always the same, from small to large.
    """
    found = trees(split, shape)
    random = np.random.default_rng(seed)
    sizes = np.array([len(tree.labels) for tree in found])
    ranks = sizes.argsort(kind="stable").argsort(kind="stable").astype(np.float64)
    if split == "train":
        ranks += random.normal(0, _STRAY * len(ranks), len(ranks))
    together = list(groups(found, ranks.argsort(kind="stable"), shape))
    if split == "train":
        together = [together[number] for number in random.permutation(len(together))]
    return (collate(group, shape) for group in together)


def baseline(shape: Shape) -> float:
    """The share of test functions with the more frequent answer of training."""
    frequent = np.mean([tree.answer for tree in trees("train", shape)]) > 0.5
    return float(np.mean([tree.answer == frequent for tree in trees("test", shape)]))
