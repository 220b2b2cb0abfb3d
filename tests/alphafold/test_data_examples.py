"""Examples: reproducible, of fixed shape, cropped and padded consistently."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from models.alphafold.config import model_config, trunk_config
from models.alphafold.data.a3m import parse_a3m
from models.alphafold.data.alignment import Alignment
from models.alphafold.data.chains import Chain
from models.alphafold.data.errors import DataError
from models.alphafold.data.examples import (
    RESIDUE_AXIS,
    Protein,
    make_example,
    padded_length,
    raw_features,
)
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.data.residues import decode_sequence
from models.alphafold.data.shared_proteins import default_root
from models.alphafold.data.templates import template_from_chain
from models.alphafold.trunk import trunk_batch_spec

LENGTH = 40
CONFIG = FeatureConfig(
    crop_size=16, max_msa_clusters=6, max_extra_msa=10, max_templates=2, max_recycling_iters=3
)

SMALLEST = dataclasses.replace(CONFIG, max_msa_clusters=1, max_extra_msa=1, max_templates=0)


def made_protein(length: int = LENGTH, rows: int = 30) -> Protein:
    rng = np.random.default_rng(length)
    msa = rng.integers(0, 20, size=(rows, length)).astype(np.uint8)
    positions = np.cumsum(rng.normal(size=(length, 37, 3)), axis=0).astype(np.float32)
    chain = Chain(
        name="made_A",
        chain_id="A",
        sequence=decode_sequence(msa[0]),
        all_atom_positions=positions,
        all_atom_mask=(rng.random((length, 37)) < 0.8).astype(np.float32),
        b_factors=np.zeros((length, 37), np.float32),
        author_numbers=tuple(map(str, range(length))),
        resolution=1.5,
        rank=0,
        has_full_sequence=True,
        release_date="",
        source="made",
    )
    deletions = rng.integers(0, 3, size=msa.shape).astype(np.uint16)
    alignment = Alignment(msa, deletions, tuple(map(str, range(rows))), "made")
    templates = tuple(
        dataclasses.replace(template_from_chain(chain, chain.sequence), name=name)
        for name in ("one", "two", "three")
    )
    return Protein("made", chain, alignment, templates)


PROTEIN = made_protein()


def assert_equal(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_seed_and_index_decide_everything() -> None:
    one = make_example(PROTEIN, CONFIG, seed=3, index=7)
    make_example(PROTEIN, CONFIG, seed=3, index=8)
    assert_equal(one, make_example(PROTEIN, CONFIG, seed=3, index=7))
    other = make_example(PROTEIN, CONFIG, seed=4, index=7)
    assert not np.array_equal(one["msa_feat"], other["msa_feat"])


def test_the_number_of_rows_does_not_move_the_crop() -> None:
    few = make_example(PROTEIN, CONFIG, index=5)
    many = make_example(PROTEIN, dataclasses.replace(CONFIG, max_msa_clusters=20), index=5)
    np.testing.assert_array_equal(few["residue_index"], many["residue_index"])
    assert few["num_iter_recycling"] == many["num_iter_recycling"]


def test_crops_are_contiguous_and_reach_every_residue() -> None:
    raw = raw_features(PROTEIN)
    starts = set()
    for index in range(200):
        example = make_example(PROTEIN, CONFIG, index=index)
        where = example["residue_index"]
        assert np.all(np.diff(where) == 1)
        assert example["seq_length"] == CONFIG.crop_size
        starts.add(int(where[0]))
        for name in ("aatype", "all_atom_positions", "pseudo_beta", "rigidgroups_gt_frames"):
            np.testing.assert_array_equal(example[name], raw[name][where], err_msg=name)
        np.testing.assert_array_equal(example["true_msa"][0], example["aatype"])
    assert starts == set(range(LENGTH - CONFIG.crop_size + 1))


def test_crops_of_unclamped_examples_lie_towards_the_start() -> None:
    starts = {
        clamp: [
            int(make_example(PROTEIN, config, index=index)["residue_index"][0])
            for index in range(300)
        ]
        for clamp, config in (
            (clamp, dataclasses.replace(SMALLEST, clamp_prob=clamp)) for clamp in (0.0, 1.0)
        )
    }
    last = LENGTH - CONFIG.crop_size
    # Uniform between 0 and a uniform number has a quarter of the range as its mean.
    assert np.mean(starts[1.0]) == pytest.approx(last / 2, abs=1.5)
    assert np.mean(starts[0.0]) == pytest.approx(last / 4, abs=1.5)
    assert max(starts[0.0]) > last - 5


def test_short_chains_are_padded_to_the_crop_with_zero_masks() -> None:
    short = made_protein(length=10)
    example = make_example(short, CONFIG)
    assert example["seq_mask"].tolist() == [1.0] * 10 + [0.0] * 6
    assert example["seq_length"] == 10
    for name, axis in RESIDUE_AXIS.items():
        if name in example:
            assert example[name].shape[axis] == 16, name
            padding = np.moveaxis(example[name], axis, 0)[10:]
            assert not padding.any(), name


def test_shapes_and_types_do_not_depend_on_the_protein() -> None:
    def spec(protein: Protein, index: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        example = make_example(protein, CONFIG, index=index)
        return {name: (value.shape, value.dtype) for name, value in example.items()}

    wanted = spec(PROTEIN, 0)
    assert {dtype for _, dtype in wanted.values()} == {np.dtype("float32"), np.dtype("int32")}
    assert spec(made_protein(9, rows=2), 1) == wanted
    assert spec(dataclasses.replace(made_protein(100, rows=1), templates=()), 2) == wanted


def test_recycling_axis_resamples_the_alignment_and_repeats_the_rest() -> None:
    config = dataclasses.replace(CONFIG, recycling_axis=True, uniform_recycling=False)
    example = make_example(PROTEIN, config)
    assert example["num_iter_recycling"] == 3
    for name, value in example.items():
        if name != "num_iter_recycling":
            assert value.shape[0] == 4, name
    np.testing.assert_array_equal(example["aatype"][0], example["aatype"][3])
    assert not np.array_equal(example["msa_feat"][0], example["msa_feat"][1])
    same = make_example(PROTEIN, dataclasses.replace(config, resample_msa_in_recycling=False))
    np.testing.assert_array_equal(same["msa_feat"][0], same["msa_feat"][3])
    # The first pass is the example without the axis.
    plain = make_example(PROTEIN, dataclasses.replace(config, recycling_axis=False))
    np.testing.assert_array_equal(plain["msa_feat"], example["msa_feat"][0])


def test_recycling_numbers_are_uniform_and_clamping_is_frequent() -> None:
    examples = [make_example(PROTEIN, SMALLEST, index=index) for index in range(400)]
    counts = np.bincount([int(example["num_iter_recycling"]) for example in examples])
    assert len(counts) == 4
    assert counts.min() > 70
    clamped = np.mean([float(example["use_clamped_fape"]) for example in examples])
    assert clamped == pytest.approx(0.9, abs=0.05)


def test_without_a_crop_chains_are_padded_to_the_smallest_bucket() -> None:
    config = dataclasses.replace(CONFIG, crop_size=None, length_buckets=(32, 48, 64))
    assert make_example(PROTEIN, config)["aatype"].shape == (48,)
    assert padded_length(32, (32, 48)) == 32
    assert padded_length(77, ()) == 77
    with pytest.raises(DataError, match="no length bucket") as caught:
        make_example(made_protein(65), config)
    assert caught.value.kind == "too-long"


def test_validation_takes_whole_chains_and_the_best_templates() -> None:
    config = CONFIG.for_validation((48, 96))
    one, two = (make_example(PROTEIN, config, index=index) for index in (0, 1))
    assert one["aatype"].shape == (48,)
    assert one["seq_mask"].sum() == LENGTH
    assert one["num_iter_recycling"] == two["num_iter_recycling"] == 3
    np.testing.assert_array_equal(one["template_mask"], [1.0, 1.0])
    np.testing.assert_array_equal(one["template_aatype"], two["template_aatype"])


def test_target_feat_is_a_break_flag_and_the_residue_type() -> None:
    raw = raw_features(PROTEIN)
    assert raw["target_feat"].shape == (LENGTH, 22)
    assert not raw["target_feat"][:, 0].any()
    np.testing.assert_array_equal(raw["target_feat"][:, 1:].argmax(-1), raw["aatype"])


def test_parts_of_different_length_are_refused() -> None:
    alignment = parse_a3m(b">q\nACDE\n", source="other.a3m")
    with pytest.raises(DataError, match="4 columns and the chain 40 residues"):
        Protein("bad", PROTEIN.chain, alignment)


def test_config_tree_gives_the_sizes() -> None:
    config = FeatureConfig.from_config(model_config("finetuning"), crop_size=None)
    assert (config.max_msa_clusters, config.max_extra_msa) == (512, 5120)
    assert config.crop_size is None
    assert config.max_recycling_iters == 3


def test_examples_fit_the_trunks_train_step() -> None:
    tree = trunk_config(num_residues=24, num_msa=5, num_extra_msa=7)
    example = make_example(PROTEIN, FeatureConfig.from_config(tree))
    for name, wanted in trunk_batch_spec(tree).items():
        assert (example[name].shape, example[name].dtype) == (wanted.shape, wanted.dtype), name


@pytest.mark.skipif(default_root() is None, reason="the shared proteins are not here")
def test_features_have_the_names_and_shapes_of_the_reference_inputs() -> None:
    reference = default_root().parents[1] / "reference" / "whole_model_recycle2.npz"
    if not reference.is_file():
        pytest.skip("the reference numbers are not here")
    case = np.load(reference)
    wanted = {name[3:]: case[name] for name in case.files if name.startswith("in/")}
    config = FeatureConfig(
        crop_size=32,
        max_msa_clusters=10,
        max_extra_msa=16,
        max_templates=0,
        max_recycling_iters=2,
        recycling_axis=True,
    )
    example = make_example(PROTEIN, config)
    assert wanted.keys() - example.keys() == set()
    for name, value in wanted.items():
        assert example[name].shape == value.shape, name
        assert example[name].dtype == value.dtype, name


@pytest.mark.parametrize(("crop", "padded"), [(16, 16), (24, 24), (64, 48)])
def test_crops_are_padded_to_a_bucket_where_asked_for(crop: int, padded: int) -> None:
    length = len(PROTEIN.chain.sequence)
    assert 32 < length <= 48
    config = dataclasses.replace(
        CONFIG, crop_size=crop, length_buckets=(8, 20, 32, 48, 96), pad_crops_to_buckets=True
    )
    example = make_example(PROTEIN, config)
    assert example["seq_mask"].shape[-1] == padded
    assert example["seq_mask"].sum() == min(crop, length)
