"""What a block does, in a few numbers: its work by idiom, and where it stands.

The idioms are those by which accelerator workloads are told apart (matrix products, streams,
gathers, reductions and so on). An operation counts with the bytes that it touches, because bytes,
unlike FLOPs, are never 0, and they are what memory is about. Fixed loops count with their length, a
branch with the mean of its bodies, an unbounded loop once: how often it runs is what is to be
learned. The trap: bytes span many orders of magnitude, so a description holds their logarithm, with
one scale for all programs; a description must not depend on the other blocks of a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from jdynoff.program.graph import Operation, Region

IDIOMS = ("transpose", "gather", "scatter", "reduction", "stream", "stencil", "matmul")
POSITION_SIZE = 8

# A region that touches this much of one idiom has 1 there.
_SCALE = math.log1p(2**30)

_OF_NAME = {
    **dict.fromkeys(("transpose", "reshape", "rev", "copy", "copy_p"), "transpose"),
    **dict.fromkeys(("gather", "dynamic_slice", "take"), "gather"),
    **dict.fromkeys(("dynamic_update_slice",), "scatter"),
    **dict.fromkeys(
        ("argmax", "argmin", "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "sort"),
        "reduction",
    ),
    **dict.fromkeys(("top_k", "approx_top_k", "psum", "pmax", "pmin"), "reduction"),
    **dict.fromkeys(
        ("conv_general_dilated", "pad", "slice", "concatenate", "select_and_gather_add"),
        "stencil",
    ),
    **dict.fromkeys(("dot_general", "ragged_dot", "ragged_dot_general"), "matmul"),
}
_OF_PREFIX = {
    "scatter": "scatter",
    "reduce_window": "stencil",
    "select_and_scatter": "stencil",
    "reduce_precision": "stream",
    "reduce_": "reduction",
}
# They only name, order or reinterpret what is there.
_NO_WORK = frozenset({"name", "optimization_barrier", "squeeze", "expand_dims", "stop_gradient"})


def idioms(region: Region) -> np.ndarray:
    """Describes one execution of a region.

    Args:
        region: a branch, a loop's body, or any other region.

    Returns:
        f32[len(IDIOMS)], from 0 to about 1: log(1 + bytes) of each idiom, 1 being 1 GiB.
    """
    touched = _touched(region, _idiom)
    return _compressed([touched.get(idiom, 0.0) for idiom in IDIOMS])


def equation_counts(regions: Sequence[Region]) -> np.ndarray:
    """Describes regions by the names of their equations, which is what idioms are compared with.

    Args:
        regions: of one program.

    Returns:
        f32[len(regions), N], log(1 + bytes) of each of the N names that occur, scaled as idioms
        are; names in alphabetical order.
    """
    touched = [_touched(region, lambda operation: operation.name) for region in regions]
    names = sorted({name for found in touched for name in found})
    rows = [_compressed([found.get(name, 0.0) for name in names]) for found in touched]
    return np.stack(rows) if rows else np.zeros((0, 0), np.float32)


def position(number: int, total: int) -> np.ndarray:
    """Tells a block from others that do the same work.

    Args:
        number: of the block, in the order of the program.
        total: number of blocks.

    Returns:
        f32[POSITION_SIZE], sines and cosines of growing frequency (Vaswani et al. 2017).
    """
    angles = math.pi * (number + 0.5) / total * 2.0 ** np.arange(POSITION_SIZE // 2)
    return np.concatenate([np.sin(angles), np.cos(angles)]).astype(np.float32)


def _compressed(touched: Sequence[float]) -> np.ndarray:
    return (np.log1p(np.array(touched, np.float64)) / _SCALE).astype(np.float32)


def _idiom(operation: Operation) -> str | None:
    if operation.name in _NO_WORK:
        return None
    if operation.name in _OF_NAME:
        return _OF_NAME[operation.name]
    for prefix, idiom in _OF_PREFIX.items():
        if operation.name.startswith(prefix):
            return idiom
    return "stream"


def _touched(region: Region, group: Callable[[Operation], str | None]) -> dict[str, float]:
    """Bytes touched by one execution of a region, by group."""
    totals: dict[str, float] = {}
    for operation in region.operations:
        if operation.bodies:
            found = [_touched(body, group) for body in operation.bodies]
            times = operation.spec.length if operation.kind == "scan" else 1.0
            if operation.kind == "cond":
                times = 1 / len(found)
            for body in found:
                for name, count in body.items():
                    totals[name] = totals.get(name, 0.0) + times * count
        else:
            name_or_none = group(operation)
            if name_or_none is not None:
                touched = operation.touched_bytes()
                totals[name_or_none] = totals.get(name_or_none, 0.0) + touched
    return totals
