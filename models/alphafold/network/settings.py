"""Settings that every module of the network shares, for all files of this package.

They say *how* the network runs (dropout, precision, chunking, checkpointing, dynamic depth); sizes
live in the `ml_collections` tree of each module. The trap: `is_training` alone does not switch
dropout on, `deterministic` overrules it, as in the field's configuration files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the network runs.

    Attributes:
        deterministic: no dropout at all.
        eval_dropout: dropout also outside training.
        is_training: set by the model when it is called.
        zero_init: the last linear layer of each residual update starts at zero.
        bfloat16: activations of the trunk in bfloat16; parameters, layer-norm statistics, softmax,
            structure module and losses stay in float32.
        attention_chunk_size: rows that attention, transition, outer product mean and triangle
            multiplication work on at a time; None computes everything at once.
        checkpoint_blocks: recompute each block in the backward pass (`jax.checkpoint`).
        checkpoint_chunks: recompute each chunk in the backward pass.
        skip_absent_templates: run the template stack only if a template is present (`lax.cond`).
        extra_msa_min_depth: run the extra-MSA stack only if the alignment has at least this many
            extra rows (`lax.cond`); 0 always runs it.
        halt_threshold: adaptive depth: Evoformer blocks are skipped once a block changes the pair
            representation by less than this fraction of its norm; 0 runs every block.
        halt_min_blocks: blocks that always run when `halt_threshold` is set.
        recycle_early_stop_tolerance: stop recycling once the root mean square change of the
            C-alpha distances falls below this many Angstrom; 0 never stops early.
    """

    deterministic: bool = False
    eval_dropout: bool = False
    is_training: bool = False
    zero_init: bool = True
    bfloat16: bool = False
    attention_chunk_size: int | None = None
    checkpoint_blocks: bool = False
    checkpoint_chunks: bool = False
    skip_absent_templates: bool = False
    extra_msa_min_depth: int = 0
    halt_threshold: float = 0.0
    halt_min_blocks: int = 1
    recycle_early_stop_tolerance: float = 0.0

    @classmethod
    def from_config(cls, global_config: Mapping[str, Any]) -> Settings:
        """Read the `global_config` part of a configuration.

        Args:
            global_config: the fields above; `subbatch_size` and `use_remat` are accepted as the
                field's other names of `attention_chunk_size` and `checkpoint_blocks`.

        Returns:
            The settings, defaults where the configuration is silent.

        Raises:
            ValueError: on `multimer_mode` and on names that mean nothing here.
        """
        values = dict(global_config)
        if values.pop("multimer_mode", False):
            raise ValueError(
                "global_config.multimer_mode is True, but this is the monomer model: "
                "set it to False."
            )
        subbatch_size = values.pop("subbatch_size", None)
        if values.get("attention_chunk_size") is None:
            values["attention_chunk_size"] = subbatch_size
        values["checkpoint_blocks"] = bool(
            values.get("checkpoint_blocks", False) or values.pop("use_remat", False)
        )
        values.pop("use_remat", None)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(
                f"global_config has unknown fields {unknown}; known fields are {sorted(known)}."
            )
        return cls(**values)

    @property
    def uses_dropout(self) -> bool:
        """Whether dropout layers are active."""
        return (self.is_training or self.eval_dropout) and not self.deterministic

    @property
    def activation_dtype(self) -> jnp.dtype:
        """Type of the trunk's activations."""
        return jnp.dtype(jnp.bfloat16 if self.bfloat16 else jnp.float32)

    def cast(self, x: jax.Array) -> jax.Array:
        """Return `x` in the trunk's activation type."""
        return x.astype(self.activation_dtype)
