"""Names and orders of residues and atoms that the data pipeline needs.

The orders are those of the field's parameter files: twenty residues ARNDCQEGHILKMFPSTWYV, then
20 = unknown, and in alignments 21 = gap and 22 = mask token. An atom has a place in the 37 atom
names shared by all residues ("atom37") and a place among the at most 14 heavy atoms of its own
residue ("atom14"). The trap: ids of aligned letters are *not* alphabetical, and the letters B, Z,
J, O, U exist in alignments (D or N, E or Q, I or L, pyrrolysine, selenocysteine) and must map
somewhere: B to D, Z to E, U to C, J and O to unknown.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

RESTYPES = "ARNDCQEGHILKMFPSTWYV"
UNKNOWN = 20
GAP = 21
MASK_TOKEN = 22
NUM_RESTYPES_WITH_X = 21
NUM_MSA_TOKENS = 23

THREE_LETTER = {
    "A": "ALA", "R": "ARG", "N": "ASN", "D": "ASP", "C": "CYS", "Q": "GLN", "E": "GLU",
    "G": "GLY", "H": "HIS", "I": "ILE", "L": "LEU", "K": "LYS", "M": "MET", "F": "PHE",
    "P": "PRO", "S": "SER", "T": "THR", "W": "TRP", "Y": "TYR", "V": "VAL",
}  # fmt: skip
ONE_LETTER = {three: one for one, three in THREE_LETTER.items()}

ATOM_TYPES = (
    "N", "CA", "C", "CB", "O", "CG", "CG1", "CG2", "OG", "OG1", "SG", "CD", "CD1", "CD2", "ND1",
    "ND2", "OD1", "OD2", "SD", "CE", "CE1", "CE2", "CE3", "NE", "NE1", "NE2", "OE1", "OE2", "CH2",
    "NH1", "NH2", "OH", "CZ", "CZ2", "CZ3", "NZ", "OXT",
)  # fmt: skip
ATOM_ORDER = {name: index for index, name in enumerate(ATOM_TYPES)}
NUM_ATOMS = len(ATOM_TYPES)
CA = ATOM_ORDER["CA"]
CB = ATOM_ORDER["CB"]

# Side-chain atoms after N, CA, C, O, in atom14 order.
_SIDE_CHAINS = {
    "A": "CB",
    "R": "CB CG CD NE CZ NH1 NH2",
    "N": "CB CG OD1 ND2",
    "D": "CB CG OD1 OD2",
    "C": "CB SG",
    "Q": "CB CG CD OE1 NE2",
    "E": "CB CG CD OE1 OE2",
    "G": "",
    "H": "CB CG ND1 CD2 CE1 NE2",
    "I": "CB CG1 CG2 CD1",
    "L": "CB CG CD1 CD2",
    "K": "CB CG CD CE NZ",
    "M": "CB CG SD CE",
    "F": "CB CG CD1 CD2 CE1 CE2 CZ",
    "P": "CB CG CD",
    "S": "CB OG",
    "T": "CB OG1 CG2",
    "W": "CB CG CD1 CD2 NE1 CE2 CE3 CZ2 CZ3 CH2",
    "Y": "CB CG CD1 CD2 CE1 CE2 CZ OH",
    "V": "CB CG1 CG2",
}
ATOM14_NAMES: dict[str, tuple[str, ...]] = {
    letter: ("N", "CA", "C", "O", *side.split()) for letter, side in _SIDE_CHAINS.items()
}

# The chain of atoms from N outward; chi number k turns about the bond between atoms k+1 and k+2.
_CHI_PATHS = {
    "R": "N CA CB CG CD NE CZ",
    "N": "N CA CB CG OD1",
    "D": "N CA CB CG OD1",
    "C": "N CA CB SG",
    "Q": "N CA CB CG CD OE1",
    "E": "N CA CB CG CD OE1",
    "H": "N CA CB CG ND1",
    "I": "N CA CB CG1 CD1",
    "L": "N CA CB CG CD1",
    "K": "N CA CB CG CD CE NZ",
    "M": "N CA CB CG SD CE",
    "F": "N CA CB CG CD1",
    "P": "N CA CB CG CD",
    "S": "N CA CB OG",
    "T": "N CA CB OG1",
    "W": "N CA CB CG CD1",
    "Y": "N CA CB CG CD1",
    "V": "N CA CB CG1",
}


def _chi_atoms(letter: str) -> tuple[tuple[str, str, str, str], ...]:
    path = _CHI_PATHS.get(letter, "").split()
    # Arginine's fifth torsion is planar and is no chi angle of this model.
    count = min(4, max(0, len(path) - 3))
    return tuple((path[k], path[k + 1], path[k + 2], path[k + 3]) for k in range(count))


CHI_ATOMS = {letter: _chi_atoms(letter) for letter in RESTYPES}

# Pairs of atoms whose names are exchanged by turning a symmetric group through 180 degrees, and
# the chi angle (0-based) that turns it.
SYMMETRIC_ATOMS: dict[str, tuple[tuple[str, str], ...]] = {
    "D": (("OD1", "OD2"),),
    "E": (("OE1", "OE2"),),
    "F": (("CD1", "CD2"), ("CE1", "CE2")),
    "Y": (("CD1", "CD2"), ("CE1", "CE2")),
}
SYMMETRIC_CHI = {"D": 1, "E": 2, "F": 1, "Y": 1}

_SPECIAL_LETTERS = {"B": "D", "Z": "E", "U": "C", "J": "X", "O": "X"}
INVALID_TOKEN = 255


def _msa_token_table() -> NDArray[np.uint8]:
    table = np.full(256, INVALID_TOKEN, dtype=np.uint8)
    for token, letter in enumerate(RESTYPES):
        table[ord(letter)] = token
    table[ord("X")] = UNKNOWN
    for letter, stands_for in _SPECIAL_LETTERS.items():
        table[ord(letter)] = table[ord(stands_for)]
    table[ord("-")] = GAP
    table[ord(".")] = GAP
    return table


#: Maps a byte of an aligned upper-case row to its token; 255 marks a byte that is no residue.
MSA_TOKEN_OF_BYTE = _msa_token_table()


def encode_sequence(sequence: str) -> NDArray[np.int32]:
    """Turn one-letter codes into residue types 0..20, anything unknown into 20."""
    tokens = MSA_TOKEN_OF_BYTE[np.frombuffer(sequence.upper().encode("ascii"), dtype=np.uint8)]
    return np.where(tokens > UNKNOWN, UNKNOWN, tokens).astype(np.int32)


def decode_sequence(aatype: NDArray[np.integer]) -> str:
    """Turn residue types or MSA tokens into letters: X unknown, - gap, # mask token."""
    return "".join((RESTYPES + "X-#")[token] for token in np.asarray(aatype).ravel())
