"""Where the proteins of an example come from: flags, shared folder, package registry, invention.

For the scripts in this folder. Real proteins are the rule: the folder `shared/data/proteins` beside
the checkout where it exists, else three proteins from the package registry. The trap: invented
proteins teach a network nothing about real ones, so they are used only when asked for by flag.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from models.alphafold.data import DataError, Protein, SkipCounter, load_proteins
from models.alphafold.data.alignment import Alignment, deduplicate, single_sequence
from models.alphafold.data.chains import Chain
from models.alphafold.data.datasets import InMemory, ProteinDataset, TableOfFiles, openfold_folder
from models.alphafold.data.residues import CA, CB, NUM_ATOMS, RESTYPES
from models.alphafold.data.shared_proteins import NAMES, default_root, shared_proteins

# Names that the parts of an OpenFold-style folder go by, first match wins.
_STRUCTURE_FOLDERS = ("mmcif_files", "pdb_mmcif/mmcif_files", "mmcifs", "structures", "pdb_data")
_ALIGNMENT_FOLDERS = ("alignments", "alignment_dir", "alignment_data/alignments")
_TEMPLATE_FOLDERS = ("template_mmcif_files", "template_mmcifs", "templates")

#: Shared proteins with alignments of moderate depth, which are read quickly.
SHARED_DEMO_PROTEINS = ("102m_A", "5zyh_A", "4qhf_A")

# Geometry of an ideal alpha helix: turn and rise per residue, radius of the C-alpha atoms.
_HELIX_TURN, _HELIX_RISE, _HELIX_RADIUS = np.deg2rad(100.0), 1.5, 2.3
_SYNTHETIC_RESIDUES, _SYNTHETIC_ROWS, _SYNTHETIC_PROTEINS = 80, 64, 3
_MUTATION_RATE = 0.3


@dataclasses.dataclass(frozen=True)
class Source:
    """A set of proteins and what to call it in a report."""

    dataset: ProteinDataset
    description: str


def choose(
    data: Path | None = None,
    *,
    synthetic: bool = False,
    names: tuple[str, ...] = (),
    templates: bool = True,
    counter: SkipCounter | None = None,
) -> Source:
    """Choose the proteins to train on.

    Args:
        data: the user's own OpenFold-style folder, see `own_folder`.
        synthetic: use invented proteins.
        names: only these ids; () for all.
        templates: also look for templates.
        counter: what to do with chains whose files are missing; None raises.

    Returns:
        The data set and its description.

    Raises:
        DataError: the folder is not as described, an id is unknown, or the registry's proteins
            are neither cached nor can be fetched.
    """
    if synthetic:
        return Source(InMemory(synthetic_proteins()), "synthetic helices (asked for by flag)")
    if data is not None:
        found = own_folder(data, counter=counter)
        return Source(_only(found if templates else without_templates(found), names), str(data))
    if default_root() is not None:
        chosen = shared_proteins(names=names or NAMES)
        if not templates:
            chosen = without_templates(chosen)
        return Source(chosen, f"{len(chosen)} shared proteins")
    proteins = load_proteins(names) if names else load_proteins()
    listed = ", ".join(protein.name for protein in proteins)
    return Source(InMemory(proteins), f"{listed} (package registry)")


def choose_for_demo(data: Path | None = None, *, synthetic: bool = False) -> Source:
    """Choose a few proteins for a demonstration without templates; see `choose`."""
    shared = data is None and not synthetic and default_root() is not None
    names = SHARED_DEMO_PROTEINS if shared else ()
    return choose(data, synthetic=synthetic, names=names, templates=False)


def own_folder(folder: Path, *, counter: SkipCounter | None = None) -> TableOfFiles:
    """Read an OpenFold-style folder: structures, alignments and, optionally, templates inside it.

    Args:
        folder: holds `mmcif_files/` (or `structures/`), `alignments/<file>_<chain>/` and
            perhaps `template_mmcif_files/`; structures may also lie in the folder itself.
        counter: what to do with chains whose files are missing; None raises.

    Raises:
        DataError: there is no such folder or no alignments in it.
    """
    alignments = _first_folder(folder, _ALIGNMENT_FOLDERS)
    if alignments is None:
        raise DataError(
            f"holds no {' or '.join(_ALIGNMENT_FOLDERS)} folder with one <file>_<chain> folder of "
            "alignments per chain",
            source=str(folder),
            kind="unreadable",
        )
    return openfold_folder(
        _first_folder(folder, _STRUCTURE_FOLDERS) or folder,
        alignments,
        _first_folder(folder, _TEMPLATE_FOLDERS),
        counter=counter,
    )


def without_templates(dataset: TableOfFiles) -> TableOfFiles:
    """The same proteins, whose template searches are not read."""
    entries = tuple(
        dataclasses.replace(entry, hits=None, template_chains=()) for entry in dataset.entries
    )
    return dataclasses.replace(dataset, entries=entries, template_mmcif_dir=None)


def synthetic_proteins() -> tuple[Protein, ...]:
    """Make helices with random sequences and random relatives; for machines without any data."""
    rng = np.random.default_rng(0)
    return tuple(_helix(f"helix{number}", rng) for number in range(_SYNTHETIC_PROTEINS))


def _first_folder(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def _only(dataset: ProteinDataset, names: tuple[str, ...]) -> ProteinDataset:
    if not names:
        return dataset
    known = {dataset.name(index): index for index in range(len(dataset))}
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise DataError(
            f"no protein {', '.join(unknown)}; there are {', '.join(sorted(known))}",
            source="--proteins",
            kind="no-chain",
        )
    return InMemory(tuple(dataset[known[name]] for name in names))


def _helix(name: str, rng: np.random.Generator) -> Protein:
    residues = np.arange(_SYNTHETIC_RESIDUES)
    letters = np.array(list(RESTYPES))
    sequence = rng.choice(letters, size=_SYNTHETIC_RESIDUES)
    positions = np.zeros((_SYNTHETIC_RESIDUES, NUM_ATOMS, 3), np.float32)
    mask = np.zeros((_SYNTHETIC_RESIDUES, NUM_ATOMS), np.float32)
    for atom, radius in ((CA, _HELIX_RADIUS), (CB, _HELIX_RADIUS + 1.0)):
        positions[:, atom] = np.stack(
            [
                radius * np.cos(_HELIX_TURN * residues),
                radius * np.sin(_HELIX_TURN * residues),
                _HELIX_RISE * residues,
            ],
            axis=-1,
        )
        mask[:, atom] = 1.0
    chain = Chain(
        name=name,
        chain_id="A",
        sequence="".join(sequence),
        all_atom_positions=positions,
        all_atom_mask=mask,
        b_factors=np.zeros_like(mask),
        author_numbers=("",) * _SYNTHETIC_RESIDUES,
        resolution=1.0,
        rank=0,
        has_full_sequence=True,
        release_date="",
        source=name,
    )
    rows: list[Alignment] = [single_sequence(chain.sequence, source=name)]
    for _ in range(_SYNTHETIC_ROWS):
        mutated = rng.random(_SYNTHETIC_RESIDUES) < _MUTATION_RATE
        relative = np.where(mutated, rng.choice(letters, size=_SYNTHETIC_RESIDUES), sequence)
        rows.append(single_sequence("".join(relative), source=name))
    return Protein(name, chain, deduplicate(rows))
