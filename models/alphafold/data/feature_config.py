"""The sizes and random choices of feature making, as one frozen value.

Field names follow the `data` section of the configs that users of the field know, so that
`FeatureConfig.from_config` reads them from an `ml_collections` tree unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class FeatureConfig:
    """How a protein becomes a training example.

    Attributes:
        crop_size: residues of a training crop; None keeps the whole chain.
        length_buckets: without a crop, pad to the smallest of these that fits; () pads nothing.
        pad_crops_to_buckets: with a crop, pad to the smallest of these that fits instead of to
            `crop_size`: short chains cost less, and a step is compiled for each length.
        max_msa_clusters: rows of the clustered alignment.
        reduce_msa_clusters_by_max_templates: take `max_templates` of these rows away, so that
            with the templates' torsion rows, which the network appends, there are
            `max_msa_clusters` (models 1 and 2 of the published ones predict so).
        max_distillation_msa_clusters: rows to which the alignment of a predicted structure is
            thinned out before clusters are made (supplement, 1.3).
        max_extra_msa: rows of the extra alignment.
        max_templates: template slots; 0 makes no template features.
        shuffle_top_k_prefiltered: templates are drawn from this many best hits.
        subsample_templates: draw how many and which templates are used, as in training; False
            takes the best ones, as in inference.
        masked_msa_replace_fraction: fraction of alignment positions that are masked.
        masked_msa_uniform_prob, masked_msa_profile_prob, masked_msa_same_prob: of the masked
            positions, the fractions given a random residue, one drawn from the column's profile,
            or left as they are; the rest becomes the mask token.
        block_delete_msa: delete random blocks of rows first (supplement, algorithm 1).
        msa_fraction_per_block, num_delete_blocks: size and number of these blocks.
        max_recycling_iters: largest number of recycling iterations; their number is drawn
            uniformly from 0..max where `uniform_recycling`, else it is the maximum.
        resample_msa_in_recycling: draw the alignment features anew for each iteration.
        recycling_axis: give every feature a leading axis of `max_recycling_iters + 1`. Without
            it features have no such axis and describe one pass.
        clamp_prob: probability that the backbone loss of an example is clamped.
        msa_cluster_features: compute cluster profiles; False leaves them at the row itself.
    """

    crop_size: int | None = 256
    length_buckets: tuple[int, ...] = ()
    pad_crops_to_buckets: bool = False
    max_msa_clusters: int = 128
    reduce_msa_clusters_by_max_templates: bool = False
    max_distillation_msa_clusters: int = 1000
    max_extra_msa: int = 1024
    max_templates: int = 4
    shuffle_top_k_prefiltered: int = 20
    subsample_templates: bool = True
    masked_msa_replace_fraction: float = 0.15
    masked_msa_uniform_prob: float = 0.1
    masked_msa_profile_prob: float = 0.1
    masked_msa_same_prob: float = 0.1
    block_delete_msa: bool = True
    msa_fraction_per_block: float = 0.3
    num_delete_blocks: int = 5
    max_recycling_iters: int = 3
    uniform_recycling: bool = True
    resample_msa_in_recycling: bool = True
    recycling_axis: bool = False
    clamp_prob: float = 0.9
    msa_cluster_features: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes and fractions that cannot be meant."""
        if min(self.num_clusters, self.max_distillation_msa_clusters) < 1:
            raise ValueError(
                f"max_msa_clusters={self.max_msa_clusters}, less {self._rows_for_templates} for "
                f"templates, and max_distillation_msa_clusters="
                f"{self.max_distillation_msa_clusters}: the query itself needs one row"
            )
        if self.crop_size is not None and self.crop_size < 1:
            raise ValueError(f"crop_size={self.crop_size} must be positive, or None for no crop")
        if self.max_extra_msa < 0 or self.max_templates < 0 or self.max_recycling_iters < 0:
            raise ValueError(
                f"max_extra_msa={self.max_extra_msa}, max_templates={self.max_templates} and "
                f"max_recycling_iters={self.max_recycling_iters} must not be negative"
            )
        total = (
            self.masked_msa_uniform_prob + self.masked_msa_profile_prob + self.masked_msa_same_prob
        )
        if not 0.0 <= total <= 1.0 or not 0.0 <= self.masked_msa_replace_fraction <= 1.0:
            raise ValueError(
                f"masking probabilities sum to {total} and the masked fraction is "
                f"{self.masked_msa_replace_fraction}; both must lie in 0..1"
            )
        if list(self.length_buckets) != sorted(set(self.length_buckets)):
            raise ValueError(f"length_buckets={self.length_buckets} must increase strictly")

    @property
    def num_clusters(self) -> int:
        """Rows of the clustered alignment that the features have."""
        return self.max_msa_clusters - self._rows_for_templates

    @property
    def _rows_for_templates(self) -> int:
        return self.max_templates if self.reduce_msa_clusters_by_max_templates else 0

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **overrides: Any) -> FeatureConfig:
        """Build from a configuration tree of `models.alphafold.config`.

        Args:
            config: its `data` section gives the fields of the same names (others are ignored),
                its `model` section the number of recycling iterations and their resampling.
            **overrides: fields that differ, such as `crop_size=None` for validation.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in config["data"].items() if name in names}
        values["max_recycling_iters"] = config["model"]["num_recycle"]
        values["resample_msa_in_recycling"] = config["model"]["resample_msa_in_recycling"]
        values.update(overrides)
        if "length_buckets" in values:
            values["length_buckets"] = tuple(values["length_buckets"])
        return cls(**values)

    def for_validation(self, length_buckets: tuple[int, ...] = ()) -> FeatureConfig:
        """The same sizes for whole chains: no crop, the best templates, every recycling iteration.

        Args:
            length_buckets: pad chains to these lengths, so that few shapes are compiled.
        """
        return dataclasses.replace(
            self,
            crop_size=None,
            length_buckets=length_buckets,
            subsample_templates=False,
            block_delete_msa=False,
            uniform_recycling=False,
        )
