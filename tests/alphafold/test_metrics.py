"""Scores of structures: hand-made cases, invariances, and the reference numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.alphafold.data.shared_proteins import default_root
from models.alphafold.metrics import (
    distogram_accuracy,
    drmsd,
    drmsd_ca,
    gdt_ha,
    gdt_ts,
    lddt,
    lddt_ca,
    superpose,
)

ROOT = default_root()


def random_chain(count: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    steps = rng.normal(size=(count, 3))
    return np.cumsum(3.8 * steps / np.linalg.norm(steps, axis=1, keepdims=True), axis=0)


def moved(points: np.ndarray, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    rotation *= np.linalg.det(rotation)
    return points @ rotation.T + rng.normal(size=3) * 20.0


@pytest.mark.skipif(ROOT is None, reason="the reference numbers are not here")
def test_lddt_ca_equals_the_reference() -> None:
    path = ROOT.parents[1] / "reference" / "loss_predicted_lddt.npz"
    if not path.is_file():
        pytest.skip("the reference numbers are not here")
    case = np.load(path)
    arguments = (case["in/pred_atom37"], case["in/all_atom_positions"], case["in/all_atom_mask"])
    np.testing.assert_allclose(lddt_ca(*arguments), case["out/lddt_ca"], rtol=1e-6)
    np.testing.assert_allclose(
        lddt_ca(*arguments, per_residue=True), case["out/lddt_ca_per_residue"], rtol=1e-5
    )


def test_lddt_of_one_displaced_point_by_hand() -> None:
    # Points on a line, 5 apart; the last moves by 1.5: its distances are off by 1.5, within the
    # thresholds 2 and 4 but not 0.5 and 1. Pairs below 15: distances 5 and 10.
    true = np.array([[0, 0, 0], [5, 0, 0], [10, 0, 0], [15, 0, 0]], dtype=np.float32)
    predicted = true.copy()
    predicted[3, 0] += 1.5
    mask = np.ones(4, dtype=np.float32)
    # Ten ordered pairs: six undisturbed, four with the last point scoring one half.
    np.testing.assert_allclose(lddt(predicted, true, mask), (6 + 4 * 0.5) / 10, rtol=1e-6)
    np.testing.assert_allclose(
        lddt(predicted, true, mask, per_residue=True), [1.0, 2.5 / 3, 2.5 / 3, 0.5], rtol=1e-6
    )
    mask[3] = 0.0
    np.testing.assert_allclose(lddt(predicted, true, mask), 1.0)
    np.testing.assert_allclose(lddt(predicted, true, mask, per_residue=True)[3], 1.0)


def test_perfect_and_moved_structures_score_one() -> None:
    true = random_chain(40)
    predicted = moved(true)
    mask = np.ones(40)
    assert float(lddt(predicted, true, mask)) == pytest.approx(1.0)
    assert float(drmsd(predicted, true, mask)) == pytest.approx(0.0, abs=1e-4)
    assert gdt_ts(predicted, true, mask) == 1.0
    assert gdt_ha(predicted, true, mask) == 1.0


def test_a_mirror_image_is_told_from_the_truth_only_by_superposition() -> None:
    true = random_chain(60)
    mirrored = true * [1.0, 1.0, -1.0]
    mask = np.ones(60)
    assert float(lddt(mirrored, true, mask)) == pytest.approx(1.0)
    assert gdt_ts(mirrored, true, mask) < 0.7


def test_drmsd_by_hand() -> None:
    true = np.array([[0, 0, 0], [3, 0, 0], [0, 4, 0]], dtype=np.float32)
    predicted = true * 2.0
    # Distances 3, 4, 5 become 6, 8, 10.
    np.testing.assert_allclose(
        drmsd(predicted, true, np.ones(3)), np.sqrt((9 + 16 + 25) / 3), rtol=1e-6
    )
    np.testing.assert_allclose(drmsd(predicted, true, np.array([1.0, 1.0, 0.0])), 3.0, rtol=1e-6)
    np.testing.assert_allclose(drmsd(predicted, true, np.array([1.0, 0.0, 0.0])), 0.0)


def test_gdt_finds_the_half_that_is_right() -> None:
    true = random_chain(80)
    predicted = moved(true)
    # The second half turns about the hinge: right in itself, wrong as a whole.
    predicted[40:] = moved(predicted[40:], seed=3)
    mask = np.ones(80)
    assert gdt_ts(predicted, true, mask) >= 0.5
    assert gdt_ts(predicted, true, mask, search=False) < gdt_ts(predicted, true, mask)
    mask[40:] = 0.0
    assert gdt_ts(predicted, true, mask) == 1.0


def test_gdt_counts_thresholds_by_hand() -> None:
    # Far enough apart that no superposition helps: 60 points right, 20 off by 3 to either side.
    true = random_chain(80)
    true[60:] = random_chain(20, seed=5) * 3.0
    predicted = true.copy()
    predicted[60:80:2, 2] += 3.0
    predicted[61:80:2, 2] -= 3.0
    mask = np.ones(80)
    assert gdt_ts(predicted, true, mask, search=False) == pytest.approx(
        (0.75 + 0.75 + 1.0 + 1.0) / 4, abs=1e-9
    )
    assert gdt_ha(predicted, true, mask) >= (0.75 + 0.75 + 0.75 + 1.0) / 4 - 1e-9
    assert np.isnan(gdt_ts(predicted, true, np.zeros(80)))


def test_distogram_accuracy_counts_pairs_of_known_residues() -> None:
    positions = np.array([[0, 0, 0], [4, 0, 0], [8, 0, 0], [100, 0, 0]], dtype=np.float32)
    mask = np.array([1.0, 1.0, 1.0, 0.0])
    breaks = np.linspace(2.3125, 21.6875, 63)
    distance = np.linalg.norm(positions[:, None] - positions[None], axis=-1)
    bins = (distance[..., None] > breaks).sum(-1)
    logits = np.eye(64, dtype=np.float32)[bins]
    assert float(distogram_accuracy(logits, positions, mask)) == 1.0
    logits[0, 2] = logits[2, 0] = np.eye(64)[0]
    assert float(distogram_accuracy(logits, positions, mask)) == pytest.approx(4 / 6)
    far = distogram_accuracy(logits, positions, mask, min_separation=2)
    assert float(far) == 0.0


def test_scores_work_under_jit_and_over_a_batch() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(size=(3, 10, 37, 3)).astype(np.float32) * 5
    predicted = true + rng.normal(size=true.shape).astype(np.float32)
    mask = np.ones((3, 10, 37), dtype=np.float32)
    for score in (lddt_ca, drmsd_ca):
        together = jax.jit(score)(predicted, true, mask)
        alone = jnp.stack([score(predicted[i], true[i], mask[i]) for i in range(3)])
        np.testing.assert_allclose(together, alone, rtol=1e-5)


def test_superpose_ignores_masked_points_and_never_mirrors() -> None:
    true = random_chain(30)
    predicted = moved(true)
    mask = np.ones(30)
    mask[:5] = 0.0
    predicted[:5] += 50.0
    result = superpose(predicted, true, mask)
    np.testing.assert_allclose(result[5:], true[5:], atol=1e-9)
    planar = np.array([[0.0, 0, 0], [1, 0, 0], [0, 2, 0], [3, 1, 0]])
    np.testing.assert_allclose(superpose(moved(planar), planar, np.ones(4)), planar, atol=1e-9)
