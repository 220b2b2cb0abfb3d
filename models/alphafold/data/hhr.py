"""Reads HHsearch result files (.hhr): the template hits of one query.

A hit names a chain of the PDB and gives two aligned stretches of residues in blocks of 80 columns.
The trap is the pair of coordinate systems: the numbers in the file are 1-based positions in the
query and in the template database's sequence of the hit (SEQRES, unresolved residues included),
and the consensus and secondary-structure lines between them look just like sequence lines.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.alphafold.data.errors import DataError, parsing
from models.alphafold.data.text_source import read_bytes

_SUMMARY = re.compile(
    r"Probab=(?P<probability>\S+)\s+E-value=(?P<e_value>\S+)\s+Score=(?P<score>\S+)\s+"
    r"Aligned_cols=(?P<columns>\d+)\s+Identities=(?P<identities>\d+)%\s+Similarity=\S+\s+"
    r"Sum_probs=(?P<sum_probs>\S+)"
)
_ROW = re.compile(
    r"^(?P<side>[QT]) (?P<name>\S+)\s+(?P<start>\d+) (?P<letters>\S+)\s+(?P<stop>\d+) \(\d+\)"
)
_NOT_SEQUENCES = ("Consensus", "ss_dssp", "ss_pred", "ss_conf", "sa_dssp")


@dataclasses.dataclass(frozen=True, eq=False)
class TemplateHit:
    """One hit of a template search.

    Attributes:
        name: "pdbid_chain" in the database's spelling.
        description: the rest of the hit's header line.
        probability: HHsearch's probability in percent.
        e_value: expected number of such hits by chance.
        sum_probs: sum of posterior probabilities over the aligned columns; hits are ranked by it.
        aligned_columns: number of matched pairs.
        query_positions: 0-based query residues of the pairs. # shape=(pairs,), dtype=int64
        hit_positions: 0-based positions in the hit's full sequence. # shape=(pairs,), dtype=int64
        hit_sequence: letters of the hit's aligned stretch, without gaps.
        hit_start: 0-based position of its first letter in the hit's full sequence.
    """

    name: str
    description: str
    probability: float
    e_value: float
    sum_probs: float
    aligned_columns: int
    query_positions: NDArray[np.int64]
    hit_positions: NDArray[np.int64]
    hit_sequence: str
    hit_start: int

    @property
    def pdb_id(self) -> str:
        """Lower-case entry name."""
        return self.name.split("_", 1)[0].lower()

    @property
    def chain_id(self) -> str:
        """Author chain name."""
        return self.name.split("_", 1)[1] if "_" in self.name else ""


def read_hhr(path: str | Path) -> tuple[TemplateHit, ...]:
    """Read an HHR file, plain or gzip. See `parse_hhr`."""
    with parsing(str(path)):
        return parse_hhr(read_bytes(path), source=str(path))


def parse_hhr(data: bytes, *, source: str) -> tuple[TemplateHit, ...]:
    """Parse the bytes of an HHR file into its hits, in the file's order.

    Raises:
        DataError: no query header, a hit without its summary line, or aligned stretches whose
            letters disagree with the numbers beside them.
    """
    lines = data.decode("utf-8", errors="replace").splitlines()
    if not lines:
        raise DataError("the file is empty", source=source, kind="empty")
    if not any(line.startswith("Query") for line in lines[:10]):
        raise DataError(
            "has no 'Query' line near its top: no HHR file", source=source, line=1, kind="malformed"
        )
    starts = [
        index
        for index, line in enumerate(lines[:-1])
        if re.fullmatch(r"No \d+\s*", line) and lines[index + 1].startswith(">")
    ]
    return tuple(
        _parse_hit(lines, start, stop, source)
        for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True)
    )


def _parse_hit(lines: list[str], start: int, stop: int, source: str) -> TemplateHit:
    name, _, description = lines[start + 1][1:].partition(" ")
    if start + 2 >= stop or not (summary := _SUMMARY.match(lines[start + 2])):
        raise DataError(
            f"hit {name!r} has no 'Probab=... Sum_probs=...' line: the file is truncated",
            source=source,
            line=start + 3,
            kind="truncated",
        )
    stretches: dict[str, list[str]] = {"Q": [], "T": []}
    begins: dict[str, int] = {}
    for index in range(start + 3, stop):
        row = _ROW.match(lines[index])
        if not row or row["name"] in _NOT_SEQUENCES:
            continue
        side, letters = row["side"], row["letters"]
        first = int(row["start"]) - 1
        residues = sum(letter != "-" for letter in letters)
        expected = begins.get(side, first) + sum(
            letter != "-" for block in stretches[side] for letter in block
        )
        if residues and (first != expected or first + residues != int(row["stop"])):
            raise DataError(
                f"hit {name!r}: {residues} letters are numbered {first + 1}..{row['stop']} after "
                f"{expected} residues",
                source=source,
                line=index + 1,
                kind="malformed",
            )
        begins.setdefault(side, first)
        stretches[side].append(letters)
    query, template = "".join(stretches["Q"]), "".join(stretches["T"])
    if not query or len(query) != len(template):
        raise DataError(
            f"hit {name!r} aligns {len(query)} query columns with {len(template)} template "
            "columns: the file is truncated",
            source=source,
            line=start + 1,
            kind="truncated",
        )
    in_query = np.array([letter != "-" for letter in query])
    in_template = np.array([letter != "-" for letter in template])
    both = in_query & in_template
    return TemplateHit(
        name=name,
        description=description,
        probability=float(summary["probability"]),
        e_value=float(summary["e_value"]),
        sum_probs=float(summary["sum_probs"]),
        aligned_columns=int(summary["columns"]),
        query_positions=(begins["Q"] + np.cumsum(in_query) - 1)[both],
        hit_positions=(begins["T"] + np.cumsum(in_template) - 1)[both],
        hit_sequence=template.replace("-", ""),
        hit_start=begins["T"],
    )
