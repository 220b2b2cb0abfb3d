"""Reads A3M alignments, the format of HHblits, MMseqs2 and ColabFold.

In A3M the upper-case letters and "-" of every row line up with the query's residues, and the
lower-case letters are insertions between them; so rows have different raw lengths and equal
lengths without lower case. ColabFold files may open with a "#" comment and separate parts by NUL
bytes; both are accepted. The trap is a file cut off in the middle of its last row, which is one
row with a wrong length: it is an error with its line, never a silently shorter alignment.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.alphafold.data.alignment import (
    Alignment,
    require_rows_with_residues,
    tokens_of_rows,
)
from models.alphafold.data.errors import DataError, parsing
from models.alphafold.data.residues import GAP
from models.alphafold.data.text_source import read_bytes

_LOWER_CASE = bytes(range(ord("a"), ord("z") + 1))
_NOT_ALIGNED = _LOWER_CASE + b"."


def read_a3m(path: str | Path, *, max_rows: int | None = None) -> Alignment:
    """Read an A3M file, plain or gzip. See `parse_a3m`."""
    with parsing(str(path)):
        return parse_a3m(read_bytes(path), source=str(path), max_rows=max_rows)


def parse_a3m(data: bytes, *, source: str, max_rows: int | None = None) -> Alignment:
    """Parse the bytes of an A3M file.

    Args:
        data: content of the file.
        source: its name for messages.
        max_rows: stop after this many rows; None reads all.

    Returns:
        The alignment in the columns of its first row.

    Raises:
        DataError: no row, a row of another length, a letter that is no residue, a first row with
            gaps only, or homologues with gaps only.
    """
    names: list[str] = []
    rows: list[bytes] = []
    lines: list[int] = []
    pieces: list[bytes] = []
    for number, raw_line in enumerate(data.split(b"\n"), start=1):
        line = raw_line.strip(b" \t\r\x00")
        if not line or line.startswith(b"#"):
            continue
        if line.startswith(b">"):
            if pieces:
                rows.append(b"".join(pieces))
                pieces = []
            if max_rows is not None and len(rows) == max_rows:
                break
            if len(names) > len(rows):
                raise _row_without_letters(names[-1], source, lines[-1])
            names.append(line[1:].decode("utf-8", errors="replace"))
            lines.append(number)
        elif not names:
            raise DataError(
                "letters before the first '>' header; an A3M file begins with a header line",
                source=source,
                line=number,
                kind="malformed",
            )
        else:
            if not pieces:
                lines[-1] = number
            pieces.append(line)
    if pieces:
        rows.append(b"".join(pieces))
    if not names:
        raise DataError("the alignment is empty: no '>' header", source=source, kind="empty")
    if len(names) > len(rows):
        raise _row_without_letters(names[-1], source, lines[-1])

    aligned = [row.translate(None, _NOT_ALIGNED) for row in rows]
    width = len(aligned[0])
    for row, name, line_number in zip(aligned, names, lines, strict=True):
        if len(row) != width:
            raise DataError(
                f"row {name.split()[0] if name else ''!r} has {len(row)} aligned columns where the "
                f"query has {width}; the file is truncated or no A3M",
                source=source,
                line=line_number,
                kind="row-length",
            )
    tokens = tokens_of_rows(aligned, names, lines, source=source)
    if bool(np.all(tokens[0] == GAP)):
        raise DataError(
            f"the query row {names[0]!r} has no residue, only gaps",
            source=source,
            line=lines[0],
            kind="all-gap",
        )
    deletions = np.zeros(tokens.shape, dtype=np.uint16)
    for index, row in enumerate(rows):
        if len(row) != width:
            deletions[index] = _insertions_before_columns(row)
    alignment = Alignment(tokens, deletions, tuple(names), source)
    require_rows_with_residues(alignment)
    return alignment


def _insertions_before_columns(row: bytes) -> NDArray[np.uint16]:
    letters = np.frombuffer(row.replace(b".", b""), dtype=np.uint8)
    lower = (letters >= ord("a")) & (letters <= ord("z"))
    before = np.cumsum(lower)[~lower]
    return np.diff(before, prepend=0).astype(np.uint16)


def _row_without_letters(name: str, source: str, line: int) -> DataError:
    return DataError(f"row {name!r} has a header but no letters", source=source, line=line)
