"""Published parameter files (`params_model_*.npz`), read and checked against a configuration.

Keys of a file are `module/path//name`. The trap: a file that fits one model also *loads* into
another that has fewer parts, so names and shapes are compared before anything runs. Whatever is
wrong with a file is a `WeightsError` that names it.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from models.alphafold.model import expected_shapes

_SEPARATOR = "//"


class WeightsError(ValueError):
    """A parameter file that is not there, cannot be read, or is of another model."""


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
        WeightsError: the file is missing or no `.npz` archive of numbers, or its names or shapes
            are not those of the model.
    """
    try:
        # Opened here, since numpy leaves a file open that turns out to be no archive.
        with open(path, "rb") as file:
            archive = np.load(file, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise WeightsError(f"{path} is one array, not an .npz archive of named parameters.")
            flat = {key: archive[key] for key in archive.files}
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}.") from error
    # What numpy raises for a file that is no archive, is cut short, or holds pickled objects.
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(
            f"{path} is no .npz archive of numbers ({error}). Fetch the file again, or name the "
            "params_model_*.npz file itself."
        ) from error
    for key, value in flat.items():
        if not np.issubdtype(value.dtype, np.number):
            raise WeightsError(f"{path}: {key!r} is of type {value.dtype}, not a number.")
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
        WeightsError: on missing, unexpected or differently shaped parameters.
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
        raise WeightsError(
            f"{source} does not fit model {config.get('name', '?')!r}: "
            f"{len(missing)} missing {missing[:3]}, {len(unexpected)} unexpected "
            f"{unexpected[:3]}, {len(differing)} of another shape {differing[:3]}. Choose the "
            "configuration that the file was made for."
        )
