"""Output heads: small networks on the final representations (sections 1.9.3 to 1.9.10).

Each maps the dictionary of representations to logits; the losses are in `models.alphafold.losses`.
The trap: the distogram is made symmetric by adding the transposed logits, so the layer holds half.
"""

from __future__ import annotations

from collections.abc import Mapping

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.network.layers import LayerNorm, Linear, final_linear
from models.alphafold.network.settings import Settings
from models.alphafold.structure.residue_constants import NUM_ATOM37

Representations = Mapping[str, jax.Array]
Prediction = dict[str, jax.Array]


class _Head(hk.Module):
    """A head that holds its configuration and the shared settings."""

    def __init__(self, config: ml_collections.ConfigDict, settings: Settings, name: str) -> None:
        super().__init__(name=name)
        self.config = config
        self.settings = settings


class MaskedMsaHead(_Head):
    """Logits [rows, residues, 23] of the residue types that were masked in the MSA."""

    def __call__(self, representations: Representations) -> Prediction:
        """Return `logits`."""
        return {
            "logits": final_linear(self.config.num_output, self.settings.zero_init, "logits")(
                representations["msa"]
            )
        }


class DistogramHead(_Head):
    """Logits [residues, residues, bins] of pseudo-beta distances, and the bins' edges."""

    def __call__(self, representations: Representations) -> Prediction:
        """Return `logits` and `bin_edges` [bins - 1] in Angstrom."""
        half = final_linear(self.config.num_bins, self.settings.zero_init, "half_logits")(
            representations["pair"]
        )
        edges = jnp.linspace(
            self.config.first_break, self.config.last_break, self.config.num_bins - 1
        )
        return {"logits": half + jnp.swapaxes(half, 0, 1), "bin_edges": edges}


class PredictedLddtHead(_Head):
    """Logits [residues, bins] of each residue's lDDT-C-alpha (Algorithm 29)."""

    def __call__(self, representations: Representations) -> Prediction:
        """Return `logits`."""
        act = LayerNorm("input_layer_norm")(representations["structure_module"])
        for layer in range(2):
            linear = Linear(self.config.num_channels, "relu", name=f"act_{layer}")
            act = jax.nn.relu(linear(act))
        return {
            "logits": final_linear(self.config.num_bins, self.settings.zero_init, "logits")(act)
        }


class PredictedAlignedErrorHead(_Head):
    """Logits [residues, residues, bins] of errors after aligning on each residue, and the edges."""

    def __call__(self, representations: Representations) -> Prediction:
        """Return `logits` and `breaks` [bins - 1] in Angstrom."""
        logits = final_linear(self.config.num_bins, self.settings.zero_init, "logits")(
            representations["pair"]
        )
        breaks = jnp.linspace(0.0, self.config.max_error_bin, self.config.num_bins - 1)
        return {"logits": logits, "breaks": breaks}


class ExperimentallyResolvedHead(_Head):
    """Logits [residues, 37] of whether each atom is resolved in the experiment."""

    def __call__(self, representations: Representations) -> Prediction:
        """Return `logits`."""
        return {
            "logits": final_linear(NUM_ATOM37, self.settings.zero_init, "logits")(
                representations["single"]
            )
        }
