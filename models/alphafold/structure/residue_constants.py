"""Atoms, rigid groups, torsions and distances of the twenty residues, as arrays indexed by type.

Facts of chemistry in the orders that the field's features use: residues ARNDCQEGHILKMFPSTWYV and
20 = unknown; `atom37` is one order for all residues, `atom14` a dense order for each. Every residue
is cut into 8 rigid groups: backbone, pre-omega and phi (both hold no heavy atom), psi, chi1 to
chi4; a group's local x axis is the bond it turns about. The trap: an absent atom or torsion is a
zero in these tables, never a NaN, so always apply the masks.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from models.alphafold.structure.stereochemistry import IDEAL_DISTANCES

Array = NDArray[np.float32]
IntArray = NDArray[np.int32]

RESTYPES = "ARNDCQEGHILKMFPSTWYV"
RESTYPE_NAMES = (
    "ALA", "ARG", "ASN", "ASP", "CYS", "GLN", "GLU", "GLY", "HIS", "ILE",
    "LEU", "LYS", "MET", "PHE", "PRO", "SER", "THR", "TRP", "TYR", "VAL",
)  # fmt: skip
NUM_RESTYPES = len(RESTYPES)
UNKNOWN = NUM_RESTYPES
GLYCINE = RESTYPES.index("G")
PROLINE = RESTYPES.index("P")

ATOM_TYPES = (
    "N", "CA", "C", "CB", "O", "CG", "CG1", "CG2", "OG", "OG1", "SG", "CD", "CD1", "CD2", "ND1",
    "ND2", "OD1", "OD2", "SD", "CE", "CE1", "CE2", "CE3", "NE", "NE1", "NE2", "OE1", "OE2", "CH2",
    "NH1", "NH2", "OH", "CZ", "CZ2", "CZ3", "NZ", "OXT",
)  # fmt: skip
ATOM_ORDER = {name: index for index, name in enumerate(ATOM_TYPES)}
NUM_ATOM37 = len(ATOM_TYPES)
NUM_ATOM14 = 14
NUM_GROUPS = 8

# Letters of an HHblits alignment in alphabetical order, then unknown and gap, to residue types.
_HHBLITS_LETTERS = "ACDEFGHIKLMNPQRSTVWY"
MSA_HHBLITS_TO_RESTYPE: IntArray = np.array(
    [RESTYPES.index(letter) for letter in _HHBLITS_LETTERS] + [UNKNOWN, UNKNOWN + 1], np.int32
)

VAN_DER_WAALS_RADIUS = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}  # Angstrom

# The peptide bond between residues: mean and standard deviation, Angstrom; the bond to proline,
# which has no hydrogen on its nitrogen, differs.
PEPTIDE_BOND_LENGTH = (1.329, 0.014)
PEPTIDE_BOND_LENGTH_PROLINE = (1.341, 0.016)
# Angles across the peptide bond: cosine of the mean and standard deviation of the cosine.
PEPTIDE_COS_CA_C_N = (-0.4473, 0.0311)
PEPTIDE_COS_C_N_CA = (-0.5203, 0.0353)
CA_CA_DISTANCE = 3.80209737096  # of residues joined by a trans peptide bond, Angstrom

# Atom pairs that may be named either way around (a turn by pi about the last chi).
RENAMING_SWAPS = {
    "ASP": {"OD1": "OD2"},
    "GLU": {"OE1": "OE2"},
    "PHE": {"CD1": "CD2", "CE1": "CE2"},
    "TYR": {"CD1": "CD2", "CE1": "CE2"},
}
# The chi angle that such a turn changes, counted from 0.
PI_PERIODIC_CHI = {"ASP": 1, "GLU": 2, "PHE": 1, "TYR": 1}

# The four atoms of chi1 to chi4.
CHI_ATOMS = {
    "ALA": (),
    "ARG": ("N CA CB CG", "CA CB CG CD", "CB CG CD NE", "CG CD NE CZ"),
    "ASN": ("N CA CB CG", "CA CB CG OD1"),
    "ASP": ("N CA CB CG", "CA CB CG OD1"),
    "CYS": ("N CA CB SG",),
    "GLN": ("N CA CB CG", "CA CB CG CD", "CB CG CD OE1"),
    "GLU": ("N CA CB CG", "CA CB CG CD", "CB CG CD OE1"),
    "GLY": (),
    "HIS": ("N CA CB CG", "CA CB CG ND1"),
    "ILE": ("N CA CB CG1", "CA CB CG1 CD1"),
    "LEU": ("N CA CB CG", "CA CB CG CD1"),
    "LYS": ("N CA CB CG", "CA CB CG CD", "CB CG CD CE", "CG CD CE NZ"),
    "MET": ("N CA CB CG", "CA CB CG SD", "CB CG SD CE"),
    "PHE": ("N CA CB CG", "CA CB CG CD1"),
    "PRO": ("N CA CB CG", "CA CB CG CD"),
    "SER": ("N CA CB OG",),
    "THR": ("N CA CB OG1",),
    "TRP": ("N CA CB CG", "CA CB CG CD1"),
    "TYR": ("N CA CB CG", "CA CB CG CD1"),
    "VAL": ("N CA CB CG1",),
}

# Atom, rigid group, position in the group's frame (Angstrom), in atom14 order.
_RIGID_GROUP_ATOMS = {
    "ALA": """
        N   0   -0.525   1.363   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.526   0.000   0.000
        O   3    0.627   1.062   0.000
        CB  0   -0.529  -0.774  -1.205
    """,
    "ARG": """
        N   0   -0.524   1.362   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.525   0.000   0.000
        O   3    0.626   1.062   0.000
        CB  0   -0.524  -0.778  -1.209
        CG  4    0.616   1.390   0.000
        CD  5    0.564   1.414   0.000
        NE  6    0.539   1.357   0.000
        CZ  7    0.758   1.093   0.000
        NH1 7    0.206   2.301   0.000
        NH2 7    2.078   0.978   0.000
    """,
    "ASN": """
        N   0   -0.536   1.357   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.526   0.000   0.000
        O   3    0.625   1.062   0.000
        CB  0   -0.531  -0.787  -1.200
        CG  4    0.584   1.399   0.000
        OD1 5    0.633   1.059   0.000
        ND2 5    0.593  -1.188   0.001
    """,
    "ASP": """
        N   0   -0.525   1.362   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.527   0.000   0.000
        O   3    0.626   1.062   0.000
        CB  0   -0.526  -0.778  -1.208
        CG  4    0.593   1.398   0.000
        OD1 5    0.610   1.091   0.000
        OD2 5    0.592  -1.101  -0.003
    """,
    "CYS": """
        N   0   -0.522   1.362   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.524   0.000   0.000
        O   3    0.625   1.062   0.000
        CB  0   -0.519  -0.773  -1.212
        SG  4    0.728   1.653   0.000
    """,
    "GLN": """
        N   0   -0.526   1.361   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.526   0.000   0.000
        O   3    0.626   1.062   0.000
        CB  0   -0.525  -0.779  -1.207
        CG  4    0.615   1.393   0.000
        CD  5    0.587   1.399   0.000
        OE1 6    0.634   1.060   0.000
        NE2 6    0.593  -1.189  -0.001
    """,
    "GLU": """
        N   0   -0.528   1.361   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.526   0.000   0.000
        O   3    0.626   1.062   0.000
        CB  0   -0.526  -0.781  -1.207
        CG  4    0.615   1.392   0.000
        CD  5    0.600   1.397   0.000
        OE1 6    0.607   1.095   0.000
        OE2 6    0.589  -1.104  -0.001
    """,
    "GLY": """
        N   0   -0.572   1.337   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.517   0.000   0.000
        O   3    0.626   1.062   0.000
    """,
    "HIS": """
        N   0   -0.527   1.360   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.525   0.000   0.000
        O   3    0.625   1.063   0.000
        CB  0   -0.525  -0.778  -1.208
        CG  4    0.600   1.370   0.000
        ND1 5    0.744   1.160   0.000
        CD2 5    0.889  -1.021   0.003
        CE1 5    2.030   0.851   0.002
        NE2 5    2.145  -0.466   0.004
    """,
    "ILE": """
        N   0   -0.493   1.373   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.527   0.000   0.000
        O   3    0.627   1.062   0.000
        CB  0   -0.536  -0.793  -1.213
        CG1 4    0.534   1.437   0.000
        CG2 4    0.540  -0.785  -1.199
        CD1 5    0.619   1.391   0.000
    """,
    "LEU": """
        N   0   -0.520   1.363   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.525   0.000   0.000
        O   3    0.625   1.063   0.000
        CB  0   -0.522  -0.773  -1.214
        CG  4    0.678   1.371   0.000
        CD1 5    0.530   1.430   0.000
        CD2 5    0.535  -0.774   1.200
    """,
    "LYS": """
        N   0   -0.526   1.362   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.526   0.000   0.000
        O   3    0.626   1.062   0.000
        CB  0   -0.524  -0.778  -1.208
        CG  4    0.619   1.390   0.000
        CD  5    0.559   1.417   0.000
        CE  6    0.560   1.416   0.000
        NZ  7    0.554   1.387   0.000
    """,
    "MET": """
        N   0   -0.521   1.364   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.525   0.000   0.000
        O   3    0.625   1.062   0.000
        CB  0   -0.523  -0.776  -1.210
        CG  4    0.613   1.391   0.000
        SD  5    0.703   1.695   0.000
        CE  6    0.320   1.786   0.000
    """,
    "PHE": """
        N   0   -0.518   1.363   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.524   0.000   0.000
        O   3    0.626   1.062   0.000
        CB  0   -0.525  -0.776  -1.212
        CG  4    0.607   1.377   0.000
        CD1 5    0.709   1.195   0.000
        CD2 5    0.706  -1.196   0.000
        CE1 5    2.102   1.198   0.000
        CE2 5    2.098  -1.201   0.000
        CZ  5    2.794  -0.003  -0.001
    """,
    "PRO": """
        N   0   -0.566   1.351   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.527   0.000   0.000
        O   3    0.621   1.066   0.000
        CB  0   -0.546  -0.611  -1.293
        CG  4    0.382   1.445   0.000
        CD  5    0.477   1.424   0.000
    """,
    "SER": """
        N   0   -0.529   1.360   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.525   0.000   0.000
        O   3    0.626   1.062   0.000
        CB  0   -0.518  -0.777  -1.211
        OG  4    0.503   1.325   0.000
    """,
    "THR": """
        N   0   -0.517   1.364   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.526   0.000   0.000
        O   3    0.626   1.062   0.000
        CB  0   -0.516  -0.793  -1.215
        OG1 4    0.472   1.353   0.000
        CG2 4    0.550  -0.718  -1.228
    """,
    "TRP": """
        N   0   -0.521   1.363   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.525   0.000   0.000
        O   3    0.627   1.062   0.000
        CB  0   -0.523  -0.776  -1.212
        CG  4    0.609   1.370   0.000
        CD1 5    0.824   1.091   0.000
        CD2 5    0.854  -1.148  -0.005
        NE1 5    2.140   0.690  -0.004
        CE2 5    2.186  -0.678  -0.007
        CE3 5    0.622  -2.530  -0.007
        CZ2 5    3.283  -1.543  -0.011
        CZ3 5    1.715  -3.389  -0.011
        CH2 5    3.028  -2.890  -0.013
    """,
    "TYR": """
        N   0   -0.522   1.362   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.524   0.000   0.000
        O   3    0.627   1.062   0.000
        CB  0   -0.522  -0.776  -1.213
        CG  4    0.607   1.382   0.000
        CD1 5    0.716   1.195   0.000
        CD2 5    0.713  -1.194  -0.001
        CE1 5    2.107   1.200  -0.002
        CE2 5    2.104  -1.201  -0.003
        CZ  5    2.791  -0.001  -0.003
        OH  5    4.168  -0.002  -0.005
    """,
    "VAL": """
        N   0   -0.494   1.373   0.000
        CA  0    0.000   0.000   0.000
        C   0    1.527   0.000   0.000
        O   3    0.627   1.062   0.000
        CB  0   -0.533  -0.795  -1.213
        CG1 4    0.540   1.429   0.000
        CG2 4    0.533  -0.776   1.203
    """,
}


def _atom_table() -> dict[str, list[tuple[str, int, tuple[float, ...]]]]:
    """Parse the table above: atom name, group and position of each atom of each residue."""
    table = {}
    for name, text in _RIGID_GROUP_ATOMS.items():
        rows = [line.split() for line in text.strip().splitlines()]
        table[name] = [(row[0], int(row[1]), tuple(map(float, row[2:5]))) for row in rows]
    return table


ATOMS = _atom_table()
ATOM14_NAMES = {
    name: tuple(row[0] for row in rows) + ("",) * (NUM_ATOM14 - len(rows))
    for name, rows in ATOMS.items()
}
_ATOM14_ORDER = {
    name: {atom: index for index, atom in enumerate(atoms) if atom}
    for name, atoms in ATOM14_NAMES.items()
}


def _empty(*shape: int) -> Array:
    return np.zeros((NUM_RESTYPES + 1, *shape), np.float32)


def _per_atom14_tables() -> tuple[Array, IntArray, Array]:
    """Masks [21, 14], groups [21, 14] and positions in the group [21, 14, 3]."""
    mask, positions = _empty(NUM_ATOM14), _empty(NUM_ATOM14, 3)
    group = np.zeros((NUM_RESTYPES + 1, NUM_ATOM14), np.int32)
    for restype, name in enumerate(RESTYPE_NAMES):
        for index, (_, atom_group, position) in enumerate(ATOMS[name]):
            mask[restype, index] = 1.0
            group[restype, index] = atom_group
            positions[restype, index] = position
    return mask, group, positions


ATOM14_MASK, ATOM14_TO_GROUP, ATOM14_POSITIONS = _per_atom14_tables()


def _atom37_tables() -> tuple[Array, IntArray, IntArray]:
    """Masks [21, 37], atom14 index of each atom37 [21, 37] and the reverse [21, 14]."""
    mask = _empty(NUM_ATOM37)
    to_atom14 = np.zeros((NUM_RESTYPES + 1, NUM_ATOM37), np.int32)
    to_atom37 = np.zeros((NUM_RESTYPES + 1, NUM_ATOM14), np.int32)
    for restype, name in enumerate(RESTYPE_NAMES):
        for atom, index in _ATOM14_ORDER[name].items():
            mask[restype, ATOM_ORDER[atom]] = 1.0
            to_atom14[restype, ATOM_ORDER[atom]] = index
            to_atom37[restype, index] = ATOM_ORDER[atom]
    return mask, to_atom14, to_atom37


ATOM37_MASK, ATOM37_TO_ATOM14, ATOM14_TO_ATOM37 = _atom37_tables()


def _chi_tables() -> tuple[IntArray, Array, Array]:
    """Atom37 indices of chi atoms [21, 4, 4]; chi masks and pi-periodic chis [21, 4]."""
    indices = np.zeros((NUM_RESTYPES + 1, 4, 4), np.int32)
    mask, periodic = _empty(4), _empty(4)
    for restype, name in enumerate(RESTYPE_NAMES):
        for chi, atoms in enumerate(CHI_ATOMS[name]):
            indices[restype, chi] = [ATOM_ORDER[atom] for atom in atoms.split()]
            mask[restype, chi] = 1.0
        if name in PI_PERIODIC_CHI:
            periodic[restype, PI_PERIODIC_CHI[name]] = 1.0
    return indices, mask, periodic


CHI_ATOM37_INDICES, CHI_MASK, CHI_PI_PERIODIC = _chi_tables()


def _frame(x_axis: NDArray[np.float64], in_plane: NDArray[np.float64], origin: Array) -> Array:
    """Return the 4x4 frame with the given x axis, its xy plane through `in_plane`, and origin."""
    x = x_axis / np.linalg.norm(x_axis)
    y = in_plane - x * (in_plane @ x)
    y = y / np.linalg.norm(y)
    frame = np.eye(4, dtype=np.float32)
    frame[:3, :3] = np.stack([x, y, np.cross(x, y)], axis=1)
    frame[:3, 3] = origin
    return frame


def _default_frames() -> Array:
    """Frame of each group in its parent at torsion zero, [21, 8, 4, 4]; zero where absent."""
    frames = _empty(NUM_GROUPS, 4, 4)
    for restype, name in enumerate(RESTYPE_NAMES):
        frames[restype, :2] = np.eye(4)
        at = {atom: np.array(position) for atom, _, position in ATOMS[name]}
        frames[restype, 2] = _frame(at["N"] - at["CA"], np.array([1.0, 0.0, 0.0]), at["N"])
        frames[restype, 3] = _frame(at["C"] - at["CA"], at["CA"] - at["N"], at["C"])
        for chi, names in enumerate(CHI_ATOMS[name]):
            before, start, end, _ = (at[atom] for atom in names.split())
            if chi == 0:
                frames[restype, 4] = _frame(end - start, before - start, end)
            else:
                # The parent's x axis runs along the previous bond, which ends at the origin.
                frames[restype, 4 + chi] = _frame(end, np.array([-1.0, 0.0, 0.0]), end)
    return frames


GROUP_DEFAULT_FRAME = _default_frames()


def _renaming_tables() -> tuple[Array, Array]:
    """Permutation matrices [21, 14, 14] to the other naming, and which atoms change [21, 14]."""
    matrices = np.tile(np.eye(NUM_ATOM14, dtype=np.float32), (NUM_RESTYPES + 1, 1, 1))
    ambiguous = _empty(NUM_ATOM14)
    for name, swaps in RENAMING_SWAPS.items():
        restype = RESTYPE_NAMES.index(name)
        for first, second in swaps.items():
            pair = [_ATOM14_ORDER[name][first], _ATOM14_ORDER[name][second]]
            matrices[restype, pair] = matrices[restype, pair[::-1]]
            ambiguous[restype, pair] = 1.0
    return matrices, ambiguous


RENAMING_MATRICES, ATOM14_IS_AMBIGUOUS = _renaming_tables()


def _frame_is_ambiguous() -> Array:
    """Which groups have two equally good frames, [21, 8]."""
    ambiguous = _empty(NUM_GROUPS)
    ambiguous[:, 4:] = CHI_PI_PERIODIC
    return ambiguous


GROUP_IS_AMBIGUOUS = _frame_is_ambiguous()


def _group_atoms() -> tuple[IntArray, Array]:
    """Atom37 indices of the three atoms that define each group [21, 8, 3], and masks [21, 8]."""
    indices = np.zeros((NUM_RESTYPES + 1, NUM_GROUPS, 3), np.int32)
    mask = _empty(NUM_GROUPS)
    mask[:, [0, 3]] = 1.0
    indices[:, 0] = [ATOM_ORDER[atom] for atom in ("C", "CA", "N")]
    indices[:, 3] = [ATOM_ORDER[atom] for atom in ("CA", "C", "O")]
    indices[:, 4:] = CHI_ATOM37_INDICES[:, :, 1:]
    mask[:, 4:] = CHI_MASK
    return indices, mask


GROUP_ATOM37_INDICES, GROUP_MASK = _group_atoms()


@functools.lru_cache(maxsize=8)
def atom14_distance_bounds(
    overlap_tolerance: float = 1.5, bond_length_tolerance_factor: float = 12.0
) -> tuple[Array, Array, Array]:
    """Return the allowed distances between the atoms of one residue.

    Args:
        overlap_tolerance: how far van der Waals spheres may overlap, Angstrom.
        bond_length_tolerance_factor: standard deviations allowed to ideal distances.

    Returns:
        Lower bounds, upper bounds (1e10 where there is none) and standard deviations (0 where there
        is no ideal distance), each [21, 14, 14] in Angstrom.
    """
    lower, upper, deviation = (_empty(NUM_ATOM14, NUM_ATOM14) for _ in range(3))
    for restype, name in enumerate(RESTYPE_NAMES):
        atoms = [row[0] for row in ATOMS[name]]
        radii = np.array([VAN_DER_WAALS_RADIUS[atom[0]] for atom in atoms])
        count = len(atoms)
        apart = ~np.eye(count, dtype=bool)
        touching = radii[:, None] + radii[None, :] - overlap_tolerance
        lower[restype, :count, :count] = np.where(apart, touching, 0.0)
        upper[restype, :count, :count] = np.where(apart, 1e10, 0.0)
        order = _ATOM14_ORDER[name]
        for entry in IDEAL_DISTANCES[name].split(","):
            first, second, mean, stddev = entry.split()
            slack = bond_length_tolerance_factor * float(stddev)
            for i, j in ((order[first], order[second]), (order[second], order[first])):
                lower[restype, i, j] = float(mean) - slack
                upper[restype, i, j] = float(mean) + slack
                deviation[restype, i, j] = float(stddev)
    return lower, upper, deviation
