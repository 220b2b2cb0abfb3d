"""Published parameter files (`params_model_*.npz`), read and checked against a configuration.

Keys of a file are `module/path//name`. The trap: a file that fits one model also *loads* into
another that has fewer parts, so names and shapes are compared before anything runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from models.alphafold.model import expected_shapes

_SEPARATOR = "//"


def flatten_params(params: hk.Params) -> dict[str, Any]:
    """Return parameters under the keys of a parameter file."""
    return {
        f"{path}{_SEPARATOR}{name}": value
        for path, values in params.items()
        for name, value in values.items()
    }


def unflatten_params(flat: Mapping[str, Any]) -> dict[str, dict[str, jax.Array]]:
    """Return Haiku parameters from the keys of a parameter file."""
    params: dict[str, dict[str, jax.Array]] = {}
    for key, value in flat.items():
        path, name = key.split(_SEPARATOR)
        params.setdefault(path, {})[name] = jnp.asarray(value, jnp.float32)
    return params


def load_params(
    path: str | os.PathLike[str], config: ml_collections.ConfigDict
) -> dict[str, dict[str, jax.Array]]:
    """Read a parameter file for a model.

    Args:
        path: `.npz` file.
        config: a tree of `models.alphafold.config.model_config`.

    Returns:
        Haiku parameters, float32.

    Raises:
        ValueError: if the file's names or shapes are not those of the model.
    """
    with np.load(path, allow_pickle=False) as archive:
        flat = {key: archive[key] for key in archive.files}
    check_shapes({key: value.shape for key, value in flat.items()}, config, source=str(path))
    return unflatten_params(flat)


def save_params(path: str | os.PathLike[str], params: hk.Params) -> None:
    """Write parameters in the published form."""
    np.savez(path, **{key: np.asarray(value) for key, value in flatten_params(params).items()})


def check_shapes(
    shapes: Mapping[str, tuple[int, ...]], config: ml_collections.ConfigDict, source: str
) -> None:
    """Compare names and shapes with those of a model.

    Args:
        shapes: key of a parameter file to shape.
        config: a tree of `models.alphafold.config.model_config`.
        source: where the parameters come from, for the message.

    Raises:
        ValueError: on missing, unexpected or differently shaped parameters.
    """
    expected = expected_shapes(config)
    missing = sorted(set(expected) - set(shapes))
    unexpected = sorted(set(shapes) - set(expected))
    differing = [
        f"{key} is {tuple(shapes[key])}, the model has {expected[key]}"
        for key in sorted(set(shapes) & set(expected))
        if tuple(shapes[key]) != expected[key]
    ]
    if missing or unexpected or differing:
        raise ValueError(
            f"{source} does not fit model {config.get('name', '?')!r}: "
            f"{len(missing)} missing {missing[:3]}, {len(unexpected)} unexpected "
            f"{unexpected[:3]}, {len(differing)} of another shape {differing[:3]}. Choose the "
            "configuration that the file was made for."
        )
