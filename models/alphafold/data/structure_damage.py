"""Damage to structure files that gemmi reads past.

gemmi takes what it can: a coordinate that is no number becomes zero or NaN, a file that ends
between two atoms is a smaller protein, and a residue's number in the sequence is not compared with
the sequence. Each of these is looked for here and is a `DataError` with its line. The trap: a file
that the wwPDB did not write may end as it likes, so that a cut between two lines cannot be told.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import gemmi

from models.alphafold.data.errors import DataError

# Categories that files of the wwPDB archive have; there, "#" ends each category.
_OF_THE_ARCHIVE = ("_audit_conform.", "_pdbx_audit_revision_history.")
_PDB_ATOM = ("ATOM  ", "HETATM")
_PDB_NUMBERS = (slice(30, 38), slice(38, 46), slice(46, 54))
_UNKNOWN = ("?", ".")


@dataclasses.dataclass(frozen=True, eq=False)
class ParsedStructure:
    """A file as gemmi read it, with what is needed to find its faults.

    Attributes:
        structure: with entities and label numbers.
        text: of the file.
        source: path of the file.
        seen: label numbers of the residues that the file says were seen, by label chain name.
    """

    structure: gemmi.Structure
    text: str
    source: str
    seen: dict[str, set[int]]

    def line_of_atom(self, serial: int) -> int | None:
        """Line of an atom's record, where it can be told."""
        found = re.search(rf"^(?:ATOM|HETATM) *{serial}\s", self.text, flags=re.MULTILINE)
        return self.text.count("\n", 0, found.start()) + 1 if found else None


def residues_said_to_be_seen(block: gemmi.cif.Block) -> dict[str, set[int]]:
    """Label numbers by label chain name, from the scheme that tells seen from unseen residues."""
    table = block.find("_pdbx_poly_seq_scheme.", ["asym_id", "seq_id", "auth_mon_id"])
    seen: dict[str, set[int]] = {}
    for chain, number, monomer in table:
        if monomer not in _UNKNOWN:
            seen.setdefault(chain, set()).add(int(number))
    return seen


def require_ending(text: str, source: str, *, is_mmcif: bool) -> None:
    """Refuse a file of the archive that lacks the end which all of them have."""
    last = text.rstrip().rpartition("\n")[2].strip()
    if is_mmcif:
        of_the_archive = any(f"\n{category}" in text for category in _OF_THE_ARCHIVE)
        ended, wanted = last == "#", "'#'"
    else:
        of_the_archive = text.startswith("HEADER ") and "\nREMARK   2 " in text
        ended, wanted = last == "END", "'END'"
    if of_the_archive and not ended:
        raise DataError(
            f"ends without the closing {wanted} of its kind: truncated, fetch it again",
            source=source,
            line=text.rstrip().count("\n") + 1,
            kind="truncated",
        )


def require_numbers(text: str, source: str) -> None:
    """Refuse coordinates of a PDB file that are no numbers, which gemmi reads as zero."""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.startswith(_PDB_ATOM):
            continue
        try:
            fine = all(math.isfinite(float(line[columns])) for columns in _PDB_NUMBERS)
        except ValueError:
            fine = False
        if not fine:
            raise DataError(
                f"has coordinates that are no numbers: {line[30:54].strip()!r}",
                source=source,
                line=number,
            )


def require_seen_residues(
    parsed: ParsedStructure, chain_id: str, residues: Sequence[gemmi.Residue]
) -> None:
    """Refuse a chain without atoms of residues that the file says were seen."""
    present = {residue.label_seq for residue in residues}
    absent = sorted(parsed.seen.get(residues[0].subchain, set()) - present)
    if absent:
        raise DataError(
            f"chain {chain_id!r} has no atoms of {len(absent)} residues that the file says were "
            f"seen (first: number {absent[0]} of the sequence): truncated or damaged, fetch it "
            "again",
            source=parsed.source,
            line=parsed.text.rstrip().count("\n") + 1,
            kind="truncated",
        )


def require_positions(
    parsed: ParsedStructure,
    chain_id: str,
    positions: Sequence[int],
    residues: Sequence[gemmi.Residue],
    length: int,
) -> None:
    """Refuse residues outside the sequence, and two at one place of it."""
    taken: set[int] = set()
    for position, residue in zip(positions, residues, strict=True):
        if not 0 <= position < length or position in taken:
            fault = "is taken twice" if position in taken else f"is not in 1..{length}"
            raise DataError(
                f"chain {chain_id!r}, residue {residue.name} {residue.seqid}: its number "
                f"{position + 1} in the sequence {fault}",
                source=parsed.source,
                line=parsed.line_of_atom(residue[0].serial) if len(residue) else None,
            )
        taken.add(position)


def require_finite_atoms(parsed: ParsedStructure, residue: gemmi.Residue) -> None:
    """Refuse atoms with a coordinate, occupancy or B-factor that is NaN or infinite."""
    for atom in residue:
        if not math.isfinite(sum(atom.pos.tolist()) + atom.occ + atom.b_iso):
            raise DataError(
                f"atom {atom.name} of residue {residue.name} {residue.seqid} has a coordinate, "
                "occupancy or B-factor that is no number",
                source=parsed.source,
                line=parsed.line_of_atom(atom.serial),
            )
