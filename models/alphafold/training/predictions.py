"""Writes what a validation predicted: PDB and mmCIF files, and a PNG beside the true structure.

For `run`, after each validation. The trap: the file of a protein is overwritten by the next
validation, so that a run leaves one current prediction for each chain and not hundreds.
"""

from __future__ import annotations

from pathlib import Path

from models.alphafold.plots import plot_prediction
from models.alphafold.protein_io import prediction_structure, write_prediction
from models.alphafold.training.validation import Prediction

_CA = 1
_FEWEST_KNOWN = 3  # a superposition needs as many


def write_predictions(folder: Path, predictions: tuple[Prediction, ...], step: int) -> None:
    """Write `NAME.pdb`, `NAME.cif` and `NAME.png` of each prediction.

    Args:
        folder: made if needed.
        predictions: of one validation.
        step: shown in the figures.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for prediction in predictions:
        structure = prediction_structure(
            prediction.aatype,
            prediction.atom_positions,
            prediction.atom_mask,
            prediction.plddt,
            residue_index=prediction.residue_index,
            name=prediction.name,
        )
        for suffix in (".pdb", ".cif"):
            write_prediction(folder / f"{prediction.name}{suffix}", structure)
        known = prediction.true_mask[:, _CA]
        if known.sum() < _FEWEST_KNOWN:
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
