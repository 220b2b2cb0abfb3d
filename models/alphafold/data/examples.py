"""From a protein (chain, alignment, templates) to the arrays of one training example.

`make_example` is the one entry: it derives every random choice from (seed, index), so an example
does not depend on the worker that makes it, on the order, or on what was made before. Choices that
concern different things use different streams: changing the number of alignment rows does not move
the crop. The trap is the leading axis: with `recycling_axis` every feature has one slice for each
pass of the network, of which only the first `num_iter_recycling + 1` are meant to be used; the
unused ones repeat the last drawn, so shapes stay the same and nothing is computed for nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from models.alphafold.data.alignment import Alignment
from models.alphafold.data.chains import Chain
from models.alphafold.data.errors import DataError
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.data.labels import make_labels
from models.alphafold.data.msa_features import make_msa_features, one_hot
from models.alphafold.data.residues import NUM_RESTYPES_WITH_X
from models.alphafold.data.templates import Template, choose_templates, template_features

Features = dict[str, NDArray[np.generic]]

# Streams of randomness; adding one at the end leaves the others' draws as they were.
_STREAM_CROP, _STREAM_TEMPLATES, _STREAM_RECYCLING, _STREAM_CLAMP, _STREAM_MSA = range(5)

#: Which axis of a feature counts residues; features not named here have none.
RESIDUE_AXIS: Mapping[str, int] = {
    **dict.fromkeys(
        (
            "aatype", "residue_index", "seq_mask", "target_feat", "all_atom_positions",
            "all_atom_mask", "residx_atom14_to_atom37", "residx_atom37_to_atom14",
            "atom14_atom_exists", "atom37_atom_exists", "atom14_atom_is_ambiguous",
            "atom14_gt_positions", "atom14_gt_exists", "atom14_alt_gt_positions",
            "atom14_alt_gt_exists", "rigidgroups_gt_frames", "rigidgroups_gt_exists",
            "rigidgroups_group_exists", "rigidgroups_group_is_ambiguous",
            "rigidgroups_alt_gt_frames", "backbone_affine_tensor", "backbone_affine_mask",
            "torsion_angles_sin_cos", "alt_torsion_angles_sin_cos", "torsion_angles_mask",
            "chi_mask", "chi_angles", "pseudo_beta", "pseudo_beta_mask",
        ),
        0,
    ),
    **dict.fromkeys(
        (
            "msa", "deletion_matrix", "msa_feat", "msa_mask", "true_msa", "bert_mask",
            "extra_msa", "extra_has_deletion", "extra_deletion_value", "extra_msa_mask",
            "template_aatype", "template_all_atom_positions", "template_all_atom_masks",
            "template_pseudo_beta", "template_pseudo_beta_mask",
        ),
        1,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class Protein:
    """What is known about one target before any random choice.

    Attributes:
        name: id for messages and reports.
        chain: the structure, in the coordinates of its full sequence.
        alignment: rows in the same coordinates; row 0 is the chain's sequence.
        templates: best first; empty where there are none.
        is_distillation: the structure is a prediction, not an experiment.
        template_faults: why templates were left out, for whoever counts such faults.
    """

    name: str
    chain: Chain
    alignment: Alignment
    templates: tuple[Template, ...] = ()
    is_distillation: bool = False
    template_faults: tuple[DataError, ...] = ()

    def __post_init__(self) -> None:
        """Check that the parts share their coordinates."""
        if self.alignment.num_residues != len(self.chain.sequence):
            raise DataError(
                f"{self.name}: the alignment has {self.alignment.num_residues} columns and the "
                f"chain {len(self.chain.sequence)} residues; map one onto the other first",
                source=self.alignment.source,
                kind="row-length",
            )


def raw_features(protein: Protein) -> Features:
    """The features that involve no choice: sequence, alignment, atoms and what follows from them.

    Returns:
        aatype, residue_index, seq_length, msa, deletion_matrix, num_alignments, target_feat,
        seq_mask, all_atom_positions, all_atom_mask, resolution, is_distillation and every label
        of `labels.make_labels`.
    """
    chain = protein.chain
    length = len(chain.sequence)
    aatype = chain.aatype
    has_break = np.zeros((length, 1), dtype=np.float32)
    target_feat = np.concatenate([has_break, one_hot(aatype, NUM_RESTYPES_WITH_X)], axis=-1)
    return {
        "aatype": aatype,
        "residue_index": np.arange(length, dtype=np.int32),
        "seq_length": np.array(length, dtype=np.int32),
        "seq_mask": np.ones(length, dtype=np.float32),
        "target_feat": target_feat,
        "msa": protein.alignment.msa.astype(np.int32),
        "deletion_matrix": protein.alignment.deletion_matrix.astype(np.float32),
        "num_alignments": np.array(protein.alignment.num_rows, dtype=np.int32),
        "all_atom_positions": chain.all_atom_positions,
        "all_atom_mask": chain.all_atom_mask,
        "resolution": np.array(chain.resolution, dtype=np.float32),
        "is_distillation": np.array(protein.is_distillation, dtype=np.float32),
        **make_labels(aatype, chain.all_atom_positions, chain.all_atom_mask),
    }


def make_example(
    protein: Protein, config: FeatureConfig, *, seed: int = 0, index: int = 0
) -> Features:
    """Make the features of one training or validation example.

    Args:
        protein: the target.
        config: sizes and probabilities.
        seed: of the run.
        index: of the example in the run; the same (seed, index) gives the same arrays.

    Returns:
        Features by the field's names, float32 or int32, of shapes that depend on `config` alone
        (with a crop or buckets). With `config.recycling_axis` each has a leading axis of
        `max_recycling_iters + 1`, `num_iter_recycling` aside.

    Raises:
        DataError: the chain is longer than the largest length bucket.
    """
    raw = raw_features(protein)
    del raw["msa"], raw["deletion_matrix"]
    length = len(protein.chain.sequence)
    clamp = _stream(seed, index, _STREAM_CLAMP).random() < config.clamp_prob
    try:
        start, stop, padded = _window(
            length, config, _stream(seed, index, _STREAM_CROP), towards_start=not clamp
        )
    except ValueError as error:
        raise DataError(str(error), source=protein.name, kind="too-long") from error

    if config.max_templates:
        chosen = choose_templates(
            len(protein.templates),
            config.max_templates,
            top_k=config.shuffle_top_k_prefiltered,
            subsample=config.subsample_templates,
            rng=_stream(seed, index, _STREAM_TEMPLATES),
        )
        raw.update(
            template_features(
                [protein.templates[slot] for slot in chosen], length, config.max_templates
            )
        )
    raw["use_clamped_fape"] = np.array(clamp, dtype=np.float32)
    fixed = {name: _crop_and_pad(name, value, start, stop, padded) for name, value in raw.items()}
    fixed["seq_length"] = np.array(stop - start, dtype=np.int32)

    maximum = config.max_recycling_iters
    recycling = _stream(seed, index, _STREAM_RECYCLING)
    iterations = int(recycling.integers(0, maximum + 1)) if config.uniform_recycling else maximum
    passes = iterations + 1 if config.recycling_axis and config.resample_msa_in_recycling else 1
    drawn = []
    for number in range(passes):
        features = make_msa_features(
            protein.alignment,
            config,
            _stream(seed, index, _STREAM_MSA + number),
            is_distillation=protein.is_distillation,
        )
        drawn.append(
            {
                name: _crop_and_pad(name, value, start, stop, padded)
                for name, value in features.items()
            }
        )
    example: Features
    if config.recycling_axis:
        order = [min(number, passes - 1) for number in range(maximum + 1)]
        example = {
            name: np.broadcast_to(value, (maximum + 1, *value.shape))
            for name, value in fixed.items()
        }
        example.update(
            {name: np.stack([drawn[number][name] for number in order]) for name in drawn[0]}
        )
    else:
        example = {**fixed, **drawn[0]}
    example["num_iter_recycling"] = np.array(iterations, dtype=np.int32)
    return example


def padded_length(length: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds `length` residues; the length itself without buckets.

    Raises:
        ValueError: the chain is longer than the largest bucket.
    """
    if not buckets:
        return length
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise ValueError(
        f"a chain of {length} residues fits no length bucket of {buckets}; add a larger bucket, or "
        "crop"
    )


def _stream(seed: int, index: int, stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, index, stream])))


def _window(
    length: int, config: FeatureConfig, rng: np.random.Generator, *, towards_start: bool
) -> tuple[int, int, int]:
    """First residue, end, and padded length of an example.

    Unclamped examples lie nearer to the N-terminus on average: the last possible start is drawn
    first (supplement 1.2.8).
    """
    if config.crop_size is None:
        return 0, length, padded_length(length, config.length_buckets)
    kept = min(length, config.crop_size)
    last_start = length - kept
    if towards_start:
        last_start -= int(rng.integers(0, last_start + 1))
    start = int(rng.integers(0, last_start + 1))
    padded = config.crop_size
    if config.pad_crops_to_buckets:
        fitting = [bucket for bucket in config.length_buckets if kept <= bucket < padded]
        padded = min(fitting, default=padded)
    return start, start + kept, padded


def _crop_and_pad(
    name: str, value: NDArray[np.generic], start: int, stop: int, padded: int
) -> NDArray[np.generic]:
    axis = RESIDUE_AXIS.get(name)
    if axis is None:
        return value
    window = [slice(None)] * value.ndim
    window[axis] = slice(start, stop)
    cropped = value[tuple(window)]
    missing = padded - (stop - start)
    if missing == 0:
        return np.ascontiguousarray(cropped)
    return np.pad(cropped, [(0, missing if at == axis else 0) for at in range(value.ndim)])
