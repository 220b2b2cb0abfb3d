"""Writes a predicted structure as PDB or mmCIF, with pLDDT where B-factors stand.

Viewers colour predictions by the B-factor column, which by custom holds the per-residue pLDDT in
0..100. The trap: the PDB format has no room for more than 9,999 residues or coordinates beyond
four digits; such a prediction must be written as mmCIF, and is refused as PDB.
"""

from __future__ import annotations

from pathlib import Path

import gemmi
import numpy as np
from numpy.typing import ArrayLike

from models.alphafold.structure.residue_constants import ATOM_TYPES, RESTYPE_NAMES

_PDB_MAX_RESIDUE = 9999
_PDB_MIN_COORDINATE, _PDB_MAX_COORDINATE = -999.999, 9999.999


def prediction_structure(
    aatype: ArrayLike,
    atom_positions: ArrayLike,
    atom_mask: ArrayLike,
    plddt: ArrayLike,
    *,
    residue_index: ArrayLike | None = None,
    name: str = "prediction",
    chain_id: str = "A",
) -> gemmi.Structure:
    """Build a one-chain structure from a prediction.

    Args:
        aatype: residue types 0..20. # shape=(residues,)
        atom_positions: Angstrom. # shape=(residues, 37, 3)
        atom_mask: 1 where the residue type has the atom. # shape=(residues, 37)
        plddt: predicted lDDT in 0..100. # shape=(residues,)
        residue_index: 0-based residue numbers, written plus one; None counts from 0.
        name: of the entry.
        chain_id: author name of the chain.

    Raises:
        ValueError: shapes disagree, no atom is present, or a present atom or pLDDT is not finite.
    """
    types = np.asarray(aatype)
    positions = np.asarray(atom_positions, dtype=np.float64)
    present = np.asarray(atom_mask) > 0
    confidence = np.asarray(plddt, dtype=np.float64)
    numbers = np.arange(len(types)) if residue_index is None else np.asarray(residue_index)
    length = len(types)
    shapes = {
        "atom_positions": (positions.shape, (length, len(ATOM_TYPES), 3)),
        "atom_mask": (present.shape, (length, len(ATOM_TYPES))),
        "plddt": (confidence.shape, (length,)),
        "residue_index": (numbers.shape, (length,)),
    }
    for what, (found, wanted) in shapes.items():
        if found != wanted:
            raise ValueError(f"{what} has shape {found}, not {wanted} for {length} residues")
    if not present.any():
        raise ValueError("atom_mask has no atom: there is nothing to write")
    if not np.isfinite(positions[present]).all() or not np.isfinite(confidence).all():
        raise ValueError(
            "the prediction holds values that are not finite; the training run has diverged or "
            "its parameters were not loaded"
        )
    chain = gemmi.Chain(chain_id)
    sequence = []
    for place in range(length):
        residue = gemmi.Residue()
        residue.name = (*RESTYPE_NAMES, "UNK")[types[place]]
        residue.seqid = gemmi.SeqId(int(numbers[place]) + 1, " ")
        residue.entity_type = gemmi.EntityType.Polymer
        sequence.append(residue.name)
        for slot in np.flatnonzero(present[place]):
            residue.add_atom(_atom(ATOM_TYPES[slot], positions[place, slot], confidence[place]))
        if len(residue):
            chain.add_residue(residue)
    structure = gemmi.Structure()
    structure.name = name
    model = gemmi.Model(1)
    model.add_chain(chain)
    structure.add_model(model)
    structure.setup_entities()
    for entity in structure.entities:
        if entity.entity_type == gemmi.EntityType.Polymer:
            entity.full_sequence = sequence
    structure.assign_label_seq_id()
    return structure


def write_prediction(path: str | Path, structure: gemmi.Structure) -> Path:
    """Write a structure in the format its suffix names, `.pdb` or `.cif`.

    Raises:
        ValueError: another suffix, or a structure that the PDB format cannot hold.
    """
    target = Path(path)
    if target.suffix == ".cif":
        target.write_text(structure.make_mmcif_document().as_string())
    elif target.suffix == ".pdb":
        _require_fits_pdb(structure)
        target.write_text(structure.make_pdb_string())
    else:
        raise ValueError(f"{target} has suffix {target.suffix!r}; write to a .pdb or a .cif file")
    return target


def _atom(name: str, position: np.ndarray, confidence: float) -> gemmi.Atom:
    atom = gemmi.Atom()
    atom.name = name
    atom.element = gemmi.Element(name[0])
    atom.pos = gemmi.Position(*(float(value) for value in position))
    atom.occ = 1.0
    atom.b_iso = float(confidence)
    return atom


def _require_fits_pdb(structure: gemmi.Structure) -> None:
    numbers = [int(residue.seqid.num or 0) for chain in structure[0] for residue in chain]
    coordinates = [value for site in structure[0].all() for value in site.atom.pos.tolist()]
    if max(numbers) > _PDB_MAX_RESIDUE or not (
        min(coordinates) >= _PDB_MIN_COORDINATE and max(coordinates) <= _PDB_MAX_COORDINATE
    ):
        raise ValueError(
            f"residue {max(numbers)} and coordinates {min(coordinates):.0f}.."
            f"{max(coordinates):.0f} do not fit the PDB format; write a .cif file"
        )
