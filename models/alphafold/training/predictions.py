"""Writes what a validation predicted: mmCIF and PDB files, and a PNG beside the true structure.

For `run`, after each validation. The traps: the file of a protein is overwritten by the next
validation, so that a run leaves one current prediction for each chain and not hundreds; and a
prediction that cannot be written (it flew apart early in training) must not end the run.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np

from models.alphafold.plots import plot_prediction
from models.alphafold.protein_io import prediction_structure, write_prediction
from models.alphafold.training.validation import Prediction

_CA = 1
_FEWEST_KNOWN = 3  # a superposition needs as many


class UnwrittenPredictionWarning(UserWarning):
    """A prediction, or its PDB file, could not be written; the text says which and why."""


def write_predictions(folder: Path, predictions: tuple[Prediction, ...], step: int) -> None:
    """Write `NAME.cif`, `NAME.pdb` and `NAME.png` of each prediction.

    And `NAME_pae.json`, its expected aligned errors as viewers of predictions read them, where the
    model has the head for it.

    Args:
        folder: made if needed.
        predictions: of one validation.
        step: shown in the figures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for prediction in predictions:
        try:
            _write_structure(folder, prediction)
        except ValueError as error:
            warnings.warn(
                f"{prediction.name} in step {step}: {error}",
                UnwrittenPredictionWarning,
                stacklevel=2,
            )
        if prediction.aligned_error is not None:
            errors = prediction.aligned_error.round(2).tolist()
            (folder / f"{prediction.name}_pae.json").write_text(
                json.dumps([{"predicted_aligned_error": errors}])
            )
        known = prediction.true_mask[:, _CA]
        finite = np.isfinite(prediction.atom_positions[:, _CA]).all()
        if known.sum() < _FEWEST_KNOWN or not finite:
            continue
        scores = prediction.scores()
        plot_prediction(
            folder / f"{prediction.name}.png",
            prediction.atom_positions[:, _CA],
            prediction.true_positions[:, _CA],
            known,
            title=(
                f"{prediction.name}, step {step}: lDDT-CA {100 * scores['lddt_ca']:.1f}, "
                f"GDT-TS {100 * scores['gdt_ts']:.1f}"
            ),
        )


def _write_structure(folder: Path, prediction: Prediction) -> None:
    structure = prediction_structure(
        prediction.aatype,
        prediction.atom_positions,
        prediction.atom_mask,
        prediction.plddt,
        residue_index=prediction.residue_index,
        name=prediction.name,
    )
    # The mmCIF file first: it has room for what PDB has not.
    for suffix in (".cif", ".pdb"):
        write_prediction(folder / f"{prediction.name}{suffix}", structure)
