"""Alignment features: masking, clusters, profiles and extra rows do what the paper says."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.alphafold.data.a3m import parse_a3m
from models.alphafold.data.alignment import Alignment
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.data.msa_features import (
    NUM_MSA_FEATURES,
    column_profile,
    delete_blocks,
    draw_cluster_centres,
    make_msa_features,
    mask_msa,
    nearest_centres,
    sample_rows,
    squash_deletions,
    summarise_clusters,
)
from models.alphafold.data.residues import GAP, MASK_TOKEN

CONFIG = FeatureConfig(max_msa_clusters=4, max_extra_msa=8, block_delete_msa=False)
NO_MASK = dataclasses.replace(CONFIG, masked_msa_replace_fraction=0.0)


def random_alignment(rows: int, residues: int, seed: int = 0) -> Alignment:
    rng = np.random.default_rng(seed)
    msa = rng.integers(0, GAP + 1, size=(rows, residues)).astype(np.uint8)
    deletions = rng.integers(0, 4, size=msa.shape).astype(np.uint16)
    return Alignment(msa, deletions, tuple(map(str, range(rows))), "made")


def test_masking_replaces_15_percent_in_the_papers_proportions() -> None:
    rows, residues = 400, 250
    # Every row is alanine but the profile is told to be glycine, so each kind is recognisable.
    msa = np.zeros((rows, residues), dtype=np.uint8)
    profile = np.zeros((residues, 22), dtype=np.float32)
    profile[:, 7] = 1.0
    masked, chosen = mask_msa(msa, profile, CONFIG, np.random.default_rng(0))
    assert chosen.mean() == pytest.approx(0.15, abs=0.005)
    assert np.all(masked[chosen == 0] == 0)
    hidden = masked[chosen == 1]
    # A random residue is alanine or glycine in 1/20 of its draws each.
    assert np.mean(hidden == MASK_TOKEN) == pytest.approx(0.7, abs=0.015)
    assert np.mean(hidden == 7) == pytest.approx(0.1 + 0.1 / 20, abs=0.01)
    assert np.mean(hidden == 0) == pytest.approx(0.1 + 0.1 / 20, abs=0.01)
    others = (hidden != MASK_TOKEN) & (hidden != 7) & (hidden != 0)
    assert np.mean(others) == pytest.approx(0.1 * 18 / 20, abs=0.01)
    assert set(np.unique(hidden)) == {*range(20), MASK_TOKEN}


def test_profile_draws_follow_the_column() -> None:
    config = dataclasses.replace(
        CONFIG,
        masked_msa_replace_fraction=1.0,
        masked_msa_uniform_prob=0.0,
        masked_msa_profile_prob=1.0,
        masked_msa_same_prob=0.0,
    )
    profile = np.zeros((2, 22), dtype=np.float32)
    profile[0, [2, GAP]] = 0.25, 0.75
    profile[1, 5] = 1.0
    masked, _ = mask_msa(np.zeros((4000, 2), np.uint8), profile, config, np.random.default_rng(0))
    assert np.mean(masked[:, 0] == GAP) == pytest.approx(0.75, abs=0.03)
    assert np.mean(masked[:, 0] == 2) == pytest.approx(0.25, abs=0.03)
    assert np.all(masked[:, 1] == 5)


def test_column_profile_counts_residues_and_gaps() -> None:
    alignment = parse_a3m(b">q\nAC\n>a\nA-\n>b\nRC\n>c\nAC\n", source="x.a3m")
    profile = column_profile(alignment.msa)
    assert profile[0, 0] == 0.75
    assert profile[0, 1] == 0.25
    assert profile[1, GAP] == 0.25
    np.testing.assert_allclose(profile.sum(axis=1), 1.0)


def test_masking_draws_from_the_profile_of_rows_that_blocks_take_away() -> None:
    # The query is alanine and all else glycine; all but the query goes in blocks.
    msa = np.full((200, 300), 7, dtype=np.uint8)
    msa[0] = 0
    alignment = Alignment(msa, np.zeros(msa.shape, np.uint16), ("",) * len(msa), "made")
    config = dataclasses.replace(
        CONFIG,
        block_delete_msa=True,
        msa_fraction_per_block=1.0,
        num_delete_blocks=20,
        masked_msa_replace_fraction=1.0,
        masked_msa_uniform_prob=0.0,
        masked_msa_profile_prob=1.0,
        masked_msa_same_prob=0.0,
    )
    features = make_msa_features(alignment, config, np.random.default_rng(0))
    assert features["msa_row_mask"].sum() < CONFIG.max_msa_clusters
    shown = features["msa_feat"][0, :, :23].argmax(-1)
    assert np.mean(shown == 7) > 0.95


def test_rows_join_the_centre_they_agree_with_ignoring_gaps_and_mask_tokens() -> None:
    centres = parse_a3m(b">q\nAAAAAA\n>b\nCCCC--\n", source="x").msa.copy()
    rows = parse_a3m(b">r\nAAAC--\n>s\nCCACDD\n>t\nDD----\n", source="x").msa
    # Row t agrees with neither (gaps do not count): the first centre. Masking two columns of the
    # first centre leaves row r with one equal residue in each: still the first on the tie.
    centres[0, :2] = MASK_TOKEN
    assert nearest_centres(centres, rows).tolist() == [0, 1, 0]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(0, 40), st.integers(1, 12))
def test_assignment_and_summaries_equal_the_plain_loops(
    seed: int, num_centres: int, num_rows: int, residues: int
) -> None:
    rng = np.random.default_rng(seed)
    centres = rng.integers(0, MASK_TOKEN + 1, size=(num_centres, residues)).astype(np.uint8)
    rows = rng.integers(0, GAP + 1, size=(num_rows, residues)).astype(np.uint8)
    centre_deletions = rng.integers(0, 9, size=centres.shape).astype(np.uint16)
    row_deletions = rng.integers(0, 9, size=rows.shape).astype(np.uint16)
    assignment = nearest_centres(centres, rows)
    for row, chosen in zip(rows, assignment, strict=True):
        agreement = [int(np.sum((row == centre) & (row < GAP))) for centre in centres]
        assert chosen == int(np.argmax(agreement))
    clusters = summarise_clusters(centres, centre_deletions, rows, row_deletions, assignment)
    for index in range(num_centres):
        members = [centres[index], *rows[assignment == index]]
        deletions = [centre_deletions[index], *row_deletions[assignment == index]]
        wanted = np.mean([np.eye(23)[member] for member in members], axis=0)
        np.testing.assert_allclose(clusters.profile[index], wanted, atol=1e-6)
        np.testing.assert_allclose(
            clusters.deletion_mean[index], np.mean(deletions, axis=0), atol=1e-6
        )


def test_query_is_always_the_first_centre_and_rows_are_never_used_twice() -> None:
    for seed in range(20):
        centres, others = draw_cluster_centres(30, 8, np.random.default_rng(seed))
        assert centres[0] == 0
        assert sorted([*centres, *others]) == list(range(30))


def test_block_deletion_keeps_the_query_and_deletes_runs() -> None:
    alignment = random_alignment(100, 5)
    kept_counts = set()
    for seed in range(20):
        kept = delete_blocks(alignment, 0.3, 5, np.random.default_rng(seed))
        assert kept.names[0] == "0"
        assert kept.num_rows == len(kept.names) == kept.deletion_matrix.shape[0]
        kept_counts.add(kept.num_rows)
    assert max(kept_counts) < 100
    assert len(kept_counts) > 5


def test_block_deletion_leaves_a_tiny_alignment_alone() -> None:
    alignment = random_alignment(3, 5)
    assert delete_blocks(alignment, 0.3, 5, np.random.default_rng(0)) is alignment


def test_the_alignment_of_a_prediction_is_thinned_out() -> None:
    alignment = random_alignment(50, 5)
    thin = sample_rows(alignment, 10, np.random.default_rng(0))
    numbers = [int(name) for name in thin.names]
    assert numbers[0] == 0
    assert len(numbers) == len(set(numbers)) == 10
    assert numbers == sorted(numbers)
    np.testing.assert_array_equal(thin.msa, alignment.msa[numbers])
    np.testing.assert_array_equal(thin.deletion_matrix, alignment.deletion_matrix[numbers])
    assert sample_rows(alignment, 50, np.random.default_rng(0)) is alignment

    config = dataclasses.replace(CONFIG, max_extra_msa=60, max_distillation_msa_clusters=10)
    for is_distillation, rows in ((True, 10), (False, 50)):
        features = make_msa_features(
            alignment, config, np.random.default_rng(0), is_distillation=is_distillation
        )
        found = features["msa_row_mask"].sum() + features["extra_msa_row_mask"].sum()
        assert found == rows


def test_clusters_make_room_for_the_rows_of_templates() -> None:
    config = dataclasses.replace(
        NO_MASK, max_templates=3, reduce_msa_clusters_by_max_templates=True
    )
    features = make_msa_features(random_alignment(9, 5), config, np.random.default_rng(0))
    assert config.num_clusters == 1
    assert features["msa_feat"].shape[0] == features["true_msa"].shape[0] == 1
    # The rows that are no centres any more are extra rows.
    assert features["extra_msa_row_mask"].sum() == 8
    with pytest.raises(ValueError, match="needs one row"):
        dataclasses.replace(config, max_templates=4)


def test_msa_feat_has_the_fields_49_channels_in_order() -> None:
    alignment = parse_a3m(b">q\nACDE\n>a\nAkkkC-E\n", source="x.a3m")
    config = dataclasses.replace(NO_MASK, max_msa_clusters=2)
    features = make_msa_features(alignment, config, np.random.default_rng(0))
    feat = features["msa_feat"]
    assert feat.shape == (2, 4, NUM_MSA_FEATURES)
    np.testing.assert_array_equal(feat[..., :23].argmax(-1), alignment.msa)
    assert feat[1, :, 23].tolist() == [0, 1, 0, 0]
    np.testing.assert_allclose(feat[1, 1, 24], np.arctan(3 / 3) * 2 / np.pi, rtol=1e-6)
    # With nothing else in the cluster its profile is the row itself.
    np.testing.assert_array_equal(feat[..., 25:48], feat[..., :23])
    np.testing.assert_allclose(feat[1, 1, 48], feat[1, 1, 24])


def test_shallow_alignments_are_padded_with_masked_rows() -> None:
    alignment = random_alignment(3, 6)
    config = dataclasses.replace(CONFIG, max_msa_clusters=8, max_extra_msa=5)
    features = make_msa_features(alignment, config, np.random.default_rng(0))
    assert features["msa_row_mask"].tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    assert features["msa_mask"].sum() == 18
    assert not features["msa_feat"][3:].any()
    assert not features["bert_mask"][3:].any()
    assert features["extra_msa_mask"].sum() == 0
    assert features["extra_msa"].shape == (5, 6)


def test_extra_rows_are_the_rows_that_are_no_centres() -> None:
    alignment = random_alignment(9, 30)
    features = make_msa_features(alignment, NO_MASK, np.random.default_rng(3))
    rows = [*features["true_msa"], *features["extra_msa"][features["extra_msa_row_mask"] > 0]]
    assert sorted(map(tuple, rows)) == sorted(map(tuple, alignment.msa.astype(np.int32)))


def test_deletions_are_squashed_to_one() -> None:
    values = squash_deletions(np.array([0, 3, 10_000], dtype=np.uint16))
    np.testing.assert_allclose(values, [0.0, 0.5, 1.0], atol=1e-3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_msa_clusters", 0),
        ("crop_size", 0),
        ("max_templates", -1),
        ("masked_msa_same_prob", 0.9),
        ("length_buckets", (64, 32)),
    ],
)
def test_impossible_configurations_are_refused(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field if field != "masked_msa_same_prob" else "sum to"):
        dataclasses.replace(CONFIG, **{field: value})
