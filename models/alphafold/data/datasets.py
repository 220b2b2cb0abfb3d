"""Sets of proteins on disk, read one at a time: `dataset[index]` gives a `Protein`.

Two layouts. `OpenFoldFolder` is the one users of the field have: structures in `data_dir`, one
folder of alignments per chain in `alignment_dir`, and a folder of template mmCIFs. `TableOfFiles`
takes any arrangement by naming the files of each protein. Both find files when they are made and
parse when asked; a protein that cannot be used raises `DataError`, which the loader passes on or
counts. The trap is the alignment's query: it is often not letter for letter the structure's
sequence, and is moved onto it here, so later stages may rely on one coordinate system.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from models.alphafold.data.a3m import read_a3m
from models.alphafold.data.alignment import (
    Alignment,
    deduplicate,
    onto_sequence,
    single_sequence,
)
from models.alphafold.data.chains import Chain, onto_full_sequence, read_chain
from models.alphafold.data.errors import BadFilePolicy, DataError, FaultList, SkipCounter
from models.alphafold.data.examples import Protein
from models.alphafold.data.hhr import TemplateHit, read_hhr
from models.alphafold.data.stockholm import read_stockholm
from models.alphafold.data.templates import (
    Template,
    latest_template_date,
    load_templates,
    template_from_chain,
)
from models.alphafold.data.text_source import find_plain_or_gzip, read_bytes

# Searches come in this order in the merged alignment, on which the deletion of blocks depends;
# other files follow by name.
_SEARCH_ORDER = ("uniref90", "bfd", "mgnify")
# Stockholm files beside the alignments that are no part of a monomer's alignment: pairing data of
# complexes and the template search of hmmsearch.
_NOT_ALIGNMENTS = ("uniprot_hits", "hmm_output")
_MAX_TEMPLATE_HITS = 20
# A predicted structure teaches only where it is confident (pLDDT in its B-factors).
_MIN_DISTILLATION_PLDDT = 50.0


class ProteinDataset(Protocol):
    """What the loader needs: a length and proteins by index, the same at every call."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Protein: ...

    def name(self, index: int) -> str:
        """Id of a protein, without reading it."""


@dataclasses.dataclass(frozen=True)
class InMemory:
    """Proteins that are already loaded, such as the registry's.

    Attributes:
        proteins: in the order of their indices.
    """

    proteins: tuple[Protein, ...]

    def __len__(self) -> int:
        return len(self.proteins)

    def __getitem__(self, index: int) -> Protein:
        return self.proteins[index]

    def name(self, index: int) -> str:
        """Id of a protein."""
        return self.proteins[index].name


@dataclasses.dataclass(frozen=True)
class Concatenated:
    """Several data sets as one, such as experimental structures and self-distillation.

    Attributes:
        parts: in the order of their indices.
    """

    parts: tuple[ProteinDataset, ...]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def __getitem__(self, index: int) -> Protein:
        part, inside = self._locate(index)
        return part[inside]

    def name(self, index: int) -> str:
        """Id of a protein."""
        part, inside = self._locate(index)
        return part.name(inside)

    def weights(self, fractions: Sequence[float]) -> list[float]:
        """Weights for the loader that draw from each part with the given frequency.

        Args:
            fractions: one per part; their sum does not matter.
        """
        return [
            fraction / len(part)
            for fraction, part in zip(fractions, self.parts, strict=True)
            for _ in range(len(part))
        ]

    def _locate(self, index: int) -> tuple[ProteinDataset, int]:
        for part in self.parts:
            if index < len(part):
                return part, index
            index -= len(part)
        raise IndexError(f"index is {index} past the end of {len(self)} proteins")


@dataclasses.dataclass(frozen=True)
class Selected:
    """Some proteins of a data set, in its order.

    Attributes:
        whole: the data set.
        indices: which of its proteins.
    """

    whole: ProteinDataset
    indices: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Protein:
        return self.whole[self.indices[index]]

    def name(self, index: int) -> str:
        """Id of a protein."""
        return self.whole.name(self.indices[index])


def only_listed(dataset: ProteinDataset, path: str | Path) -> Selected:
    """Keep the proteins that a filter file names, one a line.

    Raises:
        DataError: the file cannot be read, or names none of the data set's proteins.
    """
    listed = set(read_bytes(path).decode("utf-8", errors="replace").split())
    indices = tuple(index for index in range(len(dataset)) if dataset.name(index) in listed)
    if not indices:
        raise DataError(
            f"names {len(listed)} chains, and none of the {len(dataset)} that there are (such as "
            f"{dataset.name(0)})",
            source=str(path),
            kind="empty",
        )
    return Selected(dataset, indices)


@dataclasses.dataclass(frozen=True)
class FileEntry:
    """The files of one protein.

    Attributes:
        name: id, "file_chain".
        structure: mmCIF or PDB file.
        chain: author name of the chain; None for the only protein chain of the file.
        alignments: A3M or Stockholm files of one query, in the order of merging; () for none.
        hits: HHR file of a template search, or None.
        template_chains: further templates, as (structure file, chain), of nearly the same protein.
        is_distillation: the structure is a prediction with pLDDT in its B-factors.
        resolution: Angstrom, where it is known and the structure file does not give it; losses
            that need a good structure pass over chains of unknown resolution.
    """

    name: str
    structure: Path
    chain: str | None
    alignments: tuple[Path, ...]
    hits: Path | None = None
    template_chains: tuple[tuple[Path, str], ...] = ()
    is_distillation: bool = False
    resolution: float | None = None


@dataclasses.dataclass(frozen=True)
class TableOfFiles:
    """Proteins given by the files of each.

    Attributes:
        entries: in the order of their indices.
        template_mmcif_dir: folder of template mmCIFs named by the hits; None uses no hits.
        template_policy: "skip" leaves out templates that cannot be used, and the protein says why
            (`Protein.template_faults`); "raise" makes them an error.
        max_template_date: leave out templates released after this "YYYY-MM-DD"; None keeps all.
            Those of an experimental target must also be older than itself.
        release_dates: of template entries by lower-case name, so that files of later ones need
            not be opened; None opens all.
        obsolete: template entries that others have replaced, by lower-case name.
        only_trainable: refuse chains that the paper's filters leave out, see `require_trainable`.
    """

    entries: tuple[FileEntry, ...]
    template_mmcif_dir: Path | None = None
    template_policy: BadFilePolicy = "skip"
    max_template_date: str | None = None
    release_dates: Mapping[str, str] | None = dataclasses.field(default=None, repr=False)
    obsolete: Mapping[str, str] | None = dataclasses.field(default=None, repr=False)
    only_trainable: bool = False

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> Protein:
        protein = load_entry(
            self.entries[index],
            template_mmcif_dir=self.template_mmcif_dir,
            template_policy=self.template_policy,
            max_template_date=self.max_template_date,
            release_dates=self.release_dates,
            obsolete=self.obsolete,
        )
        return require_trainable(protein) if self.only_trainable else protein

    def name(self, index: int) -> str:
        """Id of a protein."""
        return self.entries[index].name


def openfold_folder(
    data_dir: str | Path,
    alignment_dir: str | Path,
    template_mmcif_dir: str | Path | None = None,
    *,
    counter: SkipCounter | None = None,
    template_policy: BadFilePolicy = "skip",
    max_template_date: str | None = None,
    release_dates: Mapping[str, str] | None = None,
    obsolete: Mapping[str, str] | None = None,
    is_distillation: bool = False,
) -> TableOfFiles:
    """Find the proteins of an OpenFold-style folder.

    Each folder `alignment_dir/<file>_<chain>/` is one protein; its `.a3m` and `.sto` files, at
    any depth, are its alignments and its `.hhr` file its template hits; its structure is
    `data_dir/<file>.cif` or `.pdb`, plain or gzip. A folder `<file>/` means the only protein chain
    of that file, as sets of predicted structures have it.

    Args:
        data_dir: folder of structures.
        alignment_dir: folder of alignment folders.
        template_mmcif_dir: folder of template mmCIFs, or None to use no templates.
        counter: what to do with chains whose structure or alignment is missing; None raises.
        template_policy: the same for templates, see `TableOfFiles`.
        max_template_date: leave out templates released after this "YYYY-MM-DD".
        release_dates: of template entries by lower-case name.
        obsolete: template entries that others have replaced, by lower-case name.
        is_distillation: the structures are predictions with pLDDT in their B-factors.

    Raises:
        DataError: a folder is missing, or nothing usable is in it.
    """
    counter = counter or SkipCounter()
    data, alignments = Path(data_dir), Path(alignment_dir)
    for folder in (data, alignments, *([Path(template_mmcif_dir)] if template_mmcif_dir else [])):
        if not folder.is_dir():
            raise DataError("no such folder", source=str(folder), kind="unreadable")
    entries = []
    for folder in sorted(path for path in alignments.iterdir() if path.is_dir()):
        try:
            entries.append(_openfold_entry(data, folder, is_distillation))
        except DataError as error:
            counter.handle(error)
    if not entries:
        raise DataError(
            f"holds no usable <file>_<chain> folder ({counter.summary()})",
            source=str(alignments),
            kind="empty",
        )
    return TableOfFiles(
        tuple(entries),
        Path(template_mmcif_dir) if template_mmcif_dir else None,
        template_policy,
        max_template_date,
        release_dates,
        obsolete,
    )


def _openfold_entry(data_dir: Path, folder: Path, is_distillation: bool) -> FileEntry:
    file_id, _, chain_id = folder.name.rpartition("_")
    structure, chain = _structure_file(data_dir, file_id) if file_id else None, chain_id
    if structure is None:
        structure, chain = _structure_file(data_dir, folder.name), None
    if structure is None:
        tried = " nor ".join(f"{name}.cif or .pdb" for name in (file_id, folder.name) if name)
        raise DataError(
            f"no {tried} (plain or .gz) for the alignments of {folder.name}",
            source=str(data_dir),
            kind="no-structure",
        )
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    alignments = [
        path
        for path in files
        if _plain_suffix(path) in (".a3m", ".sto") and not path.name.startswith(_NOT_ALIGNMENTS)
    ]
    if not alignments:
        raise DataError("holds no .a3m or .sto alignment", source=str(folder), kind="no-alignment")
    hits = [path for path in files if _plain_suffix(path) == ".hhr"]
    return FileEntry(
        name=folder.name,
        structure=structure,
        chain=chain,
        alignments=tuple(sorted(alignments, key=_search_rank)),
        hits=hits[0] if hits else None,
        is_distillation=is_distillation,
    )


def _structure_file(data_dir: Path, file_id: str) -> Path | None:
    for name in dict.fromkeys((file_id, file_id.lower(), file_id.upper())):
        for suffix in (".cif", ".pdb"):
            found = find_plain_or_gzip(data_dir / f"{name}{suffix}")
            if found is not None:
                return found
    return None


def load_entry(
    entry: FileEntry,
    *,
    template_mmcif_dir: Path | None = None,
    template_policy: BadFilePolicy = "skip",
    max_template_date: str | None = None,
    release_dates: Mapping[str, str] | None = None,
    obsolete: Mapping[str, str] | None = None,
) -> Protein:
    """Read the files of one protein into one coordinate system, the chain's full sequence.

    A structure file without a record of its full sequence takes the alignment's query for it.

    Raises:
        DataError: a file is missing or bad, or structure and alignment do not belong together.
    """
    chain = read_chain(entry.structure, entry.chain)
    if entry.resolution is not None and chain.resolution == 0.0:
        chain = dataclasses.replace(chain, resolution=entry.resolution)
    if entry.alignments:
        merged = deduplicate([_read_alignment(path) for path in entry.alignments])
        if not chain.has_full_sequence:
            chain = onto_full_sequence(chain, merged.query)
        alignment, _ = onto_sequence(merged, chain.sequence)
    else:
        alignment = single_sequence(chain.sequence, source=str(entry.structure))
    if entry.is_distillation:
        confident = (chain.b_factors >= _MIN_DISTILLATION_PLDDT).astype(np.float32)
        chain = dataclasses.replace(chain, all_atom_mask=chain.all_atom_mask * confident)
    faults = FaultList(template_policy)
    # A prediction's file has a date too, but it says nothing about when the protein was solved.
    target_date = "" if entry.is_distillation else chain.release_date
    templates = _entry_templates(
        entry,
        chain,
        template_mmcif_dir,
        faults,
        latest_template_date(max_template_date, target_date),
        release_dates,
        obsolete,
    )
    return Protein(
        entry.name, chain, alignment, templates, entry.is_distillation, tuple(faults.faults)
    )


def _entry_templates(
    entry: FileEntry,
    chain: Chain,
    mmcif_dir: Path | None,
    faults: FaultList,
    max_date: str | None,
    release_dates: Mapping[str, str] | None,
    obsolete: Mapping[str, str] | None,
) -> tuple[Template, ...]:
    templates: list[Template] = []
    for path, chain_id in entry.template_chains:
        try:
            templates.append(template_from_chain(_read_chain_once(path, chain_id), chain.sequence))
        except DataError as error:
            faults.handle(error)
    if entry.hits is not None and mmcif_dir is not None:
        templates.extend(
            load_templates(
                _read_hits_once(entry.hits),
                mmcif_dir,
                chain.sequence,
                max_hits=_MAX_TEMPLATE_HITS - len(templates),
                counter=faults,
                # By its name and by its content: a renamed file is still its own answer.
                exclude_pdb_ids=(entry.structure.name.split(".")[0], chain.pdb_id),
                max_date=max_date,
                release_dates=release_dates,
                obsolete=obsolete,
            )
        )
    return tuple(templates)


def require_trainable(
    protein: Protein, *, max_resolution: float = 9.0, max_one_residue_fraction: float = 0.8
) -> Protein:
    """Apply the paper's filters for training chains (supplement 1.2.5).

    Raises:
        DataError: the resolution is worse than `max_resolution` Angstrom, or one residue type
            makes up more than `max_one_residue_fraction` of the sequence.
    """
    chain = protein.chain
    if chain.resolution > max_resolution:
        raise DataError(
            f"{protein.name} has resolution {chain.resolution} A, worse than {max_resolution} A",
            source=chain.source,
            kind="filtered-resolution",
        )
    most = max(chain.sequence.count(letter) for letter in set(chain.sequence))
    if most > max_one_residue_fraction * len(chain.sequence):
        raise DataError(
            f"{protein.name} consists of one residue type by {most / len(chain.sequence):.0%}",
            source=chain.source,
            kind="filtered-composition",
        )
    return protein


def _read_alignment(path: Path) -> Alignment:
    return read_a3m(path) if _plain_suffix(path) == ".a3m" else read_stockholm(path)


@functools.lru_cache(maxsize=16)
def _read_hits_once(path: Path) -> tuple[TemplateHit, ...]:
    return read_hhr(path)


@functools.lru_cache(maxsize=16)
def _read_chain_once(path: Path, chain_id: str) -> Chain:
    return read_chain(path, chain_id)


def _plain_suffix(path: Path) -> str:
    return Path(path.name.removesuffix(".gz")).suffix


def _search_rank(path: Path) -> tuple[int, str]:
    for rank, search in enumerate(_SEARCH_ORDER):
        if search in path.name:
            return rank, path.name
    return len(_SEARCH_ORDER), path.name
