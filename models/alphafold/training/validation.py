"""Validation: whole chains through the averaged weights, scored against the true structure.

Chains are not cropped but padded to the length buckets, so that one program serves many chains, and
every recycling iteration runs. They are read anew each time, so that one at a time is in memory.
The trap: padding must not count, so all scores use the mask of known C-alpha atoms, which is zero
there.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import haiku as hk
import jax
import ml_collections
import numpy as np

from models.alphafold.data.datasets import ProteinDataset
from models.alphafold.data.errors import DataError, SkipCounter, unforeseen
from models.alphafold.data.examples import Features, make_example
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.losses.pae import expected_aligned_error, predicted_tm_score
from models.alphafold.losses.plddt import plddt
from models.alphafold.metrics import drmsd_ca, gdt_ha, gdt_ts, lddt_ca
from models.alphafold.model import batch_spec, make_model

_CA = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
    """A predicted chain with the truth beside it; padding is cut off.

    Attributes:
        name: of the protein.
        aatype: # shape=(residues,)
        residue_index: # shape=(residues,)
        atom_positions: Angstrom. # shape=(residues, 37, 3)
        atom_mask: which atoms the residue types have. # shape=(residues, 37)
        true_positions: Angstrom. # shape=(residues, 37, 3)
        true_mask: which true atoms are known. # shape=(residues, 37)
        plddt: 0..100. # shape=(residues,)
        aligned_error: expected error of residue j aligned on residue i, Angstrom, where the model
            has the head for it. # shape=(residues, residues)
        ptm: predicted TM score, 0..1, where the model has that head.
    """

    name: str
    aatype: np.ndarray
    residue_index: np.ndarray
    atom_positions: np.ndarray
    atom_mask: np.ndarray
    true_positions: np.ndarray
    true_mask: np.ndarray
    plddt: np.ndarray
    aligned_error: np.ndarray | None = None
    ptm: float | None = None

    def scores(self) -> dict[str, float]:
        """`lddt_ca`, `gdt_ts`, `gdt_ha` (0..1), `drmsd_ca` (Angstrom) and mean `plddt` (0..100).

        And `ptm` (0..1), where there is one.
        """
        ca, true_ca = self.atom_positions[:, _CA], self.true_positions[:, _CA]
        known = self.true_mask[:, _CA]
        atoms = (self.atom_positions, self.true_positions, self.true_mask)
        return {
            "lddt_ca": float(lddt_ca(*atoms)),
            "drmsd_ca": float(drmsd_ca(*atoms)),
            "gdt_ts": gdt_ts(ca, true_ca, known),
            "gdt_ha": gdt_ha(ca, true_ca, known),
            "plddt": float(self.plddt.mean()),
            **({} if self.ptm is None else {"ptm": self.ptm}),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Validation:
    """One validation of a run: predictions, and their mean scores."""

    predictions: tuple[Prediction, ...]
    scores: Mapping[str, float]


def make_validator(
    config: ml_collections.ConfigDict,
    dataset: ProteinDataset,
    *,
    counter: SkipCounter,
    template_counter: SkipCounter | None = None,
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> Callable[[hk.Params], Validation]:
    """Make a function that validates parameters on a data set.

    Args:
        config: a tree of `models.alphafold.training.settings.training_config`.
        dataset: chains; the first `train.max_validation_chains` usable ones are taken.
        counter: what to do with chains that cannot be used, or are longer than every bucket.
        template_counter: what to do with unusable templates that the data set passed over; None
            skips them, counting.
        compiler_options: of XLA for the predictions; None for the usual ones.

    Returns:
        `validate(params) -> Validation`.
    """
    options = None if compiler_options is None else dict(compiler_options)
    predict = jax.jit(make_model(config).predict, compiler_options=options)
    features = FeatureConfig.from_config(config, recycling_axis=True).for_validation(
        tuple(config.data.length_buckets)
    )
    names = batch_spec(config, training=False).keys()
    chains = _Chains(
        dataset, features, config, counter, template_counter or SkipCounter(policy="skip")
    )

    def validate(params: hk.Params) -> Validation:
        predictions = []
        for name, example in chains:
            out = predict(params, None, {key: example[key] for key in names})
            predictions.append(_prediction(name, example, out))
        each = [prediction.scores() for prediction in predictions]
        if not each:
            warnings.warn(
                f"no chain could be validated ({counter.summary()})", RuntimeWarning, stacklevel=2
            )
            return Validation((), {})
        means = {key: float(np.nanmean([scores[key] for scores in each])) for key in each[0]}
        return Validation(tuple(predictions), means)

    return validate


@dataclasses.dataclass(frozen=True, eq=False)
class _Chains:
    """The first usable chains of a data set, made into examples as they are asked for."""

    dataset: ProteinDataset
    features: FeatureConfig
    config: ml_collections.ConfigDict
    counter: SkipCounter
    template_counter: SkipCounter

    def __iter__(self) -> Iterator[tuple[str, Features]]:
        found = 0
        for index in range(len(self.dataset)):
            if found == self.config.train.max_validation_chains:
                return
            try:
                protein = self.dataset[index]
                example = make_example(
                    protein, self.features, seed=self.config.train.seed, index=index
                )
            except DataError as error:
                self.counter.handle_once(error)
            except Exception as error:
                self.counter.handle_once(unforeseen(error, self.dataset.name(index)))
            else:
                for fault in protein.template_faults:
                    self.template_counter.handle_once(fault)
                found += 1
                yield protein.name, example


def _prediction(name: str, example: Mapping[str, Any], out: Mapping[str, Any]) -> Prediction:
    length = int(np.max(example["seq_length"]))

    def first(feature: str) -> np.ndarray:
        return np.asarray(example[feature][0][:length])

    structure = out["structure_module"]
    error, ptm = None, None
    if (head := out.get("predicted_aligned_error")) is not None:
        logits, breaks = head["logits"][:length, :length], head["breaks"]
        error = np.asarray(expected_aligned_error(logits, breaks))
        ptm = float(predicted_tm_score(logits, breaks, jax.numpy.ones(length)))
    return Prediction(
        name=name,
        aatype=first("aatype"),
        residue_index=first("residue_index"),
        atom_positions=np.asarray(structure["final_atom_positions"][:length], np.float32),
        atom_mask=np.asarray(structure["final_atom_mask"][:length]),
        true_positions=first("all_atom_positions"),
        true_mask=first("all_atom_mask"),
        plddt=np.asarray(plddt(out["predicted_lddt"]["logits"])[:length]),
        aligned_error=error,
        ptm=ptm,
    )
