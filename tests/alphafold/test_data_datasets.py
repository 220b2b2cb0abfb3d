"""Data sets: the OpenFold folder layout, the shared proteins, and files that cannot be used."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from models.alphafold.data.chain_data_cache import (
    read_chain_data_cache,
    sampling_weights,
    training_weights,
)
from models.alphafold.data.datasets import (
    Concatenated,
    TableOfFiles,
    load_entry,
    openfold_folder,
    require_trainable,
)
from models.alphafold.data.errors import DataError, SkipCounter, SkippedDataWarning
from models.alphafold.data.residues import CA
from models.alphafold.data.shared_proteins import NAMES, default_root, shared_proteins
from models.alphafold.data.templates import read_release_dates

ROOT = default_root()
pytestmark = pytest.mark.skipif(ROOT is None, reason="the shared proteins are not here")
OPENFOLD = "aqlaboratory__openfold/tests/test_data"
LUCIDRAINS = "lucidrains__alphafold3-pytorch/data/test/afdb_data/data_caches/train/1a2y_B"

# (query length, resolved residues) as listed in the set's manifest.
MANIFEST = {
    "102m_A": (154, 154),
    "8f9h_A": (154, 151),
    "101m_A": (154, 154),
    "1k1a_A": (241, 228),
    "5zyh_A": (237, 228),
    "7zzx_B": (204, 202),
    "7pzb_A": (244, 227),
    "2qke_E": (91, 91),
    "5jyt_A": (91, 91),
    "4qhf_A": (110, 109),
    "2jp1_A": (93, 60),
    "1k0n_A": (241, 226),
    "1rk4_B": (241, 206),
    "1dtx_A": (59, 58),
    "721p_A": (166, 166),
    "7a4d_A": (118, 118),
    "7a4d_C": (113, 113),
    "1a2y_B": (116, 116),
    "6kwc_A": (191, 191),
    "2q2k_A": (70, 45),
}


def test_the_manifest_lists_every_protein() -> None:
    assert set(MANIFEST) == set(NAMES)


@pytest.mark.filterwarnings("ignore::models.alphafold.data.errors.SkippedDataWarning")
@pytest.mark.parametrize("name", NAMES)
def test_every_shared_protein_loads_in_one_coordinate_system(name: str) -> None:
    dataset = shared_proteins(names=(name,))
    protein = dataset[0]
    chain = protein.chain
    assert (len(chain.sequence), chain.num_resolved) == MANIFEST[name]
    np.testing.assert_array_equal(protein.alignment.msa[0], chain.aatype)
    # Two residues in sequence, both seen, are one peptide bond apart wherever they were placed:
    # 3.8 Angstrom from CA to CA where it is trans, 2.9 where it is cis.
    ca, seen = chain.all_atom_positions[:, CA], chain.all_atom_mask[:, CA] > 0
    steps = np.linalg.norm(np.diff(ca, axis=0), axis=-1)[seen[1:] & seen[:-1]]
    assert np.mean((np.abs(steps - 3.8) < 0.3) | (np.abs(steps - 2.9) < 0.2)) > 0.97


def test_a_bare_pdb_is_placed_in_its_alignments_query() -> None:
    protein = shared_proteins(names=("2jp1_A",))[0]
    assert protein.chain.has_full_sequence
    assert protein.chain.sequence == protein.alignment.query
    assert protein.chain.num_resolved == 60


def test_a_mutated_chain_keeps_its_own_residues_in_both_parts() -> None:
    wild, mutant = shared_proteins(names=("2qke_E", "5jyt_A"))
    differ = sum(a != b for a, b in zip(wild.chain.sequence, mutant.chain.sequence, strict=True))
    assert differ == 5
    np.testing.assert_array_equal(wild.alignment.msa[1:50], mutant.alignment.msa[1:50])


def test_distillation_teaches_only_confident_residues() -> None:
    dataset = shared_proteins(names=("6kwc_A",))
    entry = dataclasses.replace(dataset.entries[0], hits=None)
    protein = load_entry(entry)
    assert protein.is_distillation
    kept = protein.chain.all_atom_mask > 0
    assert protein.chain.b_factors[kept].min() >= 50.0


def test_templates_of_the_table_are_found() -> None:
    protein = shared_proteins(names=("102m_A",))[0]
    assert [template.name for template in protein.templates] == ["8f9h_A", "101m_A"]


def test_unknown_names_are_listed() -> None:
    with pytest.raises(DataError, match="no protein 9xyz_Q; there are 102m_A"):
        shared_proteins(names=("9xyz_Q",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An OpenFold-style folder with two proteins, one of them with gzip files and subfolders."""
    (tmp_path / "data").mkdir()
    shutil.copy(ROOT / OPENFOLD / "mmcifs/2q2k.cif", tmp_path / "data")
    one_a2y = (ROOT / "Zarckranos__docking_modularization/1a2y.pdb").read_bytes()
    (tmp_path / "data/1a2y.pdb.gz").write_bytes(gzip.compress(one_a2y))
    shutil.copytree(ROOT / OPENFOLD / "alignments/2q2k_A", tmp_path / "alignments/2q2k_A")
    target = tmp_path / "alignments/1a2y_B"
    (target / "a3m").mkdir(parents=True)
    (target / "hhr").mkdir()
    shutil.copy(ROOT / LUCIDRAINS / "a3m/mgnify_hits.a3m", target / "a3m")
    shutil.copy(ROOT / LUCIDRAINS / "a3m/bfd_uniclust_hits.a3m", target / "a3m")
    shutil.copy(ROOT / LUCIDRAINS / "hhr/pdb70_hits.hhr", target / "hhr")
    (tmp_path / "templates").mkdir()
    return tmp_path


def test_openfold_folder_finds_structures_alignments_and_hits(folder: Path) -> None:
    dataset = openfold_folder(folder / "data", folder / "alignments")
    assert [dataset.name(index) for index in range(len(dataset))] == ["1a2y_B", "2q2k_A"]
    antibody, shallow = dataset.entries
    assert [path.name for path in antibody.alignments] == [
        "bfd_uniclust_hits.a3m",
        "mgnify_hits.a3m",
    ]
    assert antibody.hits is not None
    # Pairing data of complexes is no part of a monomer's alignment.
    assert [path.name for path in shallow.alignments] == [
        "uniref90_hits.sto",
        "bfd_uniclust_hits.a3m",
        "mgnify_hits.sto",
    ]
    assert len(dataset[0].chain.sequence) == 116
    assert dataset[1].alignment.num_rows == 20


def test_openfold_folder_takes_templates_from_hits(folder: Path) -> None:
    structure = (ROOT / "bytedance__Protenix/scripts/msa/data/mmcif/5zyh.cif").read_bytes()
    (folder / "templates/6xux.cif.gz").write_bytes(gzip.compress(structure))
    # A prediction has no date, so that no template is too late for it.
    dataset = openfold_folder(
        folder / "data", folder / "alignments", folder / "templates", is_distillation=True
    )
    protein = dataset[0]
    # The file under that name is another protein: refused, and the protein says so.
    assert protein.templates == ()
    assert [fault.kind for fault in protein.template_faults] == [
        "template-sequence",
        "template-missing",
    ]
    strict = dataclasses.replace(dataset, template_policy="raise")
    with pytest.raises(DataError, match="different versions"):
        strict[0]


HIT_OF_1A2Y = "6xux"


def with_template(folder: Path, date: str) -> TableOfFiles:
    """The antibody, of 1 January 2023, and the file of one hit, released on a date.

    The file holds another protein, so it is refused once it has passed for its date; what a test
    looks at is whether it came so far.
    """
    other = shared_proteins(names=("5zyh_A",)).entries[0].structure.read_text()
    (folder / f"templates/{HIT_OF_1A2Y}.cif").write_text(
        re.sub(r"\b20\d\d-\d\d-\d\d\b", date, other)
    )
    target = gzip.decompress((folder / "data/1a2y.pdb.gz").read_bytes())
    (folder / "data/1a2y.pdb.gz").write_bytes(
        gzip.compress(target.replace(b"13-JAN-98", b"01-JAN-23"))
    )
    return openfold_folder(folder / "data", folder / "alignments", folder / "templates")


def was_considered(dataset: TableOfFiles, index: int = 0) -> bool:
    return "template-sequence" in [fault.kind for fault in dataset[index].template_faults]


@pytest.mark.parametrize(
    ("date", "latest", "opened"),
    [
        ("2022-11-02", None, True),
        # Within 60 days of the target, and after it.
        ("2022-11-03", None, False),
        ("2023-06-01", None, False),
        ("2022-11-02", "2022-11-01", False),
        ("2022-11-02", "2022-11-02", True),
    ],
)
def test_templates_are_older_than_the_run_allows_and_than_the_target(
    date: str, latest: str | None, opened: bool, folder: Path
) -> None:
    dataset = dataclasses.replace(with_template(folder, date), max_template_date=latest)
    assert was_considered(dataset) == opened


def test_a_release_dates_cache_spares_opening_files(folder: Path) -> None:
    dataset = with_template(folder, "2020-01-01")
    assert was_considered(dataset)
    path = folder / "dates.json"
    path.write_text(json.dumps({HIT_OF_1A2Y.upper(): "2022-12-31"}))
    dated = dataclasses.replace(dataset, release_dates=read_release_dates(path))
    assert not was_considered(dated)
    # As in the caches of mmCIF folders.
    record = {"release_date": "2022-12-31", "chain_ids": ["A"], "seqs": ["ACD"]}
    path.write_text(json.dumps({HIT_OF_1A2Y: record}))
    assert read_release_dates(path) == dated.release_dates
    for text in ("[]", '{"a": 3}', '{"a": "soon"}', '{"a": {"b": "2022-12-31"}}', "{"):
        path.write_text(text)
        with pytest.raises(DataError, match=r"dates\.json"):
            read_release_dates(path)


def test_a_renamed_target_is_not_its_own_template(folder: Path) -> None:
    dataset = with_template(folder, "2020-01-01")
    own = dataclasses.replace(dataset.entries[0], structure=folder / "data/renamed.pdb")
    text = gzip.decompress((folder / "data/1a2y.pdb.gz").read_bytes()).decode()
    own.structure.write_text(text.replace("1A2Y", HIT_OF_1A2Y.upper()))
    assert not was_considered(dataclasses.replace(dataset, entries=(own,)))
    own.structure.write_text(text.replace("1A2Y", "9ZZZ"))
    assert was_considered(dataclasses.replace(dataset, entries=(own,)))


@pytest.mark.parametrize("name", ["6KWC", "AF-6KWC_F1-model", "predicted"])
def test_a_folder_named_as_its_file_means_the_only_chain(name: str, folder: Path) -> None:
    source = shared_proteins(names=("6kwc_A",)).entries[0]
    shutil.copy(source.structure, folder / f"data/{name}.pdb")
    (folder / "predicted_sets" / name).mkdir(parents=True)
    shutil.copy(source.alignments[0], folder / "predicted_sets" / name / "hits.a3m")
    dataset = openfold_folder(folder / "data", folder / "predicted_sets", is_distillation=True)
    assert dataset.name(0) == name
    assert len(dataset[0].chain.sequence) == 191


def test_a_folder_without_chain_name_needs_a_file_of_one_chain(folder: Path) -> None:
    (folder / "alignments/2q2k_A").rename(folder / "alignments/2q2k")
    dataset = openfold_folder(folder / "data", folder / "alignments")
    with pytest.raises(DataError, match="has the protein chains A, B, and nothing says which"):
        dataset[1]


def test_chains_without_structure_raise_or_are_counted(folder: Path) -> None:
    (folder / "alignments/9zzz_A").mkdir()
    with pytest.raises(DataError, match=r"no 9zzz\.cif or \.pdb nor 9zzz_A\.cif"):
        openfold_folder(folder / "data", folder / "alignments")
    counter = SkipCounter(policy="skip")
    with pytest.warns(SkippedDataWarning, match="9zzz"):
        dataset = openfold_folder(folder / "data", folder / "alignments", counter=counter)
    assert len(dataset) == 2
    assert counter.counts == {"no-structure": 1}


def test_a_folder_with_nothing_usable_is_an_error_under_either_policy(folder: Path) -> None:
    (folder / "empty/9zzz_A").mkdir(parents=True)
    with (
        pytest.warns(SkippedDataWarning),
        pytest.raises(DataError, match="no usable <file>_<chain> folder"),
    ):
        openfold_folder(folder / "data", folder / "empty", counter=SkipCounter(policy="skip"))
    with pytest.raises(DataError, match="no such folder"):
        openfold_folder(folder / "nowhere", folder / "alignments")


def test_an_alignment_of_another_protein_is_refused(folder: Path) -> None:
    for path in (folder / "alignments/2q2k_A").iterdir():
        path.unlink()
    shutil.copy(
        ROOT / LUCIDRAINS / "a3m/mgnify_hits.a3m", folder / "alignments/2q2k_A/mgnify_hits.a3m"
    )
    dataset = openfold_folder(folder / "data", folder / "alignments")
    with pytest.raises(DataError, match="different proteins"):
        dataset[1]


def test_training_filters_refuse_poor_resolution_and_repeats() -> None:
    protein = shared_proteins(names=("2q2k_A",))[0]
    assert require_trainable(protein) is protein
    with pytest.raises(DataError, match="resolution 3"):
        require_trainable(protein, max_resolution=2.5)
    with pytest.raises(DataError, match="one residue type"):
        require_trainable(protein, max_one_residue_fraction=0.05)


def test_a_set_to_learn_from_refuses_what_the_filters_leave_out(folder: Path) -> None:
    structure = folder / "data/2q2k.cif"
    structure.write_text(
        re.sub(r"(_refine.ls_d_res_high +)3.00", r"\g<1>9.50", structure.read_text())
    )
    dataset = openfold_folder(folder / "data", folder / "alignments")
    assert dataset[1].chain.resolution == 9.5
    with pytest.raises(DataError, match=r"resolution 9.5 A, worse than 9.0 A"):
        dataclasses.replace(dataset, only_trainable=True)[1]


def test_sampling_weights_follow_length_and_cluster_size() -> None:
    assert sampling_weights([100, 256, 512, 2000], [1] * 4) == [0.5, 0.5, 1.0, 1.0]
    assert sampling_weights([512, 512], [1, 4]) == [1.0, 0.25]


def test_chain_data_cache_filters_and_weights_chains(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    records = {
        "1dtx_A": {"seq": "ACDEFGHIKL" * 30, "resolution": 2.2, "cluster_size": 2},
        "2q2k_A": {"seq": "ACDEFGHIKL" * 10, "resolution": 3.0, "cluster_size": -1},
        "4qhf_A": {"seq": "ACDEFGHIKL", "resolution": 12.0, "cluster_size": 1},
        "102m_A": {"seq": "AAAAAAAAAC", "resolution": 1.0, "cluster_size": 1},
        "other_B": {"seq": "A"},
    }
    path.write_text(json.dumps(records))
    dataset = shared_proteins(names=("1dtx_A", "2q2k_A", "4qhf_A", "102m_A"))
    cache = read_chain_data_cache(path)
    assert training_weights(dataset, cache) == [300 / 512 / 2, 0.5, 0.0, 0.0]
    with pytest.raises(DataError, match="no record of 1 of 1 chains"):
        training_weights(shared_proteins(names=("721p_A",)), cache)
    with pytest.raises(DataError, match="leave none of 2"):
        training_weights(shared_proteins(names=("4qhf_A", "102m_A")), cache)


@pytest.mark.parametrize(
    ("text", "line"), [("[]", None), ('{"a": {}}', None), ('{"a":\n  nonsense}', 2)]
)
def test_bad_chain_data_caches_are_refused(text: str, line: int | None, tmp_path: Path) -> None:
    (tmp_path / "cache.json").write_text(text)
    with pytest.raises(DataError) as caught:
        read_chain_data_cache(tmp_path / "cache.json")
    assert caught.value.line == line


def test_concatenated_sets_draw_from_each_part_as_told() -> None:
    first = shared_proteins(names=("1dtx_A", "2q2k_A"))
    second = shared_proteins(names=("6kwc_A",))
    both = Concatenated((first, second))
    assert [both.name(index) for index in range(len(both))] == ["1dtx_A", "2q2k_A", "6kwc_A"]
    assert both[0].name == "1dtx_A"
    assert both.weights((0.25, 0.75)) == [0.125, 0.125, 0.75]
    with pytest.raises(IndexError):
        both[3]


def test_a_known_resolution_replaces_a_missing_one_only() -> None:
    entry = shared_proteins(names=("1dtx_A",)).entries[0]
    assert load_entry(entry).chain.resolution == pytest.approx(2.2)
    recorded = shared_proteins(names=("2q2k_A",)).entries[0]
    assert load_entry(dataclasses.replace(recorded, resolution=1.0)).chain.resolution == 3.0
