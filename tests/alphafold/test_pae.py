"""Predicted aligned errors against their formulas, one pair of residues after the other."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold.config import model_config
from models.alphafold.losses.pae import (
    expected_aligned_error,
    predicted_aligned_error_loss,
    predicted_tm_score,
)

RESIDUES = 5
BREAKS = np.linspace(0.0, 31.0, 63)
CENTRES = 0.25 + 0.5 * np.arange(64)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def probabilities(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def test_expected_errors_are_means_over_the_bins() -> None:
    logits = 3.0 * normal(RESIDUES, RESIDUES, 64)
    expected = np.zeros((RESIDUES, RESIDUES))
    for i in range(RESIDUES):
        for j in range(RESIDUES):
            expected[i, j] = np.dot(probabilities(logits[i, j]), CENTRES)
    found = jax.jit(expected_aligned_error)(jnp.asarray(logits), jnp.asarray(BREAKS))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("length", [5, 40])
def test_the_predicted_tm_score_is_the_best_over_alignments(length: int) -> None:
    logits = 3.0 * normal(length, length, 64)
    mask = np.ones(length)
    mask[3] = 0.0
    # A residue that does not count would give the best score.
    logits[3, :, 0] = 50.0
    count = max(mask.sum(), 19)
    scale = 1.24 * np.cbrt(count - 15) - 1.8
    scores = []
    for i in np.flatnonzero(mask):
        terms = [
            np.dot(probabilities(logits[i, j]), 1 / (1 + (CENTRES / scale) ** 2))
            for j in np.flatnonzero(mask)
        ]
        scores.append(np.mean(terms))
    found = jax.jit(predicted_tm_score)(jnp.asarray(logits), jnp.asarray(BREAKS), jnp.asarray(mask))
    np.testing.assert_allclose(found, max(scores), rtol=1e-4)


def test_a_certain_and_perfect_prediction_has_a_tm_score_near_one() -> None:
    sure = jnp.zeros((200, 200, 64)).at[..., 0].set(60.0)
    assert float(jax.jit(predicted_tm_score)(sure, jnp.asarray(BREAKS), jnp.ones(200))) > 0.99
    np.testing.assert_allclose(expected_aligned_error(sure, jnp.asarray(BREAKS)), 0.25, rtol=1e-5)


def frames(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quaternions with positions [residues, 7], and the same as rotations and positions."""
    quaternion = normal(RESIDUES, 4, seed=seed)
    quaternion /= np.linalg.norm(quaternion, axis=1, keepdims=True)
    w, x, y, z = quaternion.T
    rotation = np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )
    position = 8.0 * normal(RESIDUES, 3, seed=seed + 1)
    tensor = np.concatenate([quaternion, position], axis=1)
    return tensor, np.moveaxis(rotation, -1, 0), position


@pytest.mark.parametrize(("resolution", "counts"), [(2.0, True), (0.0, False), (3.5, False)])
def test_the_loss_is_the_cross_entropy_of_the_true_bins(resolution: float, counts: bool) -> None:
    config = model_config("finetuning_ptm").model.heads.predicted_aligned_error
    predicted, rotation, position = frames(1)
    true, true_rotation, true_position = frames(5)
    mask = np.array([1.0, 1.0, 0.0, 1.0, 1.0])
    logits = normal(RESIDUES, RESIDUES, 64)
    errors = []
    for i in range(RESIDUES):
        for j in range(RESIDUES):
            here = rotation[i].T @ (position[j] - position[i])
            there = true_rotation[i].T @ (true_position[j] - true_position[i])
            error = np.linalg.norm(here - there)
            # Half an Angstrom each; the first holds 0 alone, a residue seen from itself.
            which = min(int(np.ceil(error / 0.5)), 63)
            if mask[i] * mask[j]:
                errors.append(-np.log(probabilities(logits[i, j])[which]))
    batch = {
        "backbone_affine_tensor": jnp.asarray(true, jnp.float32),
        "backbone_affine_mask": jnp.asarray(mask, jnp.float32),
        "resolution": jnp.asarray(resolution),
    }

    def loss(affine: jax.Array, logits: jax.Array) -> jax.Array:
        return predicted_aligned_error_loss(logits, jnp.asarray(BREAKS), affine, batch, config)

    args = jnp.asarray(predicted, jnp.float32), jnp.asarray(logits, jnp.float32)
    value, (to_structure, to_logits) = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(*args)
    np.testing.assert_allclose(value, np.mean(errors) * counts, rtol=1e-4)
    assert not np.any(to_structure)
    assert bool(np.any(to_logits)) == counts
