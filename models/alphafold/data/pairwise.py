"""Global alignment of two sequences of nearly the same protein, through gemmi.

Used to place observed residues in a full sequence and to move an alignment between coordinate
systems. Gaps cost much more than mismatches here: the sequences are the same protein up to
mutations, tags and unresolved stretches, never distant homologues. The trap is a gap placed one
residue off where a loop is missing; the gap-opening cost after a chain break is left to the caller
who knows the residue numbers.
"""

from __future__ import annotations

import dataclasses
import re

import gemmi
import numpy as np
from numpy.typing import NDArray

_CIGAR = re.compile(r"(\d+)([MID])")


@dataclasses.dataclass(frozen=True, eq=False)
class SequenceMatch:
    """Which residues of two sequences face each other.

    Attributes:
        first: positions in the first sequence. # shape=(matched,), dtype=int64
        second: their partners in the second. # shape=(matched,), dtype=int64
        identity: fraction of the pairs with the same letter, 0 without pairs.
    """

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    identity: float


def match_sequences(first: str, second: str) -> SequenceMatch:
    """Align two one-letter sequences globally and return the matched positions."""
    scoring = gemmi.AlignmentScoring()
    scoring.match, scoring.mismatch = 2, -2
    scoring.gapo, scoring.gape = -4, -1
    result = gemmi.align_string_sequences(list(first), list(second), [], scoring)
    pairs_first: list[int] = []
    pairs_second: list[int] = []
    at_first = at_second = 0
    for count_text, operation in _CIGAR.findall(result.cigar_str()):
        count = int(count_text)
        if operation == "M":
            pairs_first.extend(range(at_first, at_first + count))
            pairs_second.extend(range(at_second, at_second + count))
        if operation != "D":
            at_first += count
        if operation != "I":
            at_second += count
    same = sum(first[i] == second[j] for i, j in zip(pairs_first, pairs_second, strict=True))
    return SequenceMatch(
        np.array(pairs_first, dtype=np.int64),
        np.array(pairs_second, dtype=np.int64),
        same / len(pairs_first) if pairs_first else 0.0,
    )
