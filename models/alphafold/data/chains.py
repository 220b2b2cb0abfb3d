"""Reads protein chains out of mmCIF and PDB files through gemmi.

The result is a `Chain` in the coordinates of its *full* sequence (SEQRES / entity_poly_seq): a
residue that was crystallised but not seen has a letter and no atoms. A file without such a record
gives only the residues seen; `onto_full_sequence` puts those back into a known sequence. Choices
made here, once: first model, one conformer per residue (highest occupancy), one residue per
position where several types share it, selenomethionine becomes methionine and other modified
residues their parent, arginine's NH1 is the one nearer to CD, and DNA, RNA, ligands and water are
left out with a message. The traps: author chain names and mmCIF's own (label) names differ and
overlap; author names win, as in the field's "1abc_A". And gemmi reads on where it can; what it
reads past is looked for by `structure_damage`, or a damaged file would teach zeros.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import gemmi
import numpy as np
from numpy.typing import NDArray

from models.alphafold.data.errors import DataError, line_in_message, parsing
from models.alphafold.data.pairwise import match_sequences
from models.alphafold.data.residues import (
    CA,
    HEAVY_ATOMS,
    NUM_ATOMS,
    ONE_LETTER,
    encode_sequence,
)
from models.alphafold.data.structure_damage import (
    ParsedStructure,
    require_ending,
    require_finite_atoms,
    require_numbers,
    require_positions,
    require_seen_residues,
    residues_said_to_be_seen,
)
from models.alphafold.data.text_source import read_bytes
from models.alphafold.structure.residue_constants import ATOM_ORDER, RESTYPES

# Atoms of a modified residue that stand for an atom of its parent under another name.
_PARENT_ATOM = {("MSE", "SE"): "SD"}
_RELEASED = "_pdbx_audit_revision_history.revision_date"
# Also at the beginning of a longer name, such as "721P-ASSEMBLY1".
_ENTRY_ID = re.compile(r"(?:pdb_0000)?([0-9][a-z0-9]{3})(?![a-z0-9])", flags=re.IGNORECASE)


@dataclasses.dataclass(frozen=True, eq=False)
class Chain:
    """One protein chain in the coordinates of its full sequence.

    Attributes:
        name: "file_chain", for messages.
        chain_id: author chain name.
        sequence: one-letter codes, X where the residue has no parent among the twenty.
        all_atom_positions: Angstrom, zero where absent. # shape=(residues, 37, 3), float32
        all_atom_mask: 1 where the atom was seen. # shape=(residues, 37), float32
        b_factors: as in the file. # shape=(residues, 37), float32
        author_numbers: author residue number with insertion code ("52A"), "" where not seen.
        resolution: Angstrom, 0 where the file gives none (NMR, predictions).
        rank: 0 for the most complete chain of this sequence in the file, 1 for the next, ...
        has_full_sequence: whether the file gave the sequence of unseen residues too.
        release_date: "YYYY-MM-DD" of the first release (of the deposition, where the file has
            only that), "" where it has neither.
        source: path of the file.
        pdb_id: lower-case entry name of the Protein Data Bank that the file's content gives, ""
            where it gives none.
    """

    name: str
    chain_id: str
    sequence: str
    all_atom_positions: NDArray[np.float32]
    all_atom_mask: NDArray[np.float32]
    b_factors: NDArray[np.float32]
    author_numbers: tuple[str, ...]
    resolution: float
    rank: int
    has_full_sequence: bool
    release_date: str
    source: str
    pdb_id: str = ""

    @property
    def aatype(self) -> NDArray[np.int32]:
        """Residue types 0..20."""
        return encode_sequence(self.sequence)

    @property
    def num_resolved(self) -> int:
        """Residues with a C-alpha atom."""
        return int(self.all_atom_mask[:, CA].sum())


@dataclasses.dataclass(frozen=True, eq=False)
class ProteinFile:
    """What a structure file holds.

    Attributes:
        chains: protein chains, in the file's order.
        left_out: one sentence for each polymer that is no protein.
        source: path of the file.
    """

    chains: tuple[Chain, ...]
    left_out: tuple[str, ...]
    source: str


def read_protein_file(path: str | Path) -> ProteinFile:
    """Read every protein chain of an mmCIF or PDB file, plain or gzip.

    Raises:
        DataError: the file cannot be read or parsed, or has no protein chain with C-alpha atoms.
    """
    with parsing(str(path)):
        return parse_protein_file(read_bytes(path), source=str(path))


def read_chain(path: str | Path, chain_id: str | None) -> Chain:
    """Read one protein chain by its author name (or label name where no author name matches).

    Args:
        path: mmCIF or PDB file, plain or gzip.
        chain_id: its name; None for the only protein chain of the file.

    Raises:
        DataError: as of `read_protein_file`, or there is no such chain, or not one only.
    """
    with parsing(str(path)):
        if chain_id is not None:
            return parse_chain(read_bytes(path), chain_id, source=str(path))
        chains = read_protein_file(path).chains
        if len(chains) != 1:
            names = ", ".join(chain.chain_id for chain in chains)
            raise DataError(
                f"has the protein chains {names}, and nothing says which is meant; name the "
                "folder of its alignments <file>_<chain>",
                source=str(path),
                kind="no-chain",
            )
        return chains[0]


def parse_protein_file(data: bytes, *, source: str) -> ProteinFile:
    """As `read_protein_file`, from bytes."""
    parsed = _parse_structure(data, source)
    structure = parsed.structure
    chains: list[Chain] = []
    left_out: list[str] = []
    for model_chain, residues in _polymers(structure):
        kind = _polymer_kind(structure, residues)
        if kind is not None:
            left_out.append(f"chain {model_chain.name} of {source} left out: it is {kind}")
            continue
        chain = _read_polymer(parsed, model_chain.name, residues)
        if chain.num_resolved:
            chains.append(chain)
        else:
            left_out.append(f"chain {model_chain.name} of {source} left out: no CA atoms")
    if not chains:
        reasons = "; ".join(left_out) or "no polymer"
        kind = "no-ca" if "no CA" in reasons else "non-protein"
        raise DataError(
            f"holds no protein chain with CA atoms ({reasons})", source=source, kind=kind
        )
    return ProteinFile(_rank_copies(chains), tuple(left_out), source)


def parse_chain(data: bytes, chain_id: str, *, source: str) -> Chain:
    """As `read_chain`, from bytes.

    Raises:
        DataError: no such chain, a chain that is no protein, or one without C-alpha atoms.
    """
    parsed = _parse_structure(data, source)
    structure = parsed.structure
    polymers = list(_polymers(structure))
    by_author = [entry for entry in polymers if entry[0].name == chain_id]
    by_label = [entry for entry in polymers if entry[1][0].subchain == chain_id]
    found = by_author or by_label
    if not found:
        known = ", ".join(sorted({entry[0].name for entry in polymers})) or "none"
        raise DataError(
            f"has no polymer chain {chain_id!r}; polymer chains: {known}",
            source=source,
            kind="no-chain",
        )
    model_chain, residues = found[0]
    kind = _polymer_kind(structure, residues)
    if kind is not None:
        raise DataError(
            f"chain {chain_id!r} is {kind}, not a protein", source=source, kind="non-protein"
        )
    copies = [
        _read_polymer(parsed, other.name, others)
        for other, others in polymers
        if _polymer_kind(structure, others) is None
    ]
    position = [other for other, others in polymers if _polymer_kind(structure, others) is None]
    chain = _rank_copies(copies)[[id(other) for other in position].index(id(model_chain))]
    if not chain.num_resolved:
        raise DataError(
            f"chain {chain_id!r} has no CA atom; a backbone is needed to learn from it",
            source=source,
            kind="no-ca",
        )
    return chain


def onto_full_sequence(chain: Chain, sequence: str, *, min_identity: float = 0.6) -> Chain:
    """Place a chain's residues in a longer known sequence of the same protein.

    Where a seen residue differs from the sequence (a mutation) the structure's own type is kept,
    because its atoms are what the model is compared with.

    Args:
        chain: the chain as read.
        sequence: the full sequence, usually the query of its alignment.
        min_identity: identical fraction of matched residues below which they are taken for
            different proteins.

    Raises:
        DataError: the chain and the sequence do not belong together.
    """
    if chain.sequence == sequence:
        return chain
    match = match_sequences(chain.sequence, sequence)
    if match.identity < min_identity or not match.first.size:
        raise DataError(
            f"chain {chain.chain_id!r} ({len(chain.sequence)} residues) and the given sequence "
            f"({len(sequence)} residues) agree in {match.identity:.0%} of {match.first.size} "
            f"matched residues, fewer than {min_identity:.0%}: they are different proteins",
            source=chain.source,
            kind="wrong-query",
        )
    length = len(sequence)
    letters = list(sequence)
    numbers = [""] * length
    for here, there in zip(match.first, match.second, strict=True):
        if chain.all_atom_mask[here].any():
            letters[there] = chain.sequence[here]
        numbers[there] = chain.author_numbers[here]

    def moved(values: NDArray[np.float32]) -> NDArray[np.float32]:
        result = np.zeros((length, *values.shape[1:]), dtype=np.float32)
        result[match.second] = values[match.first]
        return result

    return dataclasses.replace(
        chain,
        sequence="".join(letters),
        all_atom_positions=moved(chain.all_atom_positions),
        all_atom_mask=moved(chain.all_atom_mask),
        b_factors=moved(chain.b_factors),
        author_numbers=tuple(numbers),
        has_full_sequence=True,
    )


def take_residues(chain: Chain, start: int, stop: int) -> Chain:
    """Cut residues start..stop-1 out of a chain."""
    return dataclasses.replace(
        chain,
        sequence=chain.sequence[start:stop],
        all_atom_positions=chain.all_atom_positions[start:stop],
        all_atom_mask=chain.all_atom_mask[start:stop],
        b_factors=chain.b_factors[start:stop],
        author_numbers=chain.author_numbers[start:stop],
    )


def _parse_structure(data: bytes, source: str) -> ParsedStructure:
    if not data.strip():
        raise DataError("the file is empty", source=source, kind="empty")
    text = data.decode("utf-8", errors="replace")
    is_mmcif = re.search(r"^data_", text, flags=re.MULTILINE) is not None
    seen: dict[str, set[int]] = {}
    try:
        if is_mmcif:
            block = gemmi.cif.read_string(text)[0]
            structure = gemmi.make_structure_from_block(block)
            released = sorted(block.find_values("_pdbx_audit_revision_history.revision_date"))
            if released:
                structure.info[_RELEASED] = released[0]
            seen = residues_said_to_be_seen(block)
        else:
            structure = gemmi.read_pdb_string(text)
    except (ValueError, RuntimeError, IndexError) as error:
        raise DataError(
            f"cannot be parsed as {'mmCIF' if is_mmcif else 'PDB'}: {error}; truncated or "
            "damaged, fetch it again",
            source=source,
            line=line_in_message(str(error)),
            kind="truncated",
        ) from error
    if len(structure) == 0 or not any(len(chain) for chain in structure[0]):
        raise DataError(
            "holds no atoms: truncated before its coordinates, or no structure file",
            source=source,
            line=text.count("\n") + 1,
            kind="no-atoms",
        )
    require_ending(text, source, is_mmcif=is_mmcif)
    if not is_mmcif:
        require_numbers(text, source)
    structure.setup_entities()
    structure.assign_label_seq_id()
    return ParsedStructure(structure, text, source, seen)


def _entry_id(structure: gemmi.Structure) -> str:
    key = "_entry.id"
    known = _ENTRY_ID.match(structure.info[key]) if key in structure.info else None
    return known[1].lower() if known else ""


def _release_date(structure: gemmi.Structure) -> str:
    for key in (_RELEASED, "_pdbx_database_status.recvd_initial_deposition_date"):
        if key in structure.info:
            return str(structure.info[key])
    return ""


def _polymers(structure: gemmi.Structure) -> Iterator[tuple[gemmi.Chain, list[gemmi.Residue]]]:
    for chain in structure[0]:
        polymer = list(chain.get_polymer())
        if polymer:
            yield chain, polymer


def _polymer_kind(structure: gemmi.Structure, residues: Sequence[gemmi.Residue]) -> str | None:
    """Name what a polymer is, or None for a protein."""
    entity = structure.get_entity_of(structure[0].get_subchain(residues[0].subchain))
    kind = entity.polymer_type if entity is not None else gemmi.PolymerType.Unknown
    if kind in (gemmi.PolymerType.PeptideL, gemmi.PolymerType.PeptideD):
        return None
    names = {
        gemmi.PolymerType.Dna: "DNA",
        gemmi.PolymerType.Rna: "RNA",
        gemmi.PolymerType.DnaRnaHybrid: "a DNA/RNA hybrid",
    }
    return names.get(kind, f"a polymer of type {kind.name}")


def _read_polymer(
    parsed: ParsedStructure, chain_id: str, residues: Sequence[gemmi.Residue]
) -> Chain:
    structure, source = parsed.structure, parsed.source
    require_seen_residues(parsed, chain_id, residues)
    entity = structure.get_entity_of(structure[0].get_subchain(residues[0].subchain))
    full = [] if entity is None else list(entity.full_sequence)
    observed = _one_residue_per_position(residues)
    if full and all(residue.label_seq is not None for residue in observed):
        names = [gemmi.Entity.first_mon(monomer) for monomer in full]
        positions = [int(residue.label_seq or 0) - 1 for residue in observed]
        require_positions(parsed, chain_id, positions, observed, len(full))
        for position, residue in zip(positions, observed, strict=True):
            names[position] = residue.name
    else:
        observed = [residue for residue in observed if _is_amino_acid(residue)]
        names = [residue.name for residue in observed]
        positions = list(range(len(observed)))
    length = len(names)
    atom_positions = np.zeros((length, NUM_ATOMS, 3), dtype=np.float32)
    mask = np.zeros((length, NUM_ATOMS), dtype=np.float32)
    b_factors = np.zeros((length, NUM_ATOMS), dtype=np.float32)
    numbers = [""] * length
    for position, residue in zip(positions, observed, strict=True):
        require_finite_atoms(parsed, residue)
        _place_atoms(residue, atom_positions[position], mask[position], b_factors[position])
        numbers[position] = str(residue.seqid)
    stem = Path(source).name.split(".")[0]
    return Chain(
        name=f"{stem}_{chain_id}",
        chain_id=chain_id,
        sequence="".join(_letter_of(name) for name in names),
        all_atom_positions=atom_positions,
        all_atom_mask=mask,
        b_factors=b_factors,
        author_numbers=tuple(numbers),
        resolution=structure.resolution if math.isfinite(structure.resolution) else 0.0,
        rank=0,
        has_full_sequence=bool(full),
        release_date=_release_date(structure),
        source=source,
        pdb_id=_entry_id(structure),
    )


def _one_residue_per_position(residues: Sequence[gemmi.Residue]) -> list[gemmi.Residue]:
    """Resolve positions at which several residue types were modelled: highest occupancy stays."""
    best: dict[tuple[int | None, str], gemmi.Residue] = {}
    for residue in residues:
        key = (residue.label_seq, str(residue.seqid))
        rival = best.get(key)
        if rival is None or _total_occupancy(residue) > _total_occupancy(rival):
            best[key] = residue
    return list(best.values())


def _total_occupancy(residue: gemmi.Residue) -> float:
    return max((atom.occ for atom in residue), default=0.0)


def _is_amino_acid(residue: gemmi.Residue) -> bool:
    info = gemmi.find_tabulated_residue(residue.name)
    if info is not None and info.is_amino_acid():
        return True
    return all(residue.find_atom(name, "*") is not None for name in ("N", "CA", "C"))


def _letter_of(name: str) -> str:
    if name in ONE_LETTER:
        return ONE_LETTER[name]
    letter = gemmi.find_tabulated_residue(name).one_letter_code.upper()
    return letter if letter in RESTYPES else "X"


def _place_atoms(
    residue: gemmi.Residue,
    positions: NDArray[np.float32],
    mask: NDArray[np.float32],
    b_factors: NDArray[np.float32],
) -> None:
    letter = _letter_of(residue.name)
    known = {*HEAVY_ATOMS.get(letter, ("N", "CA", "C", "O", "CB")), "OXT"}
    conformer = _chosen_conformer(residue)
    chosen: dict[str, gemmi.Atom] = {}
    for atom in residue:
        name = _PARENT_ATOM.get((residue.name, atom.name), atom.name)
        if name not in known or atom.occ <= 0.0:
            continue
        rival = chosen.get(name)
        # An atom of the chosen conformer wins; where that conformer lacks the atom, occupancy.
        if rival is None or _preference(atom, conformer) > _preference(rival, conformer):
            chosen[name] = atom
    if letter == "R":
        _name_arginine_nitrogens(chosen)
    for name, atom in chosen.items():
        index = ATOM_ORDER[name]
        positions[index] = atom.pos.tolist()
        mask[index] = 1.0
        b_factors[index] = atom.b_iso


def _preference(atom: gemmi.Atom, conformer: str) -> tuple[bool, float]:
    return (atom.altloc in (conformer, "\0"), atom.occ)


def _chosen_conformer(residue: gemmi.Residue) -> str:
    """The label of the conformer with the highest summed occupancy, the first label on a tie."""
    occupancy: dict[str, float] = {}
    for atom in residue:
        if atom.altloc != "\0":
            occupancy[atom.altloc] = occupancy.get(atom.altloc, 0.0) + atom.occ
    return min(occupancy, key=lambda label: (-occupancy[label], label), default="\0")


def _name_arginine_nitrogens(chosen: dict[str, gemmi.Atom]) -> None:
    """Exchange NH1 and NH2 where a depositor named them against the convention."""
    if not {"CD", "NH1", "NH2"} <= chosen.keys():
        return
    carbon = chosen["CD"].pos
    if carbon.dist(chosen["NH1"].pos) > carbon.dist(chosen["NH2"].pos):
        chosen["NH1"], chosen["NH2"] = chosen["NH2"], chosen["NH1"]


def _rank_copies(chains: Sequence[Chain]) -> tuple[Chain, ...]:
    ranked = list(chains)
    for index, chain in enumerate(chains):
        better = sum(
            other.sequence == chain.sequence
            and (-other.num_resolved, place) < (-chain.num_resolved, index)
            for place, other in enumerate(chains)
        )
        ranked[index] = dataclasses.replace(chain, rank=better)
    return tuple(ranked)
