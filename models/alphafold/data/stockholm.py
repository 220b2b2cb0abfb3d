"""Reads Stockholm alignments (jackhmmer, hmmsearch) and plain aligned FASTA.

Both are full-width: every row has every column, and the columns where the query has a gap are the
insertions of the others. Stockholm may be interleaved, a row's letters then come in blocks under
the same name. The trap: a file without the closing "//" was cut off, perhaps exactly between two
lines, and is refused.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from models.alphafold.data.alignment import Alignment, from_columns
from models.alphafold.data.errors import DataError, parsing
from models.alphafold.data.text_source import read_bytes

_WORD_LENGTH = 4


def read_stockholm(path: str | Path, *, max_rows: int | None = None) -> Alignment:
    """Read a Stockholm file, plain or gzip. See `parse_stockholm`."""
    with parsing(str(path)):
        return parse_stockholm(read_bytes(path), source=str(path), max_rows=max_rows)


def parse_stockholm(data: bytes, *, source: str, max_rows: int | None = None) -> Alignment:
    """Parse the bytes of a Stockholm 1.0 file; the first row is the query.

    Args:
        data: content of the file.
        source: its name for messages.
        max_rows: keep this many rows; None keeps all.

    Raises:
        DataError: no header, no closing "//", no rows, rows of different width.
    """
    blocks: dict[bytes, list[bytes]] = {}
    first_line: dict[bytes, int] = {}
    seen_header = closed = False
    number = 0
    for number, raw_line in enumerate(data.split(b"\n"), start=1):
        line = raw_line.rstrip(b" \t\r")
        if not line:
            continue
        if not seen_header:
            if not line.startswith(b"# STOCKHOLM 1"):
                raise DataError(
                    "does not begin with '# STOCKHOLM 1.0': empty or no Stockholm file",
                    source=source,
                    line=number,
                    kind="malformed",
                )
            seen_header = True
            continue
        if line == b"//":
            closed = True
            break
        if line.startswith(b"#"):
            continue
        fields = line.split()
        if len(fields) != 2:
            raise DataError(
                f"expected 'name letters', found {len(fields)} fields",
                source=source,
                line=number,
                kind="malformed",
            )
        name, letters = fields
        if name not in blocks:
            if max_rows is not None and len(blocks) == max_rows:
                continue
            first_line[name] = number
            blocks[name] = []
        blocks[name].append(letters)
    if not seen_header:
        raise DataError("the file is empty", source=source, kind="empty")
    if not closed:
        raise DataError(
            "ends without the closing '//': the file is truncated; fetch or build it again",
            source=source,
            line=number,
            kind="truncated",
        )
    if not blocks:
        raise DataError("the alignment is empty: no row", source=source, kind="empty")
    return from_columns(
        [b"".join(pieces) for pieces in blocks.values()],
        [name.decode("utf-8", errors="replace") for name in blocks],
        list(first_line.values()),
        source=source,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class FastaRows:
    """Rows of an aligned FASTA file, before one of them is chosen as the query.

    Attributes:
        names: header lines without ">".
        rows: letters and gaps as in the file.
        lines: line number of each header.
        source: file name for messages.
    """

    names: tuple[str, ...]
    rows: tuple[bytes, ...]
    lines: tuple[int, ...]
    source: str

    def alignment(self, query_row: int = 0) -> Alignment:
        """The alignment in the columns of one row; its gaps become insertions of the others."""
        return from_columns(
            self.rows, self.names, self.lines, source=self.source, query_row=query_row
        )


def parse_aligned_fasta(data: bytes, *, source: str) -> FastaRows:
    """Parse FASTA whose rows already have one width; gaps are "-" or ".".

    Args:
        data: content of the file.
        source: its name for messages.

    Raises:
        DataError: no rows, or letters before the first header.
    """
    names: list[str] = []
    rows: list[list[bytes]] = []
    lines: list[int] = []
    for number, raw_line in enumerate(data.split(b"\n"), start=1):
        line = raw_line.strip()
        if not line:
            continue
        if line.startswith(b">"):
            names.append(line[1:].decode("utf-8", errors="replace"))
            rows.append([])
            lines.append(number)
        elif not rows:
            raise DataError(
                "letters before the first '>' header", source=source, line=number, kind="malformed"
            )
        else:
            rows[-1].append(line)
    if not rows:
        raise DataError("the alignment is empty: no '>' header", source=source, kind="empty")
    return FastaRows(tuple(names), tuple(b"".join(pieces) for pieces in rows), tuple(lines), source)


def most_similar_row(fasta: FastaRows, sequence: str) -> int:
    """Find the row of an aligned FASTA file that is (nearly) a given sequence.

    Published alignments are often full-width, with the protein of interest somewhere among the
    rows and trimmed at its ends. Rows are compared by the words of four residues they share with
    the sequence, which needs no alignment and tolerates mutations and missing ends.

    Returns:
        Index of the row with the largest share; the first on a tie.
    """
    wanted = _words(sequence)
    shares = []
    for row in fasta.rows:
        words = _words(row.translate(None, b"-.").upper().decode("ascii", errors="replace"))
        shares.append(len(words & wanted) / max(1, len(words | wanted)))
    return max(range(len(shares)), key=lambda index: (shares[index], -index))


def _words(sequence: str) -> set[str]:
    return {sequence[at : at + _WORD_LENGTH] for at in range(len(sequence) - _WORD_LENGTH + 1)}
