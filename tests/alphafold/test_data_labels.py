"""Ground truth: equal to the reference numbers of a real structure, invariant where it must be."""

from __future__ import annotations

import numpy as np
import pytest

from models.alphafold.data.labels import (
    frames_from_points,
    make_labels,
    pseudo_beta,
    quaternion_of_rotation,
)
from models.alphafold.data.shared_proteins import default_root
from models.alphafold.structure.residue_constants import ATOM_ORDER, RESTYPES

ROOT = default_root()
CASE = ROOT.parents[1] / "reference" / "geom_real_structure.npz" if ROOT else None
needs_reference = pytest.mark.skipif(
    CASE is None or not CASE.is_file(), reason="the reference numbers are not here"
)
# Values are meaningless where their mask is zero.
MASK_OF = {
    "rigidgroups_gt_frames": "rigidgroups_gt_exists",
    "rigidgroups_alt_gt_frames": "rigidgroups_gt_exists",
    "torsion_angles_sin_cos": "torsion_angles_mask",
    "alt_torsion_angles_sin_cos": "torsion_angles_mask",
    "backbone_affine_tensor": "backbone_affine_mask",
    "pseudo_beta": "pseudo_beta_mask",
}


@needs_reference
def test_labels_of_a_real_structure_equal_the_reference() -> None:
    case = np.load(CASE)
    labels = make_labels(case["in/aatype"], case["in/all_atom_positions"], case["in/all_atom_mask"])
    names = {name[4:] for name in case.files if name.startswith("out/")}
    # The one name that is no feature: the affine's rotation as a matrix.
    assert names - labels.keys() == {"backbone_rotation_from_reference"}
    for name in sorted(names & labels.keys()):
        wanted, found = case[f"out/{name}"], labels[name]
        assert found.dtype == wanted.dtype, name
        assert found.shape == wanted.shape, name
        if name in MASK_OF:
            known = case[f"out/{MASK_OF[name]}"] > 0
            wanted, found = wanted[known], found[known]
        if name == "backbone_affine_tensor":
            # A quaternion and its negative are one rotation.
            same = np.sign(np.sum(wanted[:, :4] * found[:, :4], axis=-1, keepdims=True))
            found = np.concatenate([found[:, :4] * same, found[:, 4:]], axis=-1)
        np.testing.assert_allclose(found, wanted, atol=1e-5, err_msg=name)


def random_protein(rng: np.random.Generator, length: int = 21) -> tuple[np.ndarray, ...]:
    aatype = np.arange(length) % 21
    positions = rng.normal(size=(length, 37, 3)).astype(np.float32) * 3.0
    return aatype, positions, np.ones((length, 37), dtype=np.float32)


def test_torsions_and_local_coordinates_do_not_depend_on_where_the_protein_lies() -> None:
    rng = np.random.default_rng(0)
    aatype, positions, mask = random_protein(rng)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    rotation *= np.linalg.det(rotation)
    moved = (positions @ rotation.T + 7.0).astype(np.float32)
    here, there = make_labels(aatype, positions, mask), make_labels(aatype, moved, mask)
    known = here["torsion_angles_mask"] > 0
    np.testing.assert_allclose(
        here["torsion_angles_sin_cos"][known], there["torsion_angles_sin_cos"][known], atol=2e-3
    )
    frames = here["rigidgroups_gt_frames"][..., :9].reshape(-1, 8, 3, 3)
    turned = there["rigidgroups_gt_frames"][..., :9].reshape(-1, 8, 3, 3)
    exists = here["rigidgroups_gt_exists"] > 0
    np.testing.assert_allclose((rotation @ frames)[exists], turned[exists], atol=2e-3)


def test_alternative_labels_are_those_of_the_renamed_atoms() -> None:
    rng = np.random.default_rng(1)
    aatype = np.array([RESTYPES.index(letter) for letter in "DEFYRA"])
    _, positions, mask = random_protein(rng, len(aatype))
    renamed = positions.copy()
    for row, pairs in enumerate(
        [[("OD1", "OD2")], [("OE1", "OE2")], *[[("CD1", "CD2"), ("CE1", "CE2")]] * 2]
    ):
        for one, two in pairs:
            first, second = ATOM_ORDER[one], ATOM_ORDER[two]
            renamed[row, [first, second]] = positions[row, [second, first]]
    labels, other = make_labels(aatype, positions, mask), make_labels(aatype, renamed, mask)
    np.testing.assert_array_equal(labels["atom14_alt_gt_positions"], other["atom14_gt_positions"])
    assert labels["atom14_atom_is_ambiguous"].sum(axis=1).tolist() == [2, 2, 4, 4, 0, 0]
    assert labels["rigidgroups_group_is_ambiguous"].sum(axis=1).tolist() == [1, 1, 1, 1, 0, 0]
    # Turning a symmetric group by 180 degrees negates the sine and cosine of its torsion.
    alternative = labels["alt_torsion_angles_sin_cos"]
    changed = np.any(alternative != labels["torsion_angles_sin_cos"], axis=-1)
    assert np.argwhere(changed).tolist() == [[0, 4], [1, 5], [2, 4], [3, 4]]


def test_a_planar_trans_peptide_has_omega_of_180_degrees() -> None:
    positions = np.zeros((2, 37, 3), dtype=np.float32)
    mask = np.zeros((2, 37), dtype=np.float32)
    # CA(i), C(i), N(i+1), CA(i+1) as a zigzag in the plane.
    for row, atom, place in (
        (0, "CA", (0.0, 0.0, 0.0)),
        (0, "C", (1.2, 0.8, 0.0)),
        (1, "N", (2.4, 0.0, 0.0)),
        (1, "CA", (3.6, 0.8, 0.0)),
    ):
        positions[row, ATOM_ORDER[atom]] = place
        mask[row, ATOM_ORDER[atom]] = 1.0
    labels = make_labels(np.zeros(2, dtype=np.int32), positions, mask)
    assert labels["torsion_angles_mask"][:, 0].tolist() == [0.0, 1.0]
    np.testing.assert_allclose(labels["torsion_angles_sin_cos"][1, 0], [0.0, -1.0], atol=1e-6)


def test_pseudo_beta_of_glycine_is_its_ca() -> None:
    rng = np.random.default_rng(2)
    positions = rng.normal(size=(2, 37, 3)).astype(np.float32)
    mask = rng.integers(0, 2, size=(2, 37)).astype(np.float32)
    aatype = np.array([RESTYPES.index("G"), RESTYPES.index("A")])
    beta, beta_mask = pseudo_beta(aatype, positions, mask)
    ca, cb = ATOM_ORDER["CA"], ATOM_ORDER["CB"]
    np.testing.assert_array_equal(beta, [positions[0, ca], positions[1, cb]])
    np.testing.assert_array_equal(beta_mask, [mask[0, ca], mask[1, cb]])


def test_quaternions_give_their_rotation_back() -> None:
    rng = np.random.default_rng(3)
    points = rng.normal(size=(3, 50, 3))
    rotation, _ = frames_from_points(points[0], points[1], points[2])
    w, x, y, z = quaternion_of_rotation(rotation).astype(np.float64).T
    assert np.all(w >= 0.0)
    again = np.stack(
        [
            np.stack([1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)], -1),
            np.stack([2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)], -1),
            np.stack([2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)], -1),
        ],
        axis=-2,
    )
    np.testing.assert_allclose(again, rotation, atol=1e-5)
