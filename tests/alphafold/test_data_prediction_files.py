"""Predictions as files and figures: what is written reads back, the rest is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from models.alphafold.data.chains import read_chain
from models.alphafold.plots import plot_curves, plot_prediction
from models.alphafold.protein_io import prediction_structure, write_prediction
from models.alphafold.structure.residue_constants import ATOM37_MASK
from models.alphafold.training.predictions import UnwrittenPredictionWarning, write_predictions
from models.alphafold.training.validation import Prediction

AATYPE = np.arange(21) % 20
MASK = ATOM37_MASK[AATYPE]
POSITIONS = (np.random.default_rng(0).normal(size=(21, 37, 3)) * 10.0).round(3)
# Arginine's NH1 is by convention the nitrogen nearer to CD (atom 11), whichever was drawn so.
_CD, _NH1, _NH2 = 11, 29, 30
PLDDT = np.linspace(5.0, 98.0, 21).round(2)
PNG = b"\x89PNG\r\n"


@pytest.fixture
def positions() -> np.ndarray:
    made = POSITIONS.copy()
    for row in np.flatnonzero(AATYPE == 1):
        near, far = (np.linalg.norm(made[row, at] - made[row, _CD]) for at in (_NH1, _NH2))
        if near > far:
            made[row, [_NH1, _NH2]] = made[row, [_NH2, _NH1]]
    return made


@pytest.mark.parametrize("suffix", [".pdb", ".cif"])
def test_a_prediction_reads_back_with_plddt_as_b_factor(
    suffix: str, positions: np.ndarray, tmp_path
) -> None:
    structure = prediction_structure(
        AATYPE, positions, MASK, PLDDT, residue_index=np.arange(21) + 7
    )
    path = write_prediction(tmp_path / f"prediction{suffix}", structure)
    chain = read_chain(path, "A")
    np.testing.assert_array_equal(chain.aatype, AATYPE)
    np.testing.assert_array_equal(chain.all_atom_mask, MASK)
    np.testing.assert_allclose(chain.all_atom_positions, positions * MASK[..., None], atol=1e-3)
    np.testing.assert_allclose(chain.b_factors, PLDDT[:, None] * MASK, atol=1e-2)
    assert chain.author_numbers[0] == "8"


def test_values_that_are_not_finite_are_refused(positions: np.ndarray) -> None:
    positions[3, 1] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        prediction_structure(AATYPE, positions, MASK, PLDDT)


def test_shapes_and_empty_masks_are_checked(positions: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"plddt has shape \(20,\), not \(21,\)"):
        prediction_structure(AATYPE, positions, MASK, PLDDT[:-1])
    with pytest.raises(ValueError, match="nothing to write"):
        prediction_structure(AATYPE, positions, np.zeros_like(MASK), PLDDT)


def test_what_does_not_fit_pdb_goes_into_mmcif(positions: np.ndarray, tmp_path) -> None:
    structure = prediction_structure(
        AATYPE, positions, MASK, PLDDT, residue_index=np.arange(21) + 9990
    )
    with pytest.raises(ValueError, match=r"write a \.cif file"):
        write_prediction(tmp_path / "long.pdb", structure)
    assert read_chain(write_prediction(tmp_path / "long.cif", structure), "A").num_resolved == 21
    with pytest.raises(ValueError, match="suffix"):
        write_prediction(tmp_path / "long.xyz", structure)


def test_figures_are_png_files(tmp_path) -> None:
    rng = np.random.default_rng(0)
    true = np.cumsum(rng.normal(size=(30, 3)) * 2.2, axis=0)
    mask = np.ones(30)
    mask[4:7] = 0.0
    path = plot_prediction(tmp_path / "p.png", true + rng.normal(size=(30, 3)), true, mask)
    assert path.read_bytes().startswith(PNG)
    curves = {
        "loss": ([0, 1, 2, 3], [9.0, 4.0, float("nan"), 1.0]),
        "lddt_ca": ([1, 3], [0.2, 0.8]),
    }
    path = plot_curves(tmp_path / "c.png", curves, title="run", log_scale=("loss",))
    assert path.read_bytes().startswith(PNG)


def test_figures_of_nothing_are_refused(tmp_path) -> None:
    points = np.zeros((5, 3))
    with pytest.raises(ValueError, match="only 2 residues"):
        plot_prediction(tmp_path / "p.png", points, points, np.array([1, 1, 0, 0, 0]))
    with pytest.raises(ValueError, match="diverged"):
        plot_prediction(tmp_path / "p.png", points * np.nan, points, np.ones(5))
    with pytest.raises(ValueError, match="no curves"):
        plot_curves(tmp_path / "c.png", {})
    with pytest.raises(ValueError, match="2 steps and 1 values"):
        plot_curves(tmp_path / "c.png", {"loss": ([1, 2], [1.0])})


def prediction(name: str, positions: np.ndarray) -> Prediction:
    """A prediction of the residues above, with aligned errors."""
    return Prediction(
        name=name,
        aatype=AATYPE,
        residue_index=np.arange(21),
        atom_positions=positions,
        atom_mask=MASK,
        true_positions=POSITIONS,
        true_mask=MASK,
        plddt=PLDDT,
        aligned_error=np.arange(441.0).reshape(21, 21) / 16,
        ptm=0.25,
    )


def test_a_prediction_that_cannot_be_written_does_not_end_a_run(tmp_path) -> None:
    lost, far = POSITIONS.copy(), POSITIONS.copy()
    lost[3, 1] = np.nan
    far[5] += 20_000.0
    predictions = (prediction("lost", lost), prediction("far", far), prediction("good", POSITIONS))
    with pytest.warns(UnwrittenPredictionWarning) as found:
        write_predictions(tmp_path, predictions, step=7)
    texts = [str(warning.message) for warning in found]
    assert "lost in step 7" in texts[0]
    assert "far in step 7" in texts[1]
    assert "do not fit the PDB format" in texts[1]
    assert {path.name for path in tmp_path.iterdir()} == {
        "lost_pae.json",
        *(f"far{end}" for end in (".cif", ".png", "_pae.json")),
        *(f"good{end}" for end in (".cif", ".pdb", ".png", "_pae.json")),
    }
    (record,) = json.loads((tmp_path / "good_pae.json").read_text())
    np.testing.assert_allclose(
        record["predicted_aligned_error"], predictions[2].aligned_error, atol=0.006
    )
    scores = predictions[0].scores()
    assert np.isnan(scores["gdt_ts"])
    assert scores["ptm"] == 0.25
