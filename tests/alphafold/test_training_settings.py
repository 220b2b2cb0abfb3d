"""Settings of a run: presets, overrides by this project's and by OpenFold's names."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("ml_collections")

from models.alphafold.config import MODELS, PRESETS
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.model import batch_spec
from models.alphafold.training.settings import (
    ALIASES,
    PRECISIONS,
    SettingsError,
    apply_overrides,
    changed_options,
    leaves,
    parse_overrides,
    read_overrides,
    recorded_options,
    require_usable,
    training_config,
)
from models.alphafold.training.train_step import make_training


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("model", MODELS)
def test_models_and_presets_go_together(preset, model) -> None:
    config = training_config(preset, model)
    require_usable(config)
    with_templates = model.removesuffix("_ptm") in ("model_1", "model_2")
    assert config.model.embeddings_and_evoformer.template.enabled == with_templates
    assert bool(config.data.max_templates) == with_templates
    with_error_head = model.endswith("_ptm") or preset == "finetuning_ptm"
    assert bool(config.model.heads.predicted_aligned_error.weight) == with_error_head
    if preset.startswith("finetuning"):
        few = model.removesuffix("_ptm") in ("model_2", "model_5")
        assert config.data.max_extra_msa == (1024 if few else 5120)
        assert config.model.heads.structure_module.structural_violation_loss_weight == 1.0


@pytest.mark.parametrize("preset", PRESETS)
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
        ("data.crop_size=none", "of type int"),
        ("train.learning_rate=null", "of type float"),
        ("train.ema_decay=text", "of type float"),
        ("model.num_recycle=[3]", "of type int"),
        ("data.length_buckets=64", "of type tuple"),
        ("globals.chunk_size=many", "does not fit"),
        ("globals.chunk_size=true", "does not fit"),
        ("preset=finetuning", "choose by --config_preset"),
        ("name=model_3", "choose by --model"),
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
    path.write_text("{")
    with pytest.raises(SettingsError, match="is not JSON"):
        read_overrides(path)
    with pytest.raises(SettingsError, match="cannot be read"):
        read_overrides(tmp_path / "nowhere.json")


def test_chunking_can_be_switched_off_by_none_and_on_again() -> None:
    config = training_config("demo")
    apply_overrides(config, parse_overrides(["globals.chunk_size=none"]))
    assert config.model.global_config.attention_chunk_size is None
    apply_overrides(config, parse_overrides(["globals.chunk_size=16"]))
    assert config.model.global_config.attention_chunk_size == 16


def test_every_random_choice_of_the_features_can_be_set() -> None:
    config = training_config("demo")
    overrides = {
        "data.common.masked_msa.uniform_prob": 0.2,
        "data.common.masked_msa.profile_prob": 0,
        "data.masked_msa_same_prob": 0.3,
        "data.train.block_delete_msa": False,
        "data.common.block_delete_msa.num_blocks": 2,
        "data.train.subsample_templates": False,
        "data.data_module.data_loaders.num_workers": 3,
    }
    apply_overrides(config, overrides)
    features = FeatureConfig.from_config(config)
    assert features.masked_msa_uniform_prob == 0.2
    assert features.masked_msa_profile_prob == 0.0
    assert features.masked_msa_same_prob == 0.3
    assert (features.block_delete_msa, features.num_delete_blocks) == (False, 2)
    assert not features.subsample_templates
    assert config.train.num_workers == 3


def test_clusters_reduced_by_templates_are_so_in_features_and_model() -> None:
    config = training_config("finetuning", "model_1")
    apply_overrides(config, {"data.common.reduce_max_clusters_by_max_templates": True})
    spec = batch_spec(config)
    assert FeatureConfig.from_config(config).num_clusters == 508
    for name in ("msa_feat", "msa_mask", "true_msa", "bert_mask"):
        assert spec[name].shape[1] == 508


def test_the_weight_of_fape_is_none_of_the_other_losses_of_the_structure() -> None:
    config = training_config("demo")
    before = leaves(config)
    apply_overrides(config, {"loss.fape.weight": 3})
    changed = {name for name, value in leaves(config).items() if value != before[name]}
    assert changed == {"train.fape_weight"}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.checkpoint_every_n_steps=0", "train.checkpoint_every_n_steps is 0"),
        ("train.batch_size=-1", "must be 1 or more"),
        ("data.max_msa_clusters=0", "needs one row"),
        ("data.masked_msa_same_prob=0.9", "masking probabilities"),
        ("data.length_buckets=[128, 64]", "increase strictly"),
    ],
)
def test_values_that_no_run_can_have_are_errors(override, said) -> None:
    config = training_config("demo")
    apply_overrides(config, parse_overrides([override]))
    with pytest.raises(SettingsError, match=said):
        require_usable(config)


def test_a_recorded_configuration_is_compared_by_what_it_computes() -> None:
    config = training_config("demo")
    then = json.loads(json.dumps(recorded_options(config)))
    assert changed_options(then, recorded_options(config)) == []
    apply_overrides(config, {"train.max_epochs": 7, "train.seed": 5, "data.length_buckets": [99]})
    assert changed_options(then, recorded_options(config)) == ["train.seed: 0 -> 5"]
    del then["train.seed"]
    assert changed_options(then, recorded_options(config)) == ["train.seed: absent -> 5"]


def test_precisions_have_the_names_of_the_field_and_others_are_refused() -> None:
    found = {
        name: training_config("demo", precision=name).model.global_config.bfloat16
        for name in PRECISIONS
    }
    assert found == {"32": False, "32-true": False, "bf16": True, "bf16-mixed": True}
    with pytest.raises(SettingsError, match="precision"):
        training_config("demo", precision="16")


def test_samples_of_one_step_have_one_length() -> None:
    config = training_config("demo")
    apply_overrides(config, {"data.pad_crops_to_buckets": True})
    make_training(config)
    apply_overrides(config, {"train.accumulate_grad_batches": 2})
    with pytest.raises(SettingsError, match="one length"):
        make_training(config)
