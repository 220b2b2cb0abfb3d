"""Every stored case of the reference numbers, and the command that checks a directory of them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold import reference
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


def copy_case(name: str, to: Path, **info: object) -> dict[str, np.ndarray]:
    """Copy a case's JSON with changes; its arrays are returned, to be stored by the caller."""
    stored = json.loads((DIRECTORY / f"{name}.json").read_text())
    stored["config"].update(info.pop("config", {}))
    (to / f"{name}.json").write_text(json.dumps({**stored, **info}))
    with np.load(DIRECTORY / f"{name}.npz") as archive:
        return dict(archive)


@needs_numbers
def test_a_case_that_no_check_is_known_for_is_a_miss(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez(tmp_path / "loss_masked_msa.npz", **copy_case("loss_masked_msa", tmp_path))
    (tmp_path / "shapes.json").write_text('{"note": "no case"}')
    np.savez(tmp_path / "weights.npz", **{"param/a/w": np.zeros(2)})
    assert main([str(tmp_path)]) == 0
    for name in ("lddt_alone", "loss_of_another_kind"):
        (tmp_path / f"{name}.json").write_text('{"config": {}, "arrays": {"out/x": [[2], "f4"]}}')
        np.savez(tmp_path / f"{name}.npz", **{"out/x": np.zeros(2)})
    np.savez(tmp_path / "evo_orphan.npz", **{"out/x": np.zeros(2)})
    (tmp_path / "geom_without_arrays.json").write_text('{"arrays": {"out/x": [[2], "f4"]}}')
    (tmp_path / "broken.json").write_text("{")
    assert main([str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "PASS loss_masked_msa" in out
    assert "MISS lddt_alone" in out
    assert "No check is known for 'lddt_alone'" in out
    assert "No check is known for 'loss_of_another_kind'" in out
    assert "evo_orphan.npz has arrays to compare but no evo_orphan.json" in out
    assert "MISS geom_without_arrays" in out
    assert "MISS broken" in out
    assert "1 of 6 cases pass" in out


@needs_numbers
def test_the_violation_loss_has_the_weight_of_its_case(tmp_path: Path) -> None:
    name = "loss_structural_violations_noisy"
    arrays = copy_case(name, tmp_path, config={"structural_violation_loss_weight": 0.25})
    for key in arrays:
        if key == "out/loss" or key.startswith("grad/"):
            arrays[key] = arrays[key] * np.float32(0.25)
    np.savez(tmp_path / f"{name}.npz", **arrays)
    result = check_case(tmp_path / f"{name}.json")
    assert result.passed, result


@needs_numbers
@pytest.mark.parametrize("training", [True, False])
def test_the_whole_model_runs_in_the_mode_of_its_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, training: bool
) -> None:
    class Called(Exception):
        pass

    def model(*_: object) -> object:
        def call(batch: object, *, is_training: bool, compute_loss: bool) -> object:
            raise Called(is_training)

        return call

    monkeypatch.setattr(reference, "AlphaFold", model)
    name = "whole_model_recycle0"
    np.savez(tmp_path / f"{name}.npz", **copy_case(name, tmp_path, is_training=training))
    with pytest.raises(Called, match=str(training)):
        check_case(tmp_path / f"{name}.json")


def test_an_empty_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="No reference cases"):
        main([str(tmp_path)])
