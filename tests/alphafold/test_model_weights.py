"""Parameter files: names and shapes are the published ones, and a wrong file is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold.config import MODELS, model_config
from models.alphafold.model import expected_shapes
from models.alphafold.weights import flatten_params, load_params, save_params
from tests.alphafold.small_model import small_config

SHARED = Path(os.environ.get("JDYNOFF_SHARED", Path(__file__).resolve().parents[3] / "shared"))
SHAPES = SHARED / "reference" / "af2_param_shapes.json"


@pytest.mark.skipif(not SHAPES.exists(), reason="the list of published shapes is not here")
@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_the_published_files(name: str) -> None:
    # The others have the shapes of one of these: they differ in features, not in parts.
    alike = {"model_2": "model_1", "model_2_ptm": "model_1_ptm", "model_4": "model_3"}
    alike["model_5"] = "model_3"
    listed = json.loads(SHAPES.read_text())["models"]
    if alike.get(name, name) not in listed:
        pytest.skip("no shapes of this model are listed")
    published = listed[alike.get(name, name)]["shapes"]
    expected = expected_shapes(model_config(model=name))
    assert expected == {key: tuple(shape) for key, shape in published.items()}


@pytest.fixture(scope="module")
def fabricated():
    """A small model's configuration and drawn parameters under published keys."""
    config = small_config()
    shapes = expected_shapes(config)
    rng = np.random.default_rng(0)
    return config, {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def test_a_file_is_loaded_by_name(fabricated, tmp_path: Path) -> None:
    config, flat = fabricated
    np.savez(tmp_path / "params.npz", **flat)
    params = load_params(tmp_path / "params.npz", config)
    loaded = flatten_params(params)
    assert loaded.keys() == flat.keys()
    for key, value in flat.items():
        np.testing.assert_array_equal(loaded[key], value)
    save_params(tmp_path / "again.npz", params)
    again = flatten_params(load_params(tmp_path / "again.npz", config))
    jax.tree.map(np.testing.assert_array_equal, again, loaded)


def test_a_file_of_another_model_is_refused(fabricated, tmp_path: Path) -> None:
    config, flat = fabricated
    key = "alphafold/alphafold_iteration/evoformer/pair_activiations//weights"
    np.savez(tmp_path / "cut.npz", **{k: v for k, v in flat.items() if k != key})
    with pytest.raises(ValueError, match=r"1 missing \['alphafold.*pair_activiations//weights"):
        load_params(tmp_path / "cut.npz", config)
    np.savez(tmp_path / "wide.npz", **{**flat, key: np.zeros((65, 9), np.float32)})
    with pytest.raises(ValueError, match=r"weights is \(65, 9\), the model has \(65, 8\)"):
        load_params(tmp_path / "wide.npz", config)
