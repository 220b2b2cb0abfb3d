"""The loss as a sum of the field's terms, robust against a term that is not finite.

Terms go by the names that users of the field know from their logs: `distogram`, `masked_msa`,
`fape`, `supervised_chi`, `plddt_loss`, `experimentally_resolved`, `violation`, `tm`. The trap:
replacing a NaN by zero does not replace its gradient. Zero times an infinite derivative is NaN
again, so what a term shares with others must reach it through
`models.alphafold.losses.cotangents.zero_nonfinite_cotangents` (the model does that), and whoever
uses `zero_unusable` must clean the gradient of what it does not share too (`finite_gradient`).

References:
    J. Jumper et al. 2021, supplement, section 1.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import optax

Terms = dict[str, jax.Array]

_HEADS = {
    "distogram": "distogram",
    "masked_msa": "masked_msa",
    "plddt_loss": "predicted_lddt",
    "experimentally_resolved": "experimentally_resolved",
    "tm": "predicted_aligned_error",
}


def loss_terms(
    out: Mapping[str, Any], heads: ml_collections.ConfigDict
) -> tuple[Terms, dict[str, float]]:
    """Take the terms and their weights from what the model returned.

    The sum of weight times term is the model's own `total_loss`. A term of weight 0 is there to be
    reported; it has no gradient, so nothing is spent on its backward pass.

    Args:
        out: of the model with losses.
        heads: the `model.heads` tree.

    Returns:
        Unweighted terms (float32 scalars), and the weight of each.
    """
    terms: Terms = {}
    weights: dict[str, float] = {}
    for name, head in _HEADS.items():
        if head in out:
            terms[name] = out[head]["loss"]
            weights[name] = heads[head].weight
    structure, c = out["structure_module"], heads.structure_module
    fraction = c.sidechain.weight_frac
    terms["fape"] = (1.0 - fraction) * structure["backbone_fape"] + fraction * structure[
        "sidechain_fape"
    ]
    terms["supervised_chi"] = (
        c.chi_weight * structure["chi_loss"] + c.angle_norm_weight * structure["angle_norm_loss"]
    )
    weights["fape"] = weights["supervised_chi"] = c.weight
    if "violation_loss" in structure:
        terms["violation"] = structure["violation_loss"]
        weights["violation"] = c.weight * c.structural_violation_loss_weight
    terms = {
        name: term if weights[name] else jax.lax.stop_gradient(term) for name, term in terms.items()
    }
    return terms, weights


def zero_unusable(terms: Mapping[str, jax.Array]) -> tuple[Terms, Terms]:
    """Replace terms that are not finite by zero.

    Args:
        terms: scalars by name.

    Returns:
        The terms, and for each 1.0 where it was replaced, else 0.0.
    """
    finite = {name: jnp.isfinite(term) for name, term in terms.items()}
    usable = {name: jnp.where(finite[name], term, 0.0) for name, term in terms.items()}
    return usable, {name: (~fine).astype(jnp.float32) for name, fine in finite.items()}


def total_loss(terms: Mapping[str, jax.Array], weights: Mapping[str, float]) -> jax.Array:
    """Add the terms by their weights; one of weight 0 does not count, whatever it is."""
    weighted = [weights[name] * term for name, term in terms.items() if weights[name]]
    return jnp.sum(jnp.stack([jnp.zeros(()), *weighted]))


def finite_gradient(gradient: optax.Params) -> optax.Params:
    """Replace elements of a gradient that are not finite by zero."""
    return jax.tree.map(lambda leaf: jnp.where(jnp.isfinite(leaf), leaf, 0.0), gradient)
