"""Letters of files to the numbers of the network: residue types and alignment tokens.

Twenty residues in the order ARNDCQEGHILKMFPSTWYV, then 20 = unknown, and in alignments 21 = gap
and 22 = mask token; the facts about each residue are in `structure.residue_constants`. The trap:
the order is *not* alphabetical, and the letters B, Z, J, O, U exist in alignments (D or N, E or Q,
I or L, pyrrolysine, selenocysteine) and must map somewhere: B to D, Z to E, U to C, J and O to
unknown.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from models.alphafold.structure.residue_constants import (
    ATOM_ORDER,
    ATOM_TYPES,
    ATOMS,
    RESTYPE_NAMES,
    RESTYPES,
    UNKNOWN,
)

GAP = UNKNOWN + 1
MASK_TOKEN = GAP + 1
NUM_RESTYPES_WITH_X = UNKNOWN + 1
NUM_MSA_TOKENS = MASK_TOKEN + 1

THREE_LETTER = dict(zip(RESTYPES, RESTYPE_NAMES, strict=True))
ONE_LETTER = {three: one for one, three in THREE_LETTER.items()}

NUM_ATOMS = len(ATOM_TYPES)
CA = ATOM_ORDER["CA"]
CB = ATOM_ORDER["CB"]
#: Heavy atoms of each residue, by one-letter code.
HEAVY_ATOMS: dict[str, tuple[str, ...]] = {
    one: tuple(row[0] for row in ATOMS[three]) for one, three in THREE_LETTER.items()
}

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
