"""A model that compiles in seconds, and made-up features for it.

Compiling dominates every test of the model, so parameters come from numpy, not from a compiled
initialiser, and the compiler is told not to try hard. One operation after the other is no way out:
each is then compiled by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from models.alphafold.compiling import RUN_ONCE
from models.alphafold.config import model_config
from models.alphafold.model import batch_spec, make_model
from models.alphafold.structure.all_atom import atom_features


def compile_quickly(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    return jax.jit(fun).lower(*args).compile(compiler_options=RUN_ONCE)


def random_params(shapes: Any, seed: int = 0) -> Any:
    """Normal weights of variance 1 / fan-in, ones for scales; biases are small."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        fan_in = np.prod(leaf.shape[:-1]) ** 0.5 if len(leaf.shape) > 1 else 10.0
        return jnp.asarray(rng.normal(size=leaf.shape) / max(fan_in, 1.0), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def random_batch(spec: Mapping[str, jax.ShapeDtypeStruct], seed: int = 0) -> dict[str, jax.Array]:
    """Features of the given shapes; everything is present, atom tables fit the residues."""
    rng = np.random.default_rng(seed)
    batch: dict[str, jax.Array] = {}
    for name, leaf in spec.items():
        if "mask" in name or "exists" in name:
            batch[name] = jnp.ones(leaf.shape, leaf.dtype)
        elif jnp.issubdtype(leaf.dtype, jnp.integer):
            batch[name] = jnp.asarray(rng.integers(0, 20, leaf.shape), leaf.dtype)
        else:
            batch[name] = jnp.asarray(rng.normal(size=leaf.shape) * 5, leaf.dtype)
    aatype = batch["aatype"]
    if aatype.ndim == 2:
        batch["aatype"] = jnp.broadcast_to(aatype[0], aatype.shape)
        batch |= atom_features(batch["aatype"])
    index = jnp.arange(aatype.shape[-1], dtype=jnp.int32)
    batch["residue_index"] = jnp.broadcast_to(index, aatype.shape)
    if "num_iter_recycling" in spec:
        batch["num_iter_recycling"] = jnp.asarray(aatype.shape[0] - 1, jnp.int32)
    return batch


def small_config(**global_config: Any) -> ml_collections.ConfigDict:
    """`model_1` shrunk to a few residues and channels, without dropout."""
    config = model_config("demo", "model_1")
    network = config.model.embeddings_and_evoformer
    network.update(
        {
            "evoformer_num_block": 3,
            "msa_channel": 8,
            "pair_channel": 8,
            "extra_msa_channel": 8,
            "seq_channel": 8,
        }
    )
    network.template.template_pair_stack.num_block = 1
    config.model.heads.structure_module.update({"num_layer": 2, "num_channel": 8, "num_head": 2})
    config.model.num_recycle = 2
    config.data.update(
        {"crop_size": 6, "max_msa_clusters": 3, "max_extra_msa": 4, "max_templates": 2}
    )
    config.model.global_config.update(
        {"deterministic": True, "attention_chunk_size": None, **global_config}
    )
    return config


def small_inputs(config: ml_collections.ConfigDict) -> tuple[Any, dict[str, jax.Array]]:
    """Parameters and features for inference."""
    spec = batch_spec(config, training=False)
    shapes = jax.eval_shape(make_model(config).init, jax.random.key(0), spec)
    return random_params(shapes), random_batch(spec)
