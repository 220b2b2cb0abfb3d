"""The developers' set of real proteins: which structure goes with which alignment.

The set is a folder of files taken verbatim from public repositories, laid out as
`<owner>__<repository>/<path in it>`. It is no part of the package: tests and experiments use it
where it is present. It covers what a real data set throws at a reader: full mmCIF and bare PDB,
unresolved stretches, DNA chains, several chains a file, alignments from 4 to 15,953 rows, three
searches for one chain, a distillation target, templates of the right and of the wrong fold.
"""

from __future__ import annotations

import os
from pathlib import Path

from models.alphafold.data.datasets import FileEntry, TableOfFiles
from models.alphafold.data.errors import BadFilePolicy, DataError
from models.alphafold.data.text_source import find_plain_or_gzip

_PROTENIX = "bytedance__Protenix"
_PROTENIX_CIF = f"{_PROTENIX}/scripts/msa/data/mmcif"
_PROTENIX_MSA = f"{_PROTENIX}/scripts/msa/data/mmcif_msa_initial"
_AF_CLUSTER = "HWaymentSteele__AF_Cluster/data_sep2022"
_CLIC1 = f"{_AF_CLUSTER}/04_OtherFoldswitchers/04_CLIC1"
_SELECASE = f"{_AF_CLUSTER}/04_OtherFoldswitchers/02_selecase"
_LYMPHOTACTIN = f"{_AF_CLUSTER}/04_OtherFoldswitchers/03_lymphotactin"
_KAIB = f"{_AF_CLUSTER}/00_KaiB"
_LUCIDRAINS = "lucidrains__alphafold3-pytorch/data/test"
_LUCIDRAINS_CIF = f"{_LUCIDRAINS}/pdb_data/mmcifs"
_LUCIDRAINS_MSA = f"{_LUCIDRAINS}/pdb_data/data_caches/msa/msas"
_1A2Y = f"{_LUCIDRAINS}/afdb_data/data_caches/train/1a2y_B"
_OPENFOLD = "aqlaboratory__openfold"
_2Q2K = f"{_OPENFOLD}/tests/test_data/alignments/2q2k_A"
_6KWC = f"{_OPENFOLD}/examples/monomer/alignments/6KWC_1"
_TEMPLATES = f"{_OPENFOLD}/tests/test_data/mmcifs"
_MYOGLOBIN = f"{_PROTENIX_MSA}/0.a3m"
_7A4D = f"{_LUCIDRAINS_CIF}/a4/7a4d-assembly1.cif"

# name: (structure, chain, alignments)
_PAIRS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "102m_A": (f"{_PROTENIX_CIF}/102m.cif", "A", (_MYOGLOBIN,)),
    "8f9h_A": (f"{_PROTENIX_CIF}/8f9h.cif", "A", (_MYOGLOBIN,)),
    "101m_A": ("dptech-corp__Uni-Fold-jax/example_data/mmcif/101m.cif", "A", (_MYOGLOBIN,)),
    "1k1a_A": (f"{_PROTENIX_CIF}/1k1a.cif", "A", (f"{_PROTENIX_MSA}/1.a3m",)),
    "5zyh_A": (f"{_PROTENIX_CIF}/5zyh.cif", "A", (f"{_PROTENIX_MSA}/2.a3m",)),
    "7zzx_B": (f"{_PROTENIX_CIF}/7zzx.cif", "B", (f"{_PROTENIX_MSA}/3.a3m",)),
    "7pzb_A": (
        f"{_PROTENIX}/examples/7pzb.pdb",
        "A",
        (f"{_PROTENIX}/examples/7pzb/msa/1/non_pairing.a3m",),
    ),
    "2qke_E": (f"{_KAIB}/2qkeE.pdb", "E", (f"{_KAIB}/2QKEE_colabfold.a3m",)),
    "5jyt_A": (f"{_KAIB}/5jytA.pdb", "A", (f"{_KAIB}/2QKEE_colabfold.a3m",)),
    "4qhf_A": (f"{_SELECASE}/4QHF.pdb", "A", (f"{_SELECASE}/4QHF.a3m",)),
    "2jp1_A": (f"{_SELECASE}/2JP1A.pdb", "A", (f"{_LYMPHOTACTIN}/2JP1.a3m",)),
    "1k0n_A": (f"{_CLIC1}/1K0NA.pdb", "A", (f"{_CLIC1}/1K0N_a2a25.a3m",)),
    "1rk4_B": (f"{_CLIC1}/1RK4B.pdb", "B", (f"{_CLIC1}/1K0N_a2a25.a3m",)),
    "1dtx_A": (
        "rigdenlab__conkit-examples/toxd/toxd.pdb",
        "A",
        ("rigdenlab__conkit-examples/toxd/toxd.a3m",),
    ),
    "721p_A": (
        f"{_LUCIDRAINS_CIF}/21/721p-assembly1.cif",
        "A",
        (f"{_LUCIDRAINS_MSA}/721p-assembly1A_protein.a3m",),
    ),
    "7a4d_A": (_7A4D, "A", (f"{_LUCIDRAINS_MSA}/7a4d-assembly1A_protein.a3m",)),
    "7a4d_C": (_7A4D, "C", (f"{_LUCIDRAINS_MSA}/7a4d-assembly1C_protein.a3m",)),
    "1a2y_B": (
        "Zarckranos__docking_modularization/1a2y.pdb",
        "B",
        (
            f"{_1A2Y}/a3m/uniref90_hits.a3m",
            f"{_1A2Y}/a3m/mgnify_hits.a3m",
            f"{_1A2Y}/a3m/bfd_uniclust_hits.a3m",
        ),
    ),
    "6kwc_A": (
        f"{_OPENFOLD}/examples/monomer/sample_predictions/6KWC_1_model_1_ptm_relaxed.pdb",
        "A",
        (f"{_6KWC}/bfd_uniref_hits.a3m",),
    ),
    "2q2k_A": (
        f"{_OPENFOLD}/tests/test_data/mmcifs/2q2k.cif",
        "A",
        (
            f"{_2Q2K}/uniref90_hits.sto",
            f"{_2Q2K}/mgnify_hits.sto",
            f"{_2Q2K}/bfd_uniclust_hits.a3m",
        ),
    ),
}
_HITS = {
    "1a2y_B": f"{_1A2Y}/hhr/pdb70_hits.hhr",
    "6kwc_A": f"{_6KWC}/hhsearch_output.hhr",
}
_TEMPLATES_OF = {
    "102m_A": ("8f9h_A", "101m_A"),
    "8f9h_A": ("102m_A", "101m_A"),
    "2qke_E": ("5jyt_A",),
    "1k0n_A": ("1rk4_B",),
    "1rk4_B": ("1k0n_A",),
}
_DISTILLATION = frozenset({"6kwc_A"})
# Angstrom, as published, where the file has no record of it.
_RESOLUTION = {"1dtx_A": 2.2}

#: Every protein of the set, by "pdbid_chain".
NAMES = tuple(_PAIRS)


def default_root() -> Path | None:
    """The set's folder: $JDYNOFF_SHARED/data/proteins, else `shared/` beside the repository."""
    shared = os.environ.get("JDYNOFF_SHARED")
    base = Path(shared) if shared else Path(__file__).resolve().parents[3].parent / "shared"
    root = base / "data" / "proteins"
    return root if root.is_dir() else None


def shared_proteins(
    root: str | Path | None = None,
    names: tuple[str, ...] = NAMES,
    *,
    template_policy: BadFilePolicy = "skip",
) -> TableOfFiles:
    """Make the data set of the given proteins.

    Args:
        root: folder of the set; None for `default_root()`.
        names: which proteins, in this order.
        template_policy: what to do with unusable templates, see `TableOfFiles`.

    Raises:
        DataError: the folder or a file of it is not there, or a name is unknown.
    """
    folder = default_root() if root is None else Path(root)
    if folder is None:
        raise DataError(
            "the folder of shared proteins is not beside the repository; set JDYNOFF_SHARED to "
            "the folder that holds data/proteins",
            source="shared proteins",
            kind="unreadable",
        )
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        raise DataError(
            f"no protein {', '.join(unknown)}; there are {', '.join(NAMES)}",
            source=str(folder),
            kind="no-chain",
        )
    return TableOfFiles(
        tuple(_entry(folder, name) for name in names),
        folder / _TEMPLATES,
        template_policy,
    )


def _entry(root: Path, name: str) -> FileEntry:
    structure, chain, alignments = _PAIRS[name]
    return FileEntry(
        name=name,
        structure=_file(root, structure),
        chain=chain,
        alignments=tuple(_file(root, path) for path in alignments),
        hits=_file(root, _HITS[name]) if name in _HITS else None,
        template_chains=tuple(
            (_file(root, _PAIRS[other][0]), _PAIRS[other][1])
            for other in _TEMPLATES_OF.get(name, ())
        ),
        is_distillation=name in _DISTILLATION,
        resolution=_RESOLUTION.get(name),
    )


def _file(root: Path, path: str) -> Path:
    found = find_plain_or_gzip(root / path)
    if found is None:
        raise DataError("no such file, plain or .gz", source=str(root / path), kind="unreadable")
    return found
