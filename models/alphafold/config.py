"""Configurations as `ml_collections` trees, for models, losses, features and training.

Names in the tree are the field's, so a configuration of the published models fits. A *model* says
what the network is (`model_1` to `model_5`, with `_ptm` for an error head); a *preset* says what it
is trained on (`initial_training`, `finetuning`, `finetuning_ptm`) or shrinks both to a laptop
(`demo`). The trap: the two meet in fine-tuning, where a preset fixes loss weights too (violations
count, section 1.11) and the model says how many extra rows there are.

References:
    J. Jumper et al. 2021, supplement, table 5 (what the five models differ in).
"""

from __future__ import annotations

from typing import Any

import ml_collections

_NAMES = ("model_1", "model_2", "model_3", "model_4", "model_5")
MODELS = (*_NAMES, *(f"{name}_ptm" for name in _NAMES))
PRESETS = ("initial_training", "finetuning", "finetuning_ptm", "demo")
_WITHOUT_TEMPLATES = ("model_3", "model_4", "model_5")
_FEW_EXTRA_ROWS = ("model_2", "model_5")


def _update(**options: Any) -> dict[str, Any]:
    """Options that every residual update has."""
    return {"dropout_rate": 0.0, "orientation": "per_row", "shared_dropout": True, **options}


def _attention(num_head: int, **options: Any) -> dict[str, Any]:
    return _update(gating=True, num_head=num_head, **options)


def _triangle_updates(num_head: int, num_channel: int, **attention: Any) -> dict[str, Any]:
    multiplication = {
        "dropout_rate": 0.25,
        "num_intermediate_channel": num_channel,
        "fuse_projection_weights": False,
    }
    attention = {"dropout_rate": 0.25, **attention}
    return {
        "triangle_multiplication_outgoing": _update(equation="ikc,jkc->ijc", **multiplication),
        "triangle_multiplication_incoming": _update(equation="kjc,kic->ijc", **multiplication),
        "triangle_attention_starting_node": _attention(num_head, **attention),
        "triangle_attention_ending_node": _attention(
            num_head, **attention, orientation="per_column"
        ),
    }


def _evoformer_block() -> dict[str, Any]:
    return {
        "msa_row_attention_with_pair_bias": _attention(8, dropout_rate=0.15),
        "msa_column_attention": _attention(8, orientation="per_column"),
        "msa_transition": _update(num_intermediate_factor=4),
        "outer_product_mean": _update(first=False, num_outer_channel=32),
        **_triangle_updates(num_head=4, num_channel=128),
        "pair_transition": _update(num_intermediate_factor=4),
    }


def _template() -> dict[str, Any]:
    return {
        "enabled": True,
        "embed_torsion_angles": True,
        "use_template_unit_vector": False,
        "max_templates": 4,
        "attention": {"gating": False, "num_head": 4, "key_dim": 64, "value_dim": 64},
        "dgram_features": {"min_bin": 3.25, "max_bin": 50.75, "num_bins": 39},
        "template_pair_stack": {
            "num_block": 2,
            **_triangle_updates(num_head=4, num_channel=64, key_dim=64, value_dim=64),
            "pair_transition": _update(num_intermediate_factor=2),
        },
    }


def _embeddings_and_evoformer() -> dict[str, Any]:
    return {
        "evoformer_num_block": 48,
        "extra_msa_stack_num_block": 4,
        "msa_channel": 256,
        "pair_channel": 128,
        "extra_msa_channel": 64,
        "seq_channel": 384,
        "max_relative_feature": 32,
        "recycle_features": True,
        "recycle_pos": True,
        "prev_pos": {"min_bin": 3.25, "max_bin": 20.75, "num_bins": 15},
        "evoformer": _evoformer_block(),
        "template": _template(),
    }


def _heads() -> dict[str, Any]:
    by_resolution = {"filter_by_resolution": True, "min_resolution": 0.1, "max_resolution": 3.0}
    return {
        "distogram": {"first_break": 2.3125, "last_break": 21.6875, "num_bins": 64, "weight": 0.3},
        "experimentally_resolved": {**by_resolution, "weight": 0.0},
        "masked_msa": {"num_output": 23, "weight": 2.0},
        "predicted_aligned_error": {
            **by_resolution,
            "max_error_bin": 31.0,
            "num_bins": 64,
            "num_channels": 128,
            "weight": 0.0,
        },
        "predicted_lddt": {**by_resolution, "num_bins": 50, "num_channels": 128, "weight": 0.01},
        "structure_module": {
            "num_layer": 8,
            "num_channel": 384,
            "num_head": 12,
            "num_layer_in_transition": 3,
            "num_scalar_qk": 16,
            "num_scalar_v": 16,
            "num_point_qk": 4,
            "num_point_v": 8,
            "dropout": 0.1,
            "position_scale": 10.0,
            "fape": {"clamp_distance": 10.0, "clamp_type": "relu", "loss_unit_distance": 10.0},
            "sidechain": {
                "atom_clamp_distance": 10.0,
                "length_scale": 10.0,
                "num_channel": 128,
                "num_residual_block": 2,
                "weight_frac": 0.5,
            },
            "chi_weight": 0.5,
            "angle_norm_weight": 0.01,
            "structural_violation_loss_weight": 0.0,
            "violation_tolerance_factor": 12.0,
            "clash_overlap_tolerance": 1.5,
            "compute_in_graph_metrics": True,
            "weight": 1.0,
        },
    }


def _training() -> dict[str, Any]:
    """Adam, schedule and averaging (section 1.11.3); rates are per step."""
    return {
        "learning_rate": 1e-3,
        "warmup_steps": 1000,
        "decay_steps": 50_000,
        "decay_rate": 0.95,
        "adam_b1": 0.9,
        "adam_b2": 0.999,
        "adam_eps": 1e-6,
        "gradient_clip_norm": 0.1,
        "ema_decay": 0.999,
        "accumulate_grad_batches": 1,
        "seed": 0,
    }


def model_config(
    preset: str = "initial_training", model: str = "model_1"
) -> ml_collections.ConfigDict:
    """Make the configuration of a model under a training preset.

    Args:
        preset: one of `PRESETS`.
        model: one of `MODELS`. The first two have templates and the others none; the second and
            the fifth are fine-tuned with 1,024 extra rows and the others with 5,120, so the third
            and the fourth differ in nothing but their published weights; `_ptm` adds the
            predicted-aligned-error head, as the preset `finetuning_ptm` does to any model.

    Returns:
        A tree with `model` (the network and its losses), `data` (sizes of features) and `train`.

    Raises:
        ValueError: if a name is unknown.
    """
    if preset not in PRESETS:
        raise ValueError(f"Unknown config preset {preset!r}; choose one of {list(PRESETS)}.")
    if model not in MODELS:
        raise ValueError(f"Unknown model {model!r}; choose one of {list(MODELS)}.")
    config = ml_collections.ConfigDict(
        {
            "name": model,
            "preset": preset,
            "model": {
                "embeddings_and_evoformer": _embeddings_and_evoformer(),
                "global_config": {
                    "deterministic": False,
                    "eval_dropout": False,
                    "zero_init": True,
                    "bfloat16": False,
                    "attention_chunk_size": 64,
                    "checkpoint_blocks": False,
                    "checkpoint_chunks": False,
                    "skip_absent_templates": False,
                    "extra_msa_min_depth": 0,
                    "halt_threshold": 0.0,
                    "halt_min_blocks": 1,
                    "recycle_early_stop_tolerance": 0.0,
                },
                "heads": _heads(),
                "num_recycle": 3,
                "resample_msa_in_recycling": True,
            },
            "data": {
                "crop_size": 256,
                "max_msa_clusters": 128,
                "reduce_msa_clusters_by_max_templates": False,
                "max_distillation_msa_clusters": 1000,
                "max_extra_msa": 1024,
                "max_templates": 4,
                "shuffle_top_k_prefiltered": 20,
                "subsample_templates": True,
                "masked_msa_replace_fraction": 0.15,
                "masked_msa_uniform_prob": 0.1,
                "masked_msa_profile_prob": 0.1,
                "masked_msa_same_prob": 0.1,
                "block_delete_msa": True,
                "msa_fraction_per_block": 0.3,
                "num_delete_blocks": 5,
                "msa_cluster_features": True,
                "pad_crops_to_buckets": False,
                "clamp_prob": 0.9,
                "uniform_recycling": True,
            },
            "train": _training(),
        }
    )
    network, heads = config.model.embeddings_and_evoformer, config.model.heads
    base = model.removesuffix("_ptm")
    if base in _WITHOUT_TEMPLATES:
        network.template.enabled = False
        network.template.embed_torsion_angles = False
        config.data.max_templates = 0
    if model != base or preset == "finetuning_ptm":
        heads.predicted_aligned_error.weight = 0.1
    if preset.startswith("finetuning"):
        config.data.update({"crop_size": 384, "max_msa_clusters": 512})
        config.data.max_extra_msa = 1024 if base in _FEW_EXTRA_ROWS else 5120
        heads.structure_module.structural_violation_loss_weight = 1.0
        heads.experimentally_resolved.weight = 0.01
        config.train.update({"learning_rate": 5e-4, "warmup_steps": 0})
    if preset == "demo":
        _shrink(config)
    return config


def _shrink(config: ml_collections.ConfigDict) -> None:
    """Make a model that learns one small protein within minutes on two CPU cores.

    The trunk is small; the structure module, which costs next to nothing, keeps all its layers and
    two thirds of its width, without which it lags far behind the pair representation. Nothing is to
    be generalised to, so there is no dropout, and the learning rate is high and soon decays.
    """
    network, heads = config.model.embeddings_and_evoformer, config.model.heads
    network.update(
        {
            "evoformer_num_block": 4,
            "extra_msa_stack_num_block": 1,
            "msa_channel": 64,
            "pair_channel": 32,
            "extra_msa_channel": 16,
            "seq_channel": 256,
        }
    )
    block = network.evoformer
    for name in ("msa_row_attention_with_pair_bias", "msa_column_attention"):
        block[name].num_head = 4
    for stack, channels in ((block, 32), (network.template.template_pair_stack, 16)):
        for direction in ("outgoing", "incoming"):
            stack[f"triangle_multiplication_{direction}"].num_intermediate_channel = channels
        for node in ("starting", "ending"):
            stack[f"triangle_attention_{node}_node"].num_head = 2
    block.outer_product_mean.num_outer_channel = 16
    for node in ("starting", "ending"):
        attention = network.template.template_pair_stack[f"triangle_attention_{node}_node"]
        attention.update({"key_dim": 16, "value_dim": 16})
    network.template.attention.update({"num_head": 2, "key_dim": 16, "value_dim": 16})
    heads.structure_module.update(
        {"num_channel": 256, "num_head": 8, "num_scalar_qk": 16, "num_scalar_v": 16}
    )
    heads.structure_module.sidechain.num_channel = 32
    heads.predicted_lddt.num_channels = 32
    config.data.update({"crop_size": 64, "max_msa_clusters": 32, "max_extra_msa": 64})
    if network.template.enabled:
        config.data.max_templates = network.template.max_templates = 2
    config.model.global_config.deterministic = True
    config.model.num_recycle = 1
    # The published epsilon, 1e-6, is as large as many of a small model's clipped gradients.
    config.train.update(
        {
            "learning_rate": 2e-3,
            "warmup_steps": 50,
            "decay_steps": 100,
            "decay_rate": 0.9,
            "adam_eps": 1e-8,
        }
    )


def trunk_config(
    *,
    num_blocks: int = 6,
    num_extra_blocks: int = 4,
    num_residues: int = 96,
    num_msa: int = 32,
    num_extra_msa: int = 64,
    msa_channel: int = 64,
    pair_channel: int = 32,
    extra_msa_channel: int = 32,
    checkpoint_blocks: bool = False,
    attention_chunk_size: int | None = None,
) -> ml_collections.ConfigDict:
    """Make the configuration of a small trunk: embedders, extra-MSA stack and Evoformer.

    Args:
        num_blocks: Evoformer blocks.
        num_extra_blocks: blocks of the extra-MSA stack.
        num_residues: crop size.
        num_msa: cluster rows.
        num_extra_msa: extra rows.
        msa_channel: c_m.
        pair_channel: c_z.
        extra_msa_channel: c_e.
        checkpoint_blocks: recompute each block in the backward pass.
        attention_chunk_size: rows per chunk, or None.

    Returns:
        A tree like that of `model_config`.
    """
    config = model_config("initial_training", "model_3")
    config.name = "trunk"
    network = config.model.embeddings_and_evoformer
    for direction in ("outgoing", "incoming"):
        name = f"triangle_multiplication_{direction}"
        network.evoformer[name].num_intermediate_channel = pair_channel
    network.update(
        {
            "evoformer_num_block": num_blocks,
            "extra_msa_stack_num_block": num_extra_blocks,
            "msa_channel": msa_channel,
            "pair_channel": pair_channel,
            "extra_msa_channel": extra_msa_channel,
            "recycle_features": False,
            "recycle_pos": False,
        }
    )
    config.model.num_recycle = 0
    config.model.global_config.update(
        {"checkpoint_blocks": checkpoint_blocks, "attention_chunk_size": attention_chunk_size}
    )
    config.train.update({"warmup_steps": 50})
    config.data.update(
        {"crop_size": num_residues, "max_msa_clusters": num_msa, "max_extra_msa": num_extra_msa}
    )
    return config
