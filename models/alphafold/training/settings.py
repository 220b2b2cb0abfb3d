"""How a training run is set up: presets, and overrides by dotted names.

`training_config` is `models.alphafold.config.model_config` plus what a run needs: batch, lengths,
epochs, checkpoints, validation. Any leaf is overridden by its dotted name (`train.learning_rate`),
and the names of OpenFold's configuration files are understood for what both have, so that an
`experiment_config_json` goes on working. The trap: an override that changes nothing must not pass
silently, so an unknown name or a value of another type is an error that lists what is near, and
`require_usable` refuses values that no run can have.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_collections

from models.alphafold.config import model_config
from models.alphafold.data.feature_config import FeatureConfig
from models.alphafold.network.settings import Settings

_EVOFORMER = "model.embeddings_and_evoformer"
_STRUCTURE = "model.heads.structure_module"
#: OpenFold's dotted names for what has another name here.
ALIASES: Mapping[str, str] = {
    "globals.chunk_size": "model.global_config.attention_chunk_size",
    "globals.c_z": f"{_EVOFORMER}.pair_channel",
    "globals.c_m": f"{_EVOFORMER}.msa_channel",
    "globals.c_e": f"{_EVOFORMER}.extra_msa_channel",
    "globals.c_s": f"{_EVOFORMER}.seq_channel",
    "data.common.max_recycling_iters": "model.num_recycle",
    "data.common.resample_msa_in_recycling": "model.resample_msa_in_recycling",
    "data.train.crop_size": "data.crop_size",
    "data.train.max_msa_clusters": "data.max_msa_clusters",
    "data.train.max_distillation_msa_clusters": "data.max_distillation_msa_clusters",
    **dict.fromkeys(
        (
            "data.common.reduce_max_clusters_by_max_templates",
            "data.common.reduce_msa_clusters_by_max_templates",
        ),
        "data.reduce_msa_clusters_by_max_templates",
    ),
    "data.train.max_extra_msa": "data.max_extra_msa",
    "data.train.max_templates": "data.max_templates",
    "data.train.clamp_prob": "data.clamp_prob",
    "data.train.uniform_recycling": "data.uniform_recycling",
    "data.train.subsample_templates": "data.subsample_templates",
    "data.train.shuffle_top_k_prefiltered": "data.shuffle_top_k_prefiltered",
    "data.train.masked_msa_replace_fraction": "data.masked_msa_replace_fraction",
    "data.train.block_delete_msa": "data.block_delete_msa",
    "data.common.masked_msa.uniform_prob": "data.masked_msa_uniform_prob",
    "data.common.masked_msa.profile_prob": "data.masked_msa_profile_prob",
    "data.common.masked_msa.same_prob": "data.masked_msa_same_prob",
    "data.common.block_delete_msa.msa_fraction_per_block": "data.msa_fraction_per_block",
    "data.common.block_delete_msa.num_blocks": "data.num_delete_blocks",
    "data.common.msa_cluster_features": "data.msa_cluster_features",
    "data.data_module.data_loaders.batch_size": "train.batch_size",
    "data.data_module.data_loaders.num_workers": "train.num_workers",
    "data_module.data_loaders.batch_size": "train.batch_size",
    "data_module.data_loaders.num_workers": "train.num_workers",
    "model.evoformer_stack.no_blocks": f"{_EVOFORMER}.evoformer_num_block",
    "model.extra_msa.extra_msa_stack.no_blocks": f"{_EVOFORMER}.extra_msa_stack_num_block",
    "model.template.enabled": f"{_EVOFORMER}.template.enabled",
    "model.structure_module.no_blocks": f"{_STRUCTURE}.num_layer",
    "loss.distogram.weight": "model.heads.distogram.weight",
    "loss.experimentally_resolved.weight": "model.heads.experimentally_resolved.weight",
    "loss.fape.weight": "train.fape_weight",
    "loss.masked_msa.weight": "model.heads.masked_msa.weight",
    "loss.plddt_loss.weight": "model.heads.predicted_lddt.weight",
    "loss.supervised_chi.chi_weight": f"{_STRUCTURE}.chi_weight",
    "loss.supervised_chi.angle_norm_weight": f"{_STRUCTURE}.angle_norm_weight",
    "loss.violation.weight": f"{_STRUCTURE}.structural_violation_loss_weight",
    "loss.tm.weight": "model.heads.predicted_aligned_error.weight",
    "ema.decay": "train.ema_decay",
}


# Options that may be None; for these the type of a value.
_NULLABLE: Mapping[str, type] = {"model.global_config.attention_chunk_size": int}
# Leaves that only say what the tree was made from.
_NAMES_OF_CHOICES: Mapping[str, str] = {"name": "--model", "preset": "--config_preset"}
_AT_LEAST_ONE = (
    "batch_size",
    "accumulate_grad_batches",
    "train_epoch_len",
    "max_epochs",
    "checkpoint_every_n_steps",
    "checkpoints_kept",
    "validate_every_n_steps",
    "log_every_n_steps",
)
#: Whether activations of the trunk are bfloat16, by the names of precisions.
PRECISIONS: Mapping[str, bool] = {"32": False, "32-true": False, "bf16": True, "bf16-mixed": True}
# Options that change how long a run takes and what is seen of it, but not what it computes.
_HOW_A_RUN_IS_WATCHED = frozenset(
    {
        "name",
        "preset",
        "data.length_buckets",
        "model.global_config.attention_chunk_size",
        "model.global_config.checkpoint_blocks",
        "model.global_config.checkpoint_chunks",
        "train.checkpoint_every_epoch",
        "train.checkpoint_every_n_steps",
        "train.checkpoints_kept",
        "train.log_every_n_steps",
        "train.max_epochs",
        "train.max_validation_chains",
        "train.num_workers",
        "train.train_epoch_len",
        "train.validate_every_n_steps",
    }
)


class SettingsError(ValueError):
    """An option that does not exist, or a value that does not fit it."""


def training_config(
    preset: str = "initial_training", model: str = "model_1", *, precision: str = "32"
) -> ml_collections.ConfigDict:
    """Make the configuration of a run.

    Args:
        preset: one of `models.alphafold.config.PRESETS`.
        model: one of `models.alphafold.config.MODELS`.
        precision: "32" (or "32-true"), or "bf16" (or "bf16-mixed") for activations of the trunk in
            bfloat16; parameters, their gradients and the optimiser are float32 in both.

    Returns:
        A tree with `model`, `data` and `train`.

    Raises:
        ValueError: a name is unknown.
    """
    config = model_config(preset, model)
    if precision not in PRECISIONS:
        raise SettingsError(f"precision is {precision!r}; choose one of {list(PRECISIONS)}.")
    config.model.global_config.bfloat16 = PRECISIONS[precision]
    config.train.update(
        {
            "batch_size": 1,
            "num_workers": 0,
            "max_epochs": 1,
            "train_epoch_len": 10_000,
            "checkpoint_every_n_steps": 500,
            "checkpoint_every_epoch": False,
            "checkpoints_kept": 3,
            "validate_every_n_steps": 500,
            "max_validation_chains": 16,
            "log_every_n_steps": 1,
            # Scales the frame-aligned point errors and nothing else of the structure module.
            "fape_weight": 1.0,
        }
    )
    # Chains are padded to these lengths for validation, so that few programs are compiled.
    config.data.length_buckets = (64, 128, 192, 256, 384, 512, 768, 1024)
    if preset == "demo":
        # Averages over some hundred steps, since the whole run has about a thousand.
        config.train.update({"ema_decay": 0.98, "train_epoch_len": 1000})
    return config


def apply_overrides(config: ml_collections.ConfigDict, overrides: Mapping[str, Any]) -> None:
    """Set leaves of a configuration by dotted names.

    Args:
        config: changed in place.
        overrides: dotted name, of this tree or of OpenFold's, to value.

    Raises:
        SettingsError: a name is no leaf of the tree, or a value has another type than the leaf.
    """
    known = leaves(config)
    for given, value in overrides.items():
        name = ALIASES.get(given, given)
        if name in _NAMES_OF_CHOICES:
            raise SettingsError(
                f"Option {given!r} only names what was chosen; choose by {_NAMES_OF_CHOICES[name]}."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            hint = f"; did you mean {' or '.join(near)}?" if near else "."
            raise SettingsError(f"The configuration has no option {given!r}{hint}")
        try:
            config.update_from_flattened_dict({name: _converted(name, value, known[name])})
        except (TypeError, ValueError) as error:
            raise SettingsError(
                f"Option {given!r} is {known[name]!r}, of type {type(known[name]).__name__}; "
                f"{value!r} does not fit it."
            ) from error


def require_usable(config: ml_collections.ConfigDict) -> None:
    """Refuse values that fit their types and that no run can have.

    Raises:
        SettingsError: with the name of the option, its value, and what must hold.
    """
    for name in _AT_LEAST_ONE:
        if config.train[name] < 1:
            raise SettingsError(
                f"Option train.{name} is {config.train[name]}; it must be 1 or more."
            )
    try:
        FeatureConfig.from_config(config)
        Settings.from_config(config.model.global_config)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def parse_overrides(texts: Iterable[str]) -> dict[str, Any]:
    """Read `name=value` texts; values are Python literals, anything else is a string.

    Raises:
        SettingsError: a text has no "=".
    """
    parsed = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise SettingsError(f"Override {text!r} is not of the form name=value.")
        parsed[name.strip().removeprefix("config.")] = _literal(value.strip())
    return parsed


def read_overrides(path: Path) -> dict[str, Any]:
    """Read an `experiment_config_json`: a JSON object of dotted names, or nested objects.

    Raises:
        SettingsError: it cannot be read or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise SettingsError(f"{path} holds a {type(content).__name__}, not an object of overrides.")
    return _flattened(content)


def leaves(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """All options of a configuration by dotted name."""
    return _flattened(config.to_dict())


def recorded_options(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """All options by dotted name, as they are after a journey through JSON."""
    return json.loads(json.dumps(leaves(config)))


def changed_options(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which options differ that decide what a run computes, as "name: then -> now".

    Args:
        then: `recorded_options` of an earlier run.
        now: of this run.
    """
    return [
        f"{name}: {then.get(name, 'absent')} -> {now.get(name, 'absent')}"
        for name in sorted(then.keys() | now.keys())
        if name not in _HOW_A_RUN_IS_WATCHED and then.get(name) != now.get(name)
    ]


def _flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _converted(name: str, value: Any, present: Any) -> Any:
    """`value` in the type of the option, where that loses nothing."""
    if name in _NULLABLE and (value is None or type(value) is _NULLABLE[name]):
        return value
    if value is None or present is None or isinstance(present, bool) != isinstance(value, bool):
        raise TypeError(value)
    if isinstance(present, float) and isinstance(value, int):
        return float(value)
    if isinstance(present, tuple) and isinstance(value, list):
        return tuple(value)
    return value
