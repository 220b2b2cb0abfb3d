"""What the pilot sees of a batch: a few statistics of each of its arrays.

They are computed inside the step on every call, so they must cost next to nothing: of a large
array only a fixed grid of elements is read. The traps: NaN is ordinary in data (missing values), so
elements that are not finite count as 0 and their share is a statistic of its own; and a grid whose
stride divides the row would see one channel of an image only, so strides have no common factor
with what they step through.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdynoff import jax_compat
from jdynoff.errors import ConfigurationError

SEGMENTS = 8
LEAF_FEATURES = (
    "mean",
    "std",
    "min",
    "max",
    "share of nonzero",
    "largest share of nonzero in a row",
    "log size",
    "share of finite",
    "std of row means",
    *(f"mean of part {part}" for part in range(SEGMENTS)),
)
MOST_LEAVES = 16
_MOST_ELEMENTS = 16384
_LEAST_ROWS = 128  # read of a long first axis

_KEY_NAME = re.compile(r"(^|[^a-z])(rngs?|keys?|prng)([^a-z]|$)", re.IGNORECASE)
_FIRST_NAME = re.compile(r"^\W*\w*")

Argument = tuple[str, Any, bool]  # path, aval, whether it is donated


def batch_positions(arguments: Sequence[Argument], outputs: Sequence[Any]) -> list[int]:
    """Finds the arrays of the batch among the arguments of a train step.

    What is donated is state. So is an argument whose arrays all come back, in order and next to
    each other, among the outputs; where something is donated, only one of several arrays, because
    a single array (labels) often has the type of an output by chance (predictions).

    Args:
        arguments: of the step, flat: path, abstract value, whether it is donated. The path begins
            with the name or the number of the argument.
        outputs: abstract values of the flat outputs.

    Returns:
        Positions in `arguments`, ascending, at most `MOST_LEAVES`: the largest and the smallest,
        since the large arrays are the data and the small ones are lengths and switches. PRNG keys
        are never among them. If nothing seems to be left, all that is not donated.
    """
    usable = [
        number
        for number, (path, aval, donated) in enumerate(arguments)
        if not donated and _has_statistics(path, aval)
    ]
    state = _returned(arguments, outputs)
    chosen = [number for number in usable if number not in state] or usable
    if len(chosen) > MOST_LEAVES:
        by_size = sorted(chosen, key=lambda number: math.prod(arguments[number][1].shape))
        chosen = by_size[: MOST_LEAVES // 2] + by_size[-MOST_LEAVES // 2 :]
    return sorted(chosen)


def _has_statistics(path: str, aval: Any) -> bool:
    if jax_compat.is_extended_dtype(aval) or 0 in aval.shape:
        return False
    # A raw key; wider batches of them are told from data by their name only.
    if aval.dtype == np.uint32 and aval.shape[-1:] in ((2,), (4,)):
        return len(aval.shape) > 1 and not _KEY_NAME.search(path)
    return True


def _returned(arguments: Sequence[Argument], outputs: Sequence[Any]) -> set[int]:
    """The leaves of those arguments that come back as a whole."""
    groups: dict[str, list[int]] = {}
    for number, (path, _, donated) in enumerate(arguments):
        if not donated:
            found = _FIRST_NAME.match(path)
            groups.setdefault(found.group() if found else path, []).append(number)
    any_donated = any(donated for _, _, donated in arguments)
    types = [(aval.shape, aval.dtype) for aval in outputs]
    returned: set[int] = set()
    start = 0
    for leaves in groups.values():
        wanted = [(arguments[number][1].shape, arguments[number][1].dtype) for number in leaves]
        if any_donated and len(leaves) == 1:
            continue
        for offset in range(start, len(types) - len(wanted) + 1):
            if types[offset : offset + len(wanted)] == wanted:
                returned.update(leaves)
                start = offset + len(wanted)
                break
    return returned


def batch_features(leaves: Sequence[jax.Array]) -> jax.Array:
    """Computes the statistics of a batch.

    Args:
        leaves: arrays of any shape; floats, integers, booleans or complex numbers (their size).

    Returns:
        f32[len(leaves) * len(LEAF_FEATURES)], finite. "log size" is that of the nonzero elements,
        so that padding does not count.
    """
    if not leaves:
        return jnp.zeros((0,), jnp.float32)
    features, _ = finite(jnp.concatenate([_statistics(leaf) for leaf in leaves]))
    return features


def _statistics(leaf: jax.Array) -> jax.Array:
    grid = _grid(leaf)
    is_finite = jnp.isfinite(grid)
    grid = jnp.where(is_finite, grid, 0)
    nonzero = (grid != 0).astype(jnp.float32)
    row_means = jnp.mean(grid, axis=1)
    columns = jnp.mean(grid, axis=0)
    share = jnp.mean(nonzero)
    statistics = jnp.stack(
        [
            jnp.mean(columns),
            jnp.std(grid),
            jnp.min(grid),
            jnp.max(grid),
            share,
            jnp.max(jnp.mean(nonzero, axis=1)),
            jnp.log1p(share * leaf.size),
            jnp.mean(is_finite.astype(jnp.float32)),
            jnp.std(row_means),
        ]
    )
    return jnp.concatenate([statistics, _segments(columns)])


def _grid(leaf: jax.Array) -> jax.Array:
    """At most `_MOST_ELEMENTS` elements as f32[rows, columns]; rows are the first axis."""
    leaf = jnp.asarray(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.abs(leaf)
    rows = leaf.shape[0] if leaf.ndim > 1 else 1
    matrix = leaf.reshape(rows, leaf.size // rows)
    # Short rows leave room for more of them.
    row_stride = _stride(rows, max(_LEAST_ROWS, _MOST_ELEMENTS // matrix.shape[1]))
    kept_rows = -(-rows // row_stride)
    column_stride = _stride(matrix.shape[1], _MOST_ELEMENTS // kept_rows)
    return matrix[::row_stride, ::column_stride].astype(jnp.float32)


def _stride(size: int, most: int) -> int:
    stride = -(-size // most)
    while stride > 1 and math.gcd(stride, size) != 1:
        stride += 1
    return stride


def _segments(columns: jax.Array) -> jax.Array:
    width = len(columns) // SEGMENTS
    if width == 0:
        return columns[np.arange(SEGMENTS) * len(columns) // SEGMENTS]
    return jnp.mean(columns[: width * SEGMENTS].reshape(SEGMENTS, width), axis=1)


def finite(features: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Replaces what is not finite.

    Args:
        features: f32[F].

    Returns:
        The features with 0 in place of NaN and infinities, and whether there were none (bool[]).
    """
    is_finite = jnp.isfinite(features)
    return jnp.where(is_finite, features, 0), jnp.all(is_finite)


def checked_features(function: Callable[..., Any]) -> Callable[..., jax.Array]:
    """Wraps a user's `features` function so that it can be relied upon.

    Args:
        function: from the step's arguments to a 1-D array of floating-point numbers, as many in
            every call.

    Returns:
        The same function with results in f32, possibly not finite.

    Raises:
        ConfigurationError: in a call, when the result is something else.
    """
    sizes: list[int] = []

    def checked(*args: Any, **kwargs: Any) -> jax.Array:
        result = function(*args, **kwargs)
        shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
        if shape is None or dtype is None:
            raise ConfigurationError(
                f"features= returned a {type(result).__name__}. It must return one array of shape "
                "(F,) of a floating-point dtype; stack its numbers with jnp.stack."
            )
        if len(shape) != 1 or shape[0] == 0 or not jnp.issubdtype(dtype, jnp.floating):
            raise ConfigurationError(
                f"features= returned an array of shape {tuple(shape)} and dtype {dtype}. It must "
                "have shape (F,), F at least 1, and a floating-point dtype; use "
                "jnp.ravel(...).astype(jnp.float32)."
            )
        sizes.append(int(shape[0]))
        if sizes[-1] != sizes[0]:
            raise ConfigurationError(
                f"features= returned {sizes.pop()} numbers, and {sizes[0]} in an earlier call. "
                "Their number must not depend on the arguments; reduce over what varies in size."
            )
        del sizes[1:]
        return jnp.asarray(result, jnp.float32)

    return checked
