"""Checks every part of the model against a directory of stored numbers.

    python -m models.alphafold.reference DIR

Each case of the directory is an `.npz` (`param/`, `in/`, `out/`, `grad/` arrays) with a `.json`
that holds sizes and options; nothing about them is assumed here. A case passes if every stored
output and gradient is met within `TOLERANCE` of the array's largest magnitude; one that no check is
known for, or whose other file is missing, is a miss. The traps, stated in
the cases' notes: some gradients are analytically zero and hold rounding noise; a masked residue's
own structure outputs are noise; fully masked pairs hold values a thousand times larger than the
others, so masked and unmasked pairs are compared apart. One trap is not in the notes: in the whole
model, the aligned error of a residue against itself lies on a bin edge, see
`_self_error_candidates`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from models.alphafold.compiling import RUN_ONCE
from models.alphafold.data.labels import make_labels
from models.alphafold.losses import (
    chi,
    distogram,
    fape,
    masked_msa,
    pae,
    plddt,
    resolved,
    violations,
)
from models.alphafold.losses.masking import resolution_in_range
from models.alphafold.network.embeddings_and_evoformer import EmbeddingsAndEvoformer
from models.alphafold.network.evoformer import EvoformerIteration
from models.alphafold.network.model import AlphaFold
from models.alphafold.network.msa import (
    MSAColumnAttention,
    MSAColumnGlobalAttention,
    MSARowAttentionWithPairBias,
    OuterProductMean,
    Transition,
)
from models.alphafold.network.settings import Settings
from models.alphafold.network.triangle import TriangleAttention, TriangleMultiplication
from models.alphafold.structure import all_atom, quaternion, rigid
from models.alphafold.structure import residue_constants as rc
from models.alphafold.structure.ipa import InvariantPointAttention
from models.alphafold.structure.structure_module import (
    FoldIteration,
    StructureModule,
    normalize_angles,
)
from models.alphafold.structure.torsions import torsion_angles

TOLERANCE = 1e-4

Arrays = dict[str, Any]

# A constant added to all logits of a row changes nothing, so these have no gradient.
_ZERO_GRADIENTS = (
    "msa_row_attention_with_pair_bias/feat_2d_norm/offset",
    "invariant_point_attention/attention_2d/bias",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A stored case.

    Attributes:
        name: file name without suffix.
        info: the JSON file.
        arrays: the arrays of the `.npz` file by name.
        params: Haiku parameters.
        overrides: settings that replace those of the case, such as a chunk size.
    """

    name: str
    info: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    params: Mapping[str, Mapping[str, np.ndarray]]
    overrides: Mapping[str, Any]

    @property
    def config(self) -> ml_collections.ConfigDict:
        """Options of the part under test."""
        return ml_collections.ConfigDict(self.info.get("config", {}))

    @property
    def settings(self) -> Settings:
        """Options shared by all parts."""
        values = {**self.info.get("global_config", {}), **self.overrides}
        return Settings.from_config({**values, "is_training": self.info.get("is_training", True)})

    @property
    def inputs(self) -> Arrays:
        """Arrays given to the part under test."""
        names = self.under("in/")
        return {k: jnp.asarray(v) for k, v in names.items() if not k.startswith("cotangent")}

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        """Return the arrays whose names start with `prefix`, without it."""
        return {k[len(prefix) :]: v for k, v in self.arrays.items() if k.startswith(prefix)}


@dataclasses.dataclass(frozen=True)
class Result:
    """How a case went.

    Attributes:
        name: of the case.
        worst: the array with the largest error.
        error: its largest error, relative to its largest magnitude.
        compared: number of arrays compared.
        missing: stored arrays that were not computed.
    """

    name: str
    worst: str
    error: float
    compared: int
    missing: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every stored array is met."""
        return self.error <= TOLERANCE and not self.missing and self.compared > 0


def _read_params(arrays: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    params: dict[str, dict[str, np.ndarray]] = {}
    for key, value in arrays.items():
        if key.startswith("param/"):
            path, name = key.removeprefix("param/").rsplit("/", 1)
            params.setdefault(path, {})[name] = value
    return params


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as archive:
        return {key: archive[key] for key in archive.files}


def load_case(path: Path, overrides: Mapping[str, Any] | None = None) -> Case:
    """Read a case.

    Args:
        path: its `.json` file.
        overrides: settings that replace those of the case.

    Returns:
        The case, with parameters from another case's file where the JSON says so.

    Raises:
        FileNotFoundError: if the `.json` or an `.npz` file is missing.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path.with_suffix('.npz').name} has arrays to compare but no {path.name} beside it."
        )
    info = json.loads(path.read_text())
    arrays = _read_arrays(path.with_suffix(".npz"))
    params = _read_params(arrays)
    elsewhere = re.search(r"(\S+\.npz)", str(info.get("parameters", "")))
    if not params and elsewhere:
        params = _read_params(_read_arrays(path.parent / elsewhere.group(1)))
    return Case(path.stem, info, arrays, params, dict(overrides or {}))


def _relative(actual: np.ndarray, expected: np.ndarray, scale: float | None = None) -> float:
    """Return the largest difference over the largest expected magnitude."""
    if actual.shape != expected.shape:
        return float("inf")
    if expected.size == 0:
        return 0.0
    difference = np.max(np.abs(actual.astype(np.float64) - expected.astype(np.float64)))
    magnitude = np.max(np.abs(expected)) if scale is None else scale
    if not np.isfinite(difference):
        return float("inf")
    return float(difference / magnitude) if magnitude > 0 else float(difference)


def _compare_output(
    name: str, actual: np.ndarray, expected: np.ndarray, keep: Mapping[str, np.ndarray]
) -> float:
    """Compare an output, places that `keep` marks 0 apart from the others or not at all."""
    if name not in keep or actual.shape != expected.shape:
        return _relative(actual, expected)
    kept = np.broadcast_to(keep[name] > 0, expected.shape)
    return _relative(actual[kept], expected[kept])


def _worst(
    case: Case,
    outputs: Mapping[str, Any],
    gradients: Mapping[str, Any],
    *,
    keep: Mapping[str, np.ndarray] | None = None,
    apart: Mapping[str, np.ndarray] | None = None,
    scales: Mapping[str, float] | None = None,
) -> Result:
    """Compare everything that a case stores.

    Args:
        case: the case.
        outputs: computed `out/` arrays.
        gradients: computed `grad/` arrays.
        keep: for outputs with meaningless places: 1 where they are to be compared.
        apart: for outputs with two kinds of places: those marked 0 are compared as well, but with
            their own magnitude.
        scales: magnitudes of outputs that are cancelling sums.
    """
    keep, apart, scales = dict(keep or {}), dict(apart or {}), dict(scales or {})
    errors: dict[str, float] = {}
    missing = []
    for name, expected in case.under("out/").items():
        if name not in outputs:
            missing.append(f"out/{name}")
            continue
        actual = np.asarray(outputs[name])
        if name in scales:
            errors[f"out/{name}"] = _relative(actual, expected, max(scales[name], 1e-30))
            continue
        error = _compare_output(name, actual, expected, {**keep, **apart})
        if name in apart:
            error = max(error, _compare_output(name, actual, expected, {name: 1 - apart[name]}))
        errors[f"out/{name}"] = error

    stored = case.under("grad/")
    noise_floor = max((float(np.max(np.abs(v))) for v in stored.values() if v.size), default=0.0)
    listed = case.info.get("float32_rounding", {}).get("analytically_zero_gradients", [])
    for name, expected in stored.items():
        if name not in gradients:
            missing.append(f"grad/{name}")
            continue
        zero = f"grad/{name}" in listed or name.endswith(_ZERO_GRADIENTS)
        scale = noise_floor if zero and noise_floor > 0 else None
        errors[f"grad/{name}"] = _relative(np.asarray(gradients[name]), expected, scale)

    worst = max(errors, key=errors.__getitem__, default="nothing")
    return Result(case.name, worst, errors.get(worst, 0.0), len(errors), tuple(missing))


def _flat_params(tree: Mapping[str, Mapping[str, Any]], prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}{path}/{name}": value
        for path, values in tree.items()
        for name, value in values.items()
    }


def _compile(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Compile quickly, with full float32 products."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(fun).lower(*args).compile(compiler_options=RUN_ONCE)


def _starting(kinds: Mapping[str, Any], name: str) -> Any:
    """Return the entry whose key is the start of a case's name."""
    for prefix, entry in kinds.items():
        if name.startswith(prefix):
            return entry
    raise ValueError(f"No check is known for {name!r}; known names start with {sorted(kinds)}.")


def _run(fun: Callable[..., Any], *args: Any) -> Any:
    """Compile and run."""
    return jax.tree.map(np.asarray, _compile(fun, *args)(*args))


def _check_module(
    case: Case, build: Callable[[Arrays], Mapping[str, jax.Array]], **comparison: Any
) -> Result:
    """Run a Haiku function on a case; compare outputs and gradients of the cotangent product.

    Args:
        case: the case.
        build: Haiku function from inputs to named outputs.
        **comparison: see `_worst`.
    """
    network = hk.transform(build)
    inputs = case.inputs
    differentiable = {name: inputs[name] for name in case.under("grad/in/")}
    constants = {name: value for name, value in inputs.items() if name not in differentiable}
    cotangents = {
        name.removeprefix("cotangent").removeprefix("_") or "out": value
        for name, value in case.under("in/").items()
        if name.startswith("cotangent")
    }

    def loss(params: hk.Params, differentiable: Arrays) -> tuple[jax.Array, Any]:
        out = network.apply(params, None, {**constants, **differentiable})
        terms = [jnp.sum(out[name] * value) for name, value in cotangents.items()]
        return sum(terms[1:], terms[0]), out

    run = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (scalar, out), (param_grads, input_grads) = _run(run, case.params, differentiable)
    squares = sum(float(np.sum(np.square(out[name] * c))) for name, c in cotangents.items())
    scales = {"scalar_loss": max(abs(float(scalar)), squares**0.5)}
    gradients = _flat_params(param_grads, "param/")
    gradients |= {f"in/{name}": value for name, value in input_grads.items()}
    outputs = {**out, "scalar_loss": scalar}
    return _worst(case, outputs, gradients, scales=scales, **comparison)


def _check_loss(
    case: Case, fun: Callable[[Arrays], tuple[jax.Array, Mapping[str, jax.Array]]], **keep: Any
) -> Result:
    """Run a loss on a case; compare it, its parts and its gradients."""
    inputs = case.inputs
    differentiable = {name: inputs[name] for name in case.under("grad/in/")}
    constants = {name: value for name, value in inputs.items() if name not in differentiable}

    def loss(differentiable: Arrays) -> tuple[jax.Array, Any]:
        value, parts = fun({**constants, **differentiable})
        return value, {**parts, "loss": value}

    (_, outputs), gradients = _run(jax.value_and_grad(loss, has_aux=True), differentiable)
    return _worst(case, outputs, {f"in/{k}": v for k, v in gradients.items()}, **keep)


def _pair_mask(mask: np.ndarray) -> np.ndarray:
    """Pairs of residues that are present together in at least one row."""
    present = np.einsum("si,sj->ij", mask, mask) > 0
    return present[..., None].astype(np.float32)


def _check_evoformer_part(case: Case) -> Result:
    config, settings = case.config, case.settings
    name = next(iter(case.params)).split("/")[0]
    if "is_extra_msa" in case.info:
        return _check_block(case, name)
    modules: dict[str, Callable[[Arrays], jax.Array]] = {
        "msa_row_attention_with_pair_bias": lambda x: MSARowAttentionWithPairBias(
            config, settings, name
        )(x["msa_act"], x["msa_mask"], x["pair_act"]),
        "msa_column_attention": lambda x: MSAColumnAttention(config, settings, name)(
            x["msa_act"], x["msa_mask"]
        ),
        "msa_column_global_attention": lambda x: MSAColumnGlobalAttention(config, settings, name)(
            x["msa_act"], x["msa_mask"]
        ),
        "msa_transition": lambda x: Transition(config, settings, name)(x["act"], x["mask"]),
        "pair_transition": lambda x: Transition(config, settings, name)(x["act"], x["mask"]),
        "outer_product_mean": lambda x: OuterProductMean(
            config, settings, case.arrays["out/out"].shape[-1], name
        )(x["act"], x["mask"]),
    }
    for node in ("starting", "ending"):
        modules[f"triangle_attention_{node}_node"] = lambda x: TriangleAttention(
            config, settings, name
        )(x["pair_act"], x["pair_mask"])
    for direction in ("outgoing", "incoming"):
        modules[f"triangle_multiplication_{direction}"] = lambda x: TriangleMultiplication(
            config, settings, name
        )(x["pair_act"], x["pair_mask"])
    module = _starting(modules, name)
    apart = {}
    if name == "outer_product_mean":
        apart["out"] = _pair_mask(case.arrays["in/mask"])
    return _check_module(case, lambda x: {"out": module(x)}, apart=apart)


def _check_block(case: Case, name: str) -> Result:
    def build(x: Arrays) -> Mapping[str, jax.Array]:
        block = EvoformerIteration(case.config, case.settings, case.info["is_extra_msa"], name)
        return block(
            {"msa": x["msa_act"], "pair": x["pair_act"]},
            {"msa": x["msa_mask"], "pair": x["pair_mask"]},
        )

    return _check_module(case, build, apart={"pair": _pair_mask(case.arrays["in/msa_mask"])})


def _check_trunk(case: Case) -> Result:
    name = next(iter(case.params)).split("/")[0]

    def build(x: Arrays) -> Mapping[str, jax.Array]:
        out = EmbeddingsAndEvoformer(case.config, case.settings, name)(x)
        outputs = {k: v for k, v in out.items() if k != "evoformer_blocks_run"}
        if case.config.template.enabled and case.config.template.embed_torsion_angles:
            torsions = torsion_angles(
                x["template_aatype"],
                x["template_all_atom_positions"],
                x["template_all_atom_masks"],
                placeholder=not case.settings.zero_init,
            )
            outputs |= {
                "template_torsion_angles_sin_cos": torsions.sin_cos,
                "template_alt_torsion_angles_sin_cos": torsions.alternative_sin_cos,
                "template_torsion_angles_mask": torsions.mask,
            }
        return outputs

    seq_mask = case.arrays["in/seq_mask"]
    pairs = (seq_mask[:, None] * seq_mask[None, :])[..., None]
    keep = {}
    if "out/template_torsion_angles_mask" in case.arrays:
        # Undefined torsions are rounding noise of atoms at the origin.
        defined = case.arrays["out/template_torsion_angles_mask"][..., None]
        keep["template_torsion_angles_sin_cos"] = defined
        keep["template_alt_torsion_angles_sin_cos"] = defined
    return _check_module(case, build, keep=keep, apart={"pair": pairs})


def _check_structure_part(case: Case) -> Result:
    config, settings = case.config, case.settings
    name = next(iter(case.params)).split("/")[0]

    def attention(x: Arrays) -> Mapping[str, jax.Array]:
        frames = quaternion.from_tensor(x["affine"]).rigid
        module = InvariantPointAttention(config, settings, name)
        return {"out": module(x["inputs_1d"], x["inputs_2d"], x["mask"], frames)}

    def iteration(x: Arrays) -> Mapping[str, jax.Array]:
        act, affine, sidechain = FoldIteration(config, settings, name)(
            x["act"],
            quaternion.from_tensor(x["affine"]),
            x["initial_act"],
            x["pair"],
            x["seq_mask"],
            x["aatype"],
        )
        frames = sidechain.pop("frames")
        return {**sidechain, "act": act, "affine": affine.to_tensor(), "frames_flat12": frames}

    def module(x: Arrays) -> Mapping[str, jax.Array]:
        out = StructureModule(config, settings, name)(x, x)
        return {
            **out,
            "atom14_pos_all_layers": out["atom14_pos"],
            "frames_flat12_all_layers": out["frames"],
        }

    builds = {
        "invariant_point_attention": attention,
        "fold_iteration": iteration,
        "structure_module": module,
    }
    mask_name = "in/mask" if name == "invariant_point_attention" else "in/seq_mask"
    layered = _LAYERED if name == "structure_module" else frozenset()
    keep = {
        output: _along_residues(case.arrays[mask_name], value.ndim, int(output in layered))
        for output, value in case.under("out/").items()
        if value.ndim > 0
    }
    return _check_module(case, _starting(builds, name), keep=keep)


# Outputs of the structure module with a layer axis before the residue axis.
_LAYERED = frozenset(
    {
        "traj",
        "angles_sin_cos",
        "unnormalized_angles_sin_cos",
        "atom14_pos_all_layers",
        "frames_flat12_all_layers",
    }
)


def _along_residues(mask: np.ndarray, ndim: int, axis: int) -> np.ndarray:
    """Return a residue mask in the shape of an output whose residue axis is `axis`."""
    shape = [1] * ndim
    shape[axis] = mask.size
    return mask.reshape(shape)


def _backbone_fape(x: Arrays, config: ml_collections.ConfigDict) -> tuple[jax.Array, Arrays]:
    loss, last_layer = fape.backbone_fape(x["traj"], x, config)
    return loss, {"fape_last_layer": last_layer}


def _sidechain_fape(x: Arrays, config: ml_collections.ConfigDict) -> tuple[jax.Array, Arrays]:
    backbone = quaternion.from_tensor(x["traj"][-1]).rigid
    angles = normalize_angles(x["unnormalized_angles_sin_cos"][-1])
    frames = all_atom.torsions_to_frames(x["aatype"], backbone, angles)
    atom14 = all_atom.frames_to_atom14(x["aatype"], frames)
    renamed = fape.rename_ground_truth(atom14, x)
    loss = fape.sidechain_fape(frames, atom14, renamed, x, config)
    return loss, {
        "pred_atom14_last_layer": atom14,
        "pred_frames_flat12_last_layer": rigid.to_flat12(frames),
        "alt_naming_is_better": renamed.alt_naming_is_better,
        "renamed_atom14_gt_positions": renamed.positions,
        "renamed_atom14_gt_exists": renamed.exists,
    }


def _violation_parts(found: violations.Violations) -> Arrays:
    """Name the parts of the violations like the stored arrays."""
    bonds, clashes, within = found.bonds, found.clashes, found.within
    between = {
        "bonds_c_n_loss_mean": bonds.c_n_loss_mean,
        "angles_ca_c_n_loss_mean": bonds.ca_c_n_loss_mean,
        "angles_c_n_ca_loss_mean": bonds.c_n_ca_loss_mean,
        "connections_per_residue_loss_sum": bonds.per_residue_loss_sum,
        "connections_per_residue_violation_mask": bonds.per_residue_violation_mask,
        "clashes_mean_loss": clashes.mean_loss,
        "clashes_per_atom_loss_sum": clashes.per_atom_loss_sum,
        "clashes_per_atom_clash_mask": clashes.per_atom_clash_mask,
    }
    return {
        **{f"between_residues/{name}": value for name, value in between.items()},
        **{f"within_residues/{name}": value for name, value in within._asdict().items()},
        "total_per_residue_violations_mask": found.total_per_residue_mask,
    }


def _violations(x: Arrays, config: ml_collections.ConfigDict) -> tuple[jax.Array, Arrays]:
    positions = x["atom14_pred_positions"]
    found = violations.find_violations(positions, x, config)
    metrics = violations.violation_metrics(found, positions, x)
    # Weighted like the chi loss, as both are added up inside the structure module's loss.
    weight = config.get("structural_violation_loss_weight", 1.0)
    loss = weight * violations.violation_loss(found, x["atom14_atom_exists"])
    return loss, {
        **_violation_parts(found),
        **{f"metrics/{name}": value for name, value in metrics.items()},
    }


def _supervised_chi(x: Arrays, config: ml_collections.ConfigDict) -> tuple[jax.Array, Arrays]:
    parts = chi.supervised_chi_loss(x["unnormalized_angles_sin_cos"], x)
    loss = config.chi_weight * parts.chi_loss + config.angle_norm_weight * parts.angle_norm_loss
    return loss, parts._asdict()


def _distogram(x: Arrays, config: ml_collections.ConfigDict) -> tuple[jax.Array, Arrays]:
    edges = jnp.linspace(config.first_break, config.last_break, config.num_bins - 1)
    loss, distance = distogram.distogram_loss(
        x["logits"], edges, x["pseudo_beta"], x["pseudo_beta_mask"]
    )
    return loss, {"true_dist": distance}


def _masked_msa(x: Arrays, config: ml_collections.ConfigDict) -> tuple[jax.Array, Arrays]:
    return masked_msa.masked_msa_loss(x["logits"], x["true_msa"], x["bert_mask"]), {}


def _resolved(x: Arrays, config: ml_collections.ConfigDict) -> tuple[jax.Array, Arrays]:
    return resolved.experimentally_resolved_loss(x["logits"], x, config), {}


def _aligned_error(x: Arrays, config: ml_collections.ConfigDict) -> tuple[jax.Array, Arrays]:
    breaks = jnp.linspace(0.0, config.max_error_bin, config.num_bins - 1)
    loss = pae.predicted_aligned_error_loss(x["logits"], breaks, x["pred_affine"], x, config)
    return loss, {}


def _predicted_lddt(x: Arrays, config: ml_collections.ConfigDict) -> tuple[jax.Array, Arrays]:
    loss, per_residue = plddt.predicted_lddt_loss(x["logits"], x["pred_atom37"], x, config)
    ca = rc.ATOM_ORDER["CA"]
    overall = plddt.lddt(
        x["pred_atom37"][:, ca], x["all_atom_positions"][:, ca], x["all_atom_mask"][:, ca]
    )
    return loss, {"lddt_ca_per_residue": per_residue, "lddt_ca": overall}


_LOSSES = {
    "loss_backbone_fape": _backbone_fape,
    "loss_sidechain_fape": _sidechain_fape,
    "loss_structural_violations": _violations,
    "loss_supervised_chi": _supervised_chi,
    "loss_distogram": _distogram,
    "loss_masked_msa": _masked_msa,
    "loss_experimentally_resolved": _resolved,
    "loss_predicted_aligned_error": _aligned_error,
    "loss_predicted_lddt": _predicted_lddt,
}


def _check_loss_case(case: Case) -> Result:
    loss = _starting(_LOSSES, case.name)
    return _check_loss(case, lambda x: loss(x, case.config))


def _check_all_residue_types(case: Case) -> Result:
    """Atoms from torsions, and the gradient of their product with the cotangent."""
    aatype = jnp.asarray(case.arrays["in/aatype"])
    cotangent = case.arrays["in/cotangent_atom14"]

    def fun(affine: jax.Array, sin_cos: jax.Array) -> tuple[jax.Array, Arrays]:
        backbone = quaternion.from_tensor(affine).rigid
        frames = all_atom.torsions_to_frames(aatype, backbone, sin_cos)
        atom14 = all_atom.frames_to_atom14(aatype, frames)
        features = all_atom.atom_features(aatype)
        atom37 = all_atom.atom14_to_atom37(
            atom14, features["residx_atom37_to_atom14"], features["atom37_atom_exists"]
        )
        back = all_atom.atom37_to_atom14(
            atom37, features["residx_atom14_to_atom37"], features["atom14_atom_exists"]
        )
        outputs = {
            **features,
            "frames_flat12": rigid.to_flat12(frames),
            "atom14_pos": atom14,
            "atom37_pos": atom37,
            "atom14_back_from_atom37": back,
        }
        return jnp.sum(atom14 * cotangent), outputs

    names = ("backbone_affine", "torsion_angles_sin_cos")
    inputs = [jnp.asarray(case.arrays[f"in/{name}"]) for name in names]
    (_, outputs), gradients = _run(jax.value_and_grad(fun, argnums=(0, 1), has_aux=True), *inputs)
    named = {f"in/{name}": value for name, value in zip(names, gradients, strict=True)}
    return _worst(case, outputs, named)


def _check_constants(case: Case) -> Result:
    lower, upper, deviation = rc.atom14_distance_bounds()
    outputs = {
        "restype_rigid_group_default_frame": rc.GROUP_DEFAULT_FRAME,
        "restype_atom14_to_rigid_group": rc.ATOM14_TO_GROUP,
        "restype_atom14_rigid_group_positions": rc.ATOM14_POSITIONS,
        "restype_atom14_mask": rc.ATOM14_MASK,
        "restype_atom37_mask": rc.ATOM37_MASK,
        "chi_pi_periodic": rc.CHI_PI_PERIODIC,
        "chi_angles_mask": rc.CHI_MASK[: rc.NUM_RESTYPES],
        "chi_atom37_indices": rc.CHI_ATOM37_INDICES,
        "renaming_matrices": rc.RENAMING_MATRICES,
        "atom14_is_ambiguous": rc.ATOM14_IS_AMBIGUOUS,
        "atom14_dists_lower_bound": lower,
        "atom14_dists_upper_bound": upper,
        "atom14_dists_stddev": deviation,
        "msa_hhblits_to_restype": rc.MSA_HHBLITS_TO_RESTYPE,
    }
    # "No upper bound" is 1e10, next to which every real bound would look right.
    bound = {"atom14_dists_upper_bound": case.arrays["out/atom14_dists_upper_bound"] < 1e9}
    return _worst(case, outputs, {}, apart={k: v.astype(np.float32) for k, v in bound.items()})


# Which mask says where a ground-truth feature means something, and the number of axes it lacks.
_TRUTH_MASKS = {
    "atom14_gt_positions": ("atom14_gt_exists", 1),
    "atom14_alt_gt_positions": ("atom14_alt_gt_exists", 1),
    "rigidgroups_gt_frames": ("rigidgroups_gt_exists", 1),
    "rigidgroups_alt_gt_frames": ("rigidgroups_gt_exists", 1),
    "backbone_rotation_from_reference": ("backbone_affine_mask", 2),
    "backbone_affine_tensor": ("backbone_affine_mask", 1),
    "torsion_angles_sin_cos": ("torsion_angles_mask", 2 - 1),
    "alt_torsion_angles_sin_cos": ("torsion_angles_mask", 2 - 1),
    "pseudo_beta": ("pseudo_beta_mask", 1),
}


def _check_real_structure(case: Case) -> Result:
    """Targets made from a solved structure; quaternions are compared up to their sign."""
    names = ("aatype", "all_atom_positions", "all_atom_mask")
    outputs = dict(make_labels(*(case.arrays[f"in/{name}"] for name in names)))
    affine = np.array(outputs["backbone_affine_tensor"])
    rotation = quaternion.to_rotation(jnp.asarray(affine[:, :4]))
    outputs["backbone_rotation_from_reference"] = np.asarray(rotation)
    stored = case.arrays["out/backbone_affine_tensor"]
    sign = np.sign(np.sum(affine[:, :4] * stored[:, :4], axis=1, keepdims=True))
    affine[:, :4] *= np.where(sign == 0, 1, sign)
    outputs["backbone_affine_tensor"] = affine
    keep = {
        name: case.arrays[f"out/{mask}"][(...,) + (None,) * axes]
        for name, (mask, axes) in _TRUTH_MASKS.items()
    }
    return _worst(case, outputs, {}, keep=keep)


def _check_geometry(case: Case) -> Result:
    checks = {
        "geom_all_residue_types": _check_all_residue_types,
        "geom_constants": _check_constants,
        "geom_real_structure": _check_real_structure,
    }
    return _starting(checks, case.name)(case)


def _nested(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dictionaries to names with slashes."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, violations.Violations):
            value = _violation_parts(value)
        if isinstance(value, Mapping):
            flat |= _nested(value, f"{prefix}{name}/")
        else:
            flat[prefix + name] = value
    return flat


def _stored_rows(names: Iterable[str], outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Cut the outputs of which only some rows are stored."""
    cut = {}
    for name in names:
        match = re.fullmatch(r"(.*)_rows_(\d+)_to_(\d+)", name)
        if match and match.group(1) in outputs:
            cut[name] = outputs[match.group(1)][int(match.group(2)) : int(match.group(3)) + 1]
    return cut


def _check_whole_model(case: Case) -> Result:
    """Run the model; the best of the candidates of `_self_error_candidates` counts."""
    name = next(iter(case.params)).split("/")[0]
    config = case.config
    config.global_config.update(case.overrides)
    slices = case.arrays["in/aatype"].shape[0]
    passes = config.num_recycle + 1 if config.resample_msa_in_recycling else 1
    # More slices than iterations can only be samples to average over.
    config.ensemble_representations = slices > passes
    training = case.info.get("is_training", True)
    network = hk.transform(
        lambda batch: AlphaFold(config, name)(batch, is_training=training, compute_loss=True)
    )
    wanted = set(case.under("out/"))
    whole = {re.sub(r"_rows_\d+_to_\d+$", "", stored) for stored in wanted}

    def loss(
        params: hk.Params, batch: Arrays, nonzero_self_error: jax.Array
    ) -> tuple[jax.Array, tuple[Arrays, jax.Array]]:
        out = network.apply(params, None, batch)
        total, changes = out["total_loss"], jnp.zeros_like(nonzero_self_error)
        head = out.get("predicted_aligned_error")
        if head is not None:
            changes = _self_error_changes(head["logits"], batch, config)
            change = jnp.sum(changes * nonzero_self_error)
            head["loss"] = head["loss"] + change
            total = total + config.heads.predicted_aligned_error.weight * change
        flat = {k: v for k, v in _nested(out).items() if k in wanted or k in whole}
        return total, ({**flat, "total_loss": total}, changes)

    mask = case.arrays["in/seq_mask"][-1]
    everywhere = np.ones(mask.shape, np.float32)
    run = _compile(jax.value_and_grad(loss, has_aux=True), case.params, case.inputs, everywhere)
    (_, (outputs, changes)), _ = run(case.params, case.inputs, everywhere)
    results = []
    for nonzero in _self_error_candidates(case, outputs, np.asarray(changes)):
        (_, (outputs, _)), grads = run(case.params, case.inputs, nonzero)
        results.append(_compare_whole_model(case, dict(outputs), grads))
    return min(results, key=lambda result: result.error)


def _self_error_changes(
    logits: jax.Array, batch: Arrays, config: ml_collections.ConfigDict
) -> jax.Array:
    """How much the aligned-error loss changes if a residue's self error is in bin 1, not 0."""
    diagonal = jnp.diagonal(logits, axis1=0, axis2=1).T
    mask = batch["backbone_affine_mask"][-1]
    change = masked_msa.softmax_cross_entropy(diagonal, jnp.ones(mask.shape, jnp.int32))
    change = change - masked_msa.softmax_cross_entropy(diagonal, jnp.zeros(mask.shape, jnp.int32))
    head = config.heads.predicted_aligned_error
    if head.filter_by_resolution:
        mask = mask * resolution_in_range(
            batch["resolution"][-1], head.min_resolution, head.max_resolution
        )
    return change * mask / (1e-8 + jnp.sum(batch["backbone_affine_mask"][-1]) ** 2)


def _self_error_candidates(
    case: Case, outputs: Mapping[str, Any], changes: np.ndarray
) -> list[np.ndarray]:
    """Guess which residues' aligned error against themselves the stored run rounded to nonzero.

    That error is zero, and zero is an edge of the bins. The stored run multiplied the unit of
    length into one of two equal points before it subtracted them, which leaves rounding noise for
    nearly every residue. The stored loss tells how many were exactly zero; which, the gradients.

    Returns:
        Candidates, 1 where the error is in bin 1, the likeliest first.
    """
    name = "predicted_aligned_error/loss"
    stored = case.arrays.get(f"out/{name}")
    everywhere = np.ones(changes.shape, np.float32)
    if stored is None or name not in outputs:
        return [everywhere]
    excess = float(outputs[name]) - float(stored)
    present = np.flatnonzero(changes)
    subsets = [(), *((int(i),) for i in present), *itertools.combinations(present.tolist(), 2)]
    subsets.append(tuple(present.tolist()))
    misfit = [abs(excess - changes[list(subset)].sum()) for subset in subsets]
    candidates = []
    for index in np.argsort(misfit, kind="stable")[:8]:
        nonzero = everywhere.copy()
        nonzero[list(subsets[index])] = 0.0
        candidates.append(nonzero)
    return candidates


def _compare_whole_model(case: Case, outputs: Arrays, grads: hk.Params) -> Result:
    """Compare a run's outputs, gradients and gradient norms."""
    wanted = set(case.under("out/"))
    outputs |= _stored_rows(wanted, outputs)
    gradients = _flat_params(grads, "param/")
    norms = {k.removeprefix("param/"): np.linalg.norm(v) for k, v in gradients.items()}
    total = float(np.sqrt(sum(np.square(norm, dtype=np.float64) for norm in norms.values())))
    outputs["grad_global_norm"] = np.asarray(total)
    outputs |= {f"grad_norm/{k}": v for k, v in norms.items()}
    scales = {f"grad_norm/{k}": total for k in norms if k.endswith(_ZERO_GRADIENTS)}

    mask = case.arrays["in/seq_mask"][-1]
    keep = {
        stored: _along_residues(mask, case.arrays[f"out/{stored}"].ndim, axis)
        for stored, axis in _MASKED_RESIDUE_IS_NOISE.items()
        if stored in wanted
    }
    # This sum counts the bonds to masked neighbours too.
    bonds = "structure_module/violations/between_residues/connections_per_residue_loss_sum"
    keep[bonds] = mask * np.append(mask[1:], 1) * np.append(1, mask[:-1])
    pairs = {"representations/pair": (mask[:, None] * mask[None, :])[..., None]}
    return _worst(case, outputs, gradients, keep=keep, apart=pairs, scales=scales)


# Residue axis of the outputs in which a masked residue's own values are noise.
_MASKED_RESIDUE_IS_NOISE = {
    "representations/structure_module": 0,
    "predicted_lddt/logits": 0,
    "structure_module/traj": 1,
    "structure_module/angles_sin_cos": 1,
    "structure_module/unnormalized_angles_sin_cos": 1,
    "structure_module/final_atom14_positions": 0,
    "structure_module/final_atom_positions": 0,
    "structure_module/alt_naming_is_better": 0,
}

_CHECKS: dict[str, Callable[[Case], Result]] = {
    "geom_": _check_geometry,
    "evo_": _check_evoformer_part,
    "struct_": _check_structure_part,
    "loss_": _check_loss_case,
    "trunk_": _check_trunk,
    "whole_model": _check_whole_model,
}


def find_cases(directory: Path) -> list[Path]:
    """Return the JSON files of the cases in a directory, simple parts first, unknown ones last.

    A case is a JSON file that lists arrays, or an `.npz` file with an array to compare; the file
    of one that lacks its other half is named nevertheless.

    Args:
        directory: where they are.

    Raises:
        FileNotFoundError: if there are none.
    """

    def rank(path: Path) -> int:
        known = [path.name.startswith(prefix) for prefix in _CHECKS]
        return known.index(True) if True in known else len(known)

    def holds_case(path: Path) -> bool:
        try:
            if path.suffix == ".npz":
                with np.load(path, allow_pickle=False) as archive:
                    return any(key.startswith(("out/", "grad/")) for key in archive.files)
            info = json.loads(path.read_text())
        except (ValueError, OSError, EOFError, zipfile.BadZipFile):
            return True  # Whoever checks it will say what is wrong with it.
        listed = isinstance(info, dict) and (info.get("arrays") or info.get("file"))
        return bool(listed) or rank(path) < len(_CHECKS)

    files = (*directory.glob("*.json"), *directory.glob("*.npz"))
    ranked = {(rank(path), path.with_suffix(".json")) for path in files if holds_case(path)}
    if not ranked:
        raise FileNotFoundError(
            f"No reference cases in {directory}; expected files such as evo_block_msa.json."
        )
    return [path for _, path in sorted(ranked)]


def check_case(path: Path, overrides: Mapping[str, Any] | None = None) -> Result:
    """Check one case.

    Args:
        path: its `.json` file.
        overrides: settings that replace those of the case, to check that they change no number.

    Returns:
        The result.
    """
    case = load_case(path, overrides)
    return _starting(_CHECKS, case.name)(case)


def main(arguments: list[str] | None = None) -> int:
    """Check a directory and print a line per case.

    Args:
        arguments: command line; `sys.argv` by default.

    Returns:
        0 if every case passes, 1 otherwise.
    """
    parser = argparse.ArgumentParser(prog="python -m models.alphafold.reference")
    parser.add_argument("directory", type=Path, help="directory of .json and .npz files")
    parser.add_argument("--only", default="", help="check only cases whose name contains this")
    parser.add_argument("--chunk", type=int, help="rows per chunk of chunked work")
    options = parser.parse_args(arguments)
    overrides = {} if options.chunk is None else {"attention_chunk_size": options.chunk}
    paths = [path for path in find_cases(options.directory) if options.only in path.name]
    failures = 0
    for path in paths:
        try:
            result = check_case(path, overrides)
        except Exception as error:
            # A case that cannot be run is a miss; the others are still worth knowing.
            traceback.print_exc()
            result = Result(path.stem, f"{type(error).__name__}: {error}", float("inf"), 0, ())
        failures += not result.passed
        verdict = "PASS" if result.passed else "MISS"
        line = (
            f"{verdict} {result.name:<42} max relative error {result.error:.1e}"
            f" ({result.compared} arrays, worst {result.worst})"
        )
        if result.missing:
            line += f", not computed: {', '.join(result.missing[:5])}"
        print(line, flush=True)
    print(f"{len(paths) - failures} of {len(paths)} cases pass (tolerance {TOLERANCE:g})")
    return 1 if failures or not paths else 0


if __name__ == "__main__":
    sys.exit(main())
