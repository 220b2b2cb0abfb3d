"""Settings of a run: presets, overrides by this project's and by OpenFold's names."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("ml_collections")

from models.alphafold.training.settings import (
    ALIASES,
    SettingsError,
    apply_overrides,
    leaves,
    parse_overrides,
    read_overrides,
    training_config,
)


@pytest.mark.parametrize("preset", ["initial_training", "finetuning", "demo"])
def test_every_openfold_name_points_at_an_option_of_every_preset(preset) -> None:
    known = leaves(training_config(preset))
    assert set(ALIASES.values()) <= set(known)


def test_overrides_of_either_naming_reach_the_same_option() -> None:
    config = training_config("demo")
    apply_overrides(config, {"globals.c_z": 24, "data.train.crop_size": 48, "ema.decay": 0.5})
    apply_overrides(config, parse_overrides(["train.learning_rate=1", "config.train.seed=7"]))
    assert config.model.embeddings_and_evoformer.pair_channel == 24
    assert config.data.crop_size == 48
    assert config.train.ema_decay == 0.5
    assert config.train.learning_rate == 1.0
    assert config.train.seed == 7


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.crop_siz=3", "did you mean data.crop_size"),
        ("train.learning_rate=fast", "of type float"),
        ("data.crop_size=2.5", "of type int"),
        ("data.crop_size=true", "of type int"),
        ("data=3", "has no option"),
        ("crop", "name=value"),
    ],
)
def test_an_override_that_fits_nothing_is_an_error_that_helps(override, said) -> None:
    with pytest.raises(SettingsError, match=said):
        apply_overrides(training_config("demo"), parse_overrides([override]))


def test_a_config_file_may_be_nested_or_dotted(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"data.train.crop_size": 40, "globals": {"c_m": 32}}))
    config = training_config("demo")
    apply_overrides(config, read_overrides(path))
    assert config.data.crop_size == 40
    assert config.model.embeddings_and_evoformer.msa_channel == 32
    path.write_text("[1]")
    with pytest.raises(SettingsError, match="holds a list"):
        read_overrides(path)


def test_chunking_can_be_switched_off_by_none() -> None:
    config = training_config("demo")
    apply_overrides(config, parse_overrides(["globals.chunk_size=none"]))
    assert config.model.global_config.attention_chunk_size is None


def test_bf16_is_a_precision_and_others_are_refused() -> None:
    assert training_config("demo", precision="bf16").model.global_config.bfloat16
    with pytest.raises(SettingsError, match="precision"):
        training_config("demo", precision="16")
