"""Every stored case of the reference numbers, and the command that checks a directory of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold.reference import check_case, find_cases, main

SHARED = Path(os.environ.get("JDYNOFF_SHARED", Path(__file__).resolve().parents[3] / "shared"))
DIRECTORY = SHARED / "reference"
CASES = find_cases(DIRECTORY) if DIRECTORY.is_dir() else []

needs_numbers = pytest.mark.skipif(not CASES, reason=f"no reference numbers beside {SHARED.name}/")


@needs_numbers
@pytest.mark.parametrize("path", CASES, ids=[path.stem for path in CASES])
def test_model_matches_the_stored_numbers(path: Path) -> None:
    result = check_case(path)
    assert result.passed, result


@needs_numbers
@pytest.mark.parametrize("name", ["evo_block_msa", "evo_block_extra_msa"])
def test_chunks_and_checkpoints_change_no_number(name: str) -> None:
    options = {"attention_chunk_size": 5, "checkpoint_chunks": True}
    result = check_case(DIRECTORY / f"{name}.json", options)
    assert result.passed, result


@needs_numbers
def test_a_changed_number_is_a_miss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "loss_masked_msa"
    with np.load(DIRECTORY / f"{name}.npz") as archive:
        arrays = dict(archive)
    (tmp_path / f"{name}.json").write_text((DIRECTORY / f"{name}.json").read_text())
    np.savez(tmp_path / f"{name}.npz", **arrays)
    assert main([str(tmp_path)]) == 0
    arrays["grad/in/logits"] = arrays["grad/in/logits"].copy()
    arrays["grad/in/logits"].flat[0] += 3e-4 * np.abs(arrays["grad/in/logits"]).max()
    np.savez(tmp_path / f"{name}.npz", **arrays)
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "PASS loss_masked_msa" in out
    assert "MISS loss_masked_msa" in out
    assert "grad/in/logits" in out


@needs_numbers
def test_a_number_that_is_not_computed_is_a_miss(tmp_path: Path) -> None:
    name = "loss_masked_msa"
    info = json.loads((DIRECTORY / f"{name}.json").read_text())
    (tmp_path / f"{name}.json").write_text(json.dumps(info))
    with np.load(DIRECTORY / f"{name}.npz") as archive:
        np.savez(tmp_path / f"{name}.npz", **archive, **{"out/other": np.zeros(3)})
    assert check_case(tmp_path / f"{name}.json").missing == ("out/other",)
    assert main([str(tmp_path)]) == 1


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No reference cases"):
        main([str(tmp_path)])
