"""Characters of the standard library's source files, and what kind of text they are.

A sequence is a stretch of one file. Kinds differ much in the library: prose (docstrings, comments
and long strings), tables (of encodings, entities, opcodes, sizes) and code. A kind is only for
reports of who was sent where; the network does not see it. The trap: characters beyond ASCII are
one character here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from models.standard_library import sources

CHARACTERS = 128  # ASCII; what is beyond is character 0
KINDS = ("code", "prose", "table")
_TEST_SEQUENCES = 512  # of one pass, spread evenly over the test files
_SYMBOLS = re.compile(r"[0-9]+|0x[0-9a-fA-F]+|\\x[0-9a-fA-F]{2}")
_STATEMENT = re.compile(
    r"^\s*(def|class|if|else|elif|for|return|import|from|try|with|raise)\b|\w\(|\w = |[=:]$"
)


class Batch(NamedTuple):
    """Stretches of source text."""

    characters: np.ndarray  # int32[sequences, length + 1]
    kinds: np.ndarray  # int32[sequences], index into KINDS


def kind_of(text: str) -> int:
    """The kind of a stretch, by its share of digits and its lines that look like code."""
    lines = [line for line in text.splitlines()[1:-1] if line.strip()]
    digits = sum(len(found) for found in _SYMBOLS.findall(text))
    if digits > len(text) / 8:
        return KINDS.index("table")
    code = sum(bool(_STATEMENT.search(line)) for line in lines)
    return KINDS.index("code" if code > len(lines) / 3 else "prose")


@functools.cache
def text(split: str) -> np.ndarray:
    """All characters of a split, file after file, uint8[characters]."""
    joined = "\n".join(source.text for source in sources(split))
    points = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
    return np.where(points < CHARACTERS, points, 0).astype(np.uint8)


def batches(
    split: str, size: int, length: int, seed: int, *, mixed: bool = False
) -> Iterator[Batch]:
    """One pass over a split.

    A batch of training is stretches in a row, as a shard is read, so batches differ in what kind of
    text they hold; passes begin at random places, and their batches come in random order. A test
    pass is always the same.

    Args:
      split: "train" or "test".
      size: sequences in a batch.
      length: characters of a sequence, beside the one that is predicted last.
      seed: of the pass.
      mixed: whether the stretches of a batch of training are from everywhere instead.
    """
    characters = text(split)
    random = np.random.default_rng(seed)
    if split == "train":
        first = random.integers(length if mixed else size * length)
        starts = np.arange(first, len(characters) - length - 1, length)
        if mixed:
            starts = random.permutation(starts)
    else:
        starts = np.linspace(0, len(characters) - length - 1, _TEST_SEQUENCES).astype(np.int64)
    groups = starts[: len(starts) // size * size].reshape(-1, size)
    if split == "train" and not mixed:
        random.shuffle(groups)
    for chosen in groups:
        rows = characters[chosen[:, None] + np.arange(length + 1)]
        kinds = [kind_of(row.tobytes().decode("ascii")) for row in rows]
        yield Batch(rows.astype(np.int32), np.array(kinds, np.int32))


def baseline() -> float:
    """The share of test characters that are the most frequent character of training."""
    frequent = np.bincount(text("train"), minlength=CHARACTERS).argmax()
    return float(np.mean(text("test") == frequent))
