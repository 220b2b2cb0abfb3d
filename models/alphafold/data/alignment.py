"""The multiple sequence alignment as arrays, and its changes of coordinates.

Parsers make an `Alignment`; everything after it works on integers. Row 0 is the query and its
columns are the coordinate system: residues that a row has between two query columns are counted
in `deletion_matrix` at the column that follows them (the field calls insertions relative to the
query "deletions", after the query's point of view). The trap: the same protein's query is
sometimes a slightly different sequence from the structure's (mutations, tags, only a domain);
`onto_sequence` moves the alignment to the structure's coordinates instead of assuming equality.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from models.alphafold.data.errors import DataError
from models.alphafold.data.pairwise import match_sequences
from models.alphafold.data.residues import (
    GAP,
    INVALID_TOKEN,
    MSA_TOKEN_OF_BYTE,
    decode_sequence,
    encode_sequence,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Alignment:
    """Aligned rows in the query's columns.

    Attributes:
        msa: tokens. # shape=(rows, residues), dtype=uint8
        deletion_matrix: residues a row inserts before each column. # (rows, residues), uint16
        names: one per row, from the file.
        source: file the rows came from, for messages.
    """

    msa: NDArray[np.uint8]
    deletion_matrix: NDArray[np.uint16]
    names: tuple[str, ...]
    source: str

    @property
    def num_rows(self) -> int:
        """Rows, the query included."""
        return int(self.msa.shape[0])

    @property
    def num_residues(self) -> int:
        """Columns, that is residues of the query."""
        return int(self.msa.shape[1])

    @property
    def query(self) -> str:
        """The first row without gaps, as letters."""
        row = self.msa[0]
        return decode_sequence(row[row != GAP])


def single_sequence(sequence: str, *, source: str) -> Alignment:
    """Make the alignment of a protein that has none: the sequence alone."""
    msa = encode_sequence(sequence).astype(np.uint8)[None]
    return Alignment(msa, np.zeros(msa.shape, dtype=np.uint16), ("query",), source)


def from_columns(
    rows: Sequence[bytes],
    names: Sequence[str],
    lines: Sequence[int],
    *,
    source: str,
    query_row: int = 0,
) -> Alignment:
    """Build an alignment from full-width rows (Stockholm, aligned FASTA).

    Columns in which the query has a gap are insertions; they leave the matrix and are counted
    as deletions instead. The query row becomes row 0.

    Args:
        rows: equally long byte rows; letters of either case, "-" or "." for gaps.
        names: one per row.
        lines: line of the file on which each row's letters begin, for messages.
        source: file name for messages.
        query_row: which row is the query.

    Raises:
        DataError: rows differ in length, hold a byte that is no residue, or the query is all gaps.
    """
    width = len(rows[0])
    for row, line, name in zip(rows, lines, names, strict=True):
        if len(row) != width:
            raise DataError(
                f"row {name!r} has {len(row)} columns where the first row has {width}; every row "
                "of an alignment must have the same width",
                source=source,
                line=line,
                kind="row-length",
            )
    tokens = tokens_of_rows(rows, names, lines, source=source)
    order = [query_row, *(index for index in range(len(rows)) if index != query_row)]
    tokens = tokens[order]
    present = tokens != GAP
    kept = np.flatnonzero(present[0])
    if kept.size == 0:
        raise DataError(
            f"the query row {names[query_row]!r} has no residue, only gaps",
            source=source,
            line=lines[query_row],
            kind="all-gap",
        )
    inserted = present & ~present[0]
    before = np.cumsum(inserted, axis=1, dtype=np.uint16)[:, kept]
    deletions = np.diff(before, axis=1, prepend=np.zeros((len(rows), 1), dtype=np.uint16))
    alignment = Alignment(
        np.ascontiguousarray(tokens[:, kept]),
        deletions.astype(np.uint16),
        tuple(names[index] for index in order),
        source,
    )
    require_rows_with_residues(alignment)
    return alignment


def tokens_of_rows(
    rows: Sequence[bytes], names: Sequence[str], lines: Sequence[int], *, source: str
) -> NDArray[np.uint8]:
    """Translate equally long rows into tokens, refusing bytes that are no residue."""
    flat = np.frombuffer(b"".join(rows).upper(), dtype=np.uint8)
    tokens = MSA_TOKEN_OF_BYTE[flat].reshape(len(rows), -1)
    invalid = tokens == INVALID_TOKEN
    if invalid.any():
        row, column = (int(index) for index in np.argwhere(invalid)[0])
        raise DataError(
            f"{chr(rows[row][column])!r} at column {column + 1} of row {names[row]!r} is neither a "
            "residue letter nor a gap",
            source=source,
            line=lines[row],
            kind="bad-letter",
        )
    return tokens


def require_rows_with_residues(alignment: Alignment) -> None:
    """Refuse an alignment with homologues of which not one has a residue.

    Raises:
        DataError: there are rows beside the query and all of them are gaps only.
    """
    others = alignment.msa[1:]
    if others.size and bool(np.all(others == GAP)):
        raise DataError(
            f"all {others.shape[0]} rows below the query are gaps only: the alignment carries "
            "nothing; rebuild it or leave the file out",
            source=alignment.source,
            kind="all-gap",
        )


def deduplicate(alignments: Sequence[Alignment]) -> Alignment:
    """Stack alignments of one query in the order given, keeping each distinct row once.

    The first query is row 0. Rows are compared by their tokens alone, so of two rows that differ
    only in insertions the first stays (as in the paper's pipeline).

    Raises:
        DataError: two alignments have different numbers of columns.
    """
    first = alignments[0]
    for other in alignments[1:]:
        if other.num_residues != first.num_residues:
            raise DataError(
                f"has {other.num_residues} columns where {first.source} has {first.num_residues}; "
                "alignments of one chain must share its query sequence",
                source=other.source,
                kind="row-length",
            )
    msa = np.concatenate([alignment.msa for alignment in alignments])
    deletions = np.concatenate([alignment.deletion_matrix for alignment in alignments])
    names = [name for alignment in alignments for name in alignment.names]
    as_keys = np.ascontiguousarray(msa).view(np.dtype((np.void, msa.shape[1]))).ravel()
    _, first_seen = np.unique(as_keys, return_index=True)
    kept = np.sort(first_seen)
    source = " + ".join(alignment.source for alignment in alignments)
    return Alignment(msa[kept], deletions[kept], tuple(names[index] for index in kept), source)


def onto_sequence(
    alignment: Alignment, sequence: str, *, min_identity: float = 0.6
) -> tuple[Alignment, NDArray[np.bool_]]:
    """Move an alignment from its query's coordinates to those of a similar sequence.

    Row 0 becomes `sequence`. Columns of the old query that the sequence lacks turn into
    deletions; residues of the sequence that the old query lacks are gaps in every other row.

    Args:
        alignment: rows in the old query's columns.
        sequence: the structure's sequence (one-letter, X for unknown).
        min_identity: identical fraction of matched residues below which the two are taken for
            different proteins.

    Returns:
        The moved alignment, and which residues of `sequence` the old query covers.

    Raises:
        DataError: the sequences do not belong together.
    """
    target = encode_sequence(sequence).astype(np.uint8)
    if alignment.num_residues == len(target) and np.array_equal(alignment.msa[0], target):
        return alignment, np.ones(len(target), dtype=bool)
    old_query = decode_sequence(np.where(alignment.msa[0] == GAP, 20, alignment.msa[0]))
    match = match_sequences(old_query, sequence)
    if match.identity < min_identity or not match.first.size:
        raise DataError(
            f"the query ({len(old_query)} residues) and the chain ({len(sequence)} residues) agree "
            f"in {match.identity:.0%} of {match.first.size} matched residues, fewer than "
            f"{min_identity:.0%}: they are different proteins; check the pairing of files",
            source=alignment.source,
            kind="wrong-query",
        )
    rows = alignment.num_rows
    msa = np.full((rows, len(target)), GAP, dtype=np.uint8)
    deletions = np.zeros((rows, len(target)), dtype=np.uint16)
    msa[:, match.second] = alignment.msa[:, match.first]
    # A dropped column's residue is an insertion before the next kept column, as are the
    # insertions already counted at that dropped column.
    carried = alignment.deletion_matrix.astype(np.int64)
    dropped = np.ones(alignment.num_residues, dtype=bool)
    dropped[match.first] = False
    carried[:, dropped] += alignment.msa[:, dropped] != GAP
    total = np.cumsum(carried, axis=1)[:, match.first]
    between = np.diff(total, axis=1, prepend=np.zeros((rows, 1), dtype=np.int64))
    # Before the first kept column nothing lies inside the sequence: overhangs are not insertions.
    if match.first[0] > 0:
        between[:, 0] = alignment.deletion_matrix[:, match.first[0]]
    deletions[:, match.second] = between
    msa[0] = target
    deletions[0] = 0
    covered = np.zeros(len(target), dtype=bool)
    covered[match.second] = True
    return Alignment(msa, deletions, alignment.names, alignment.source), covered


def take_residues(alignment: Alignment, start: int, stop: int) -> Alignment:
    """Cut columns start..stop-1 out of an alignment, dropping rows left without any residue."""
    msa = alignment.msa[:, start:stop]
    kept = np.flatnonzero((msa != GAP).any(axis=1))
    if kept.size == 0 or kept[0] != 0:
        kept = np.concatenate([[0], kept])
    names = tuple(alignment.names[index] for index in kept)
    return Alignment(
        msa[kept], alignment.deletion_matrix[kept, start:stop], names, alignment.source
    )
