"""What an operation costs: FLOPs by the usual formulas, and what replaying it would cost.

Counts are of the traced equations, before XLA fuses or rewrites them, and loops are multiplied out
(XLA's own `cost_analysis()` counts the body of a loop once, however often it runs).

The trap: a random number costs far more than the multiplication that uses it. Threefry takes some
hundred integer operations for each 32 bits, so it has a price like a small matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jdynoff import jax_compat
from jdynoff.program.graph import Operation, Region

_RANDOM_OPERATIONS_PER_WORD = 100


def flops(operation: Operation) -> float:
    """Floating-point operations of one execution of `operation`, bodies included.

    A multiply-add counts as two. A loop whose length is not known counts once, a branch as the
    dearest one.
    """
    if operation.kind == "scan":
        return operation.spec.length * region_flops(operation.bodies[0])
    if operation.bodies:
        return max(region_flops(body) for body in operation.bodies)
    return _FORMULAS.get(operation.name, _per_element)(operation)


def region_flops(region: Region) -> float:
    """Floating-point operations of one execution of a region."""
    return sum(flops(operation) for operation in region.operations)


def _elements(value: Any) -> int:
    return math.prod(getattr(value.aval, "shape", ()))


def _per_element(operation: Operation) -> float:
    return float(sum(_elements(result) for result in operation.results))


def _reduction(operation: Operation) -> float:
    return float(sum(_elements(operand) for operand in operation.operands))


def _nothing(operation: Operation) -> float:
    return 0.0


def _dot(operation: Operation) -> float:
    left, _ = operation.operands
    contracted = jax_compat.contracted_size(operation.eqn, left.aval.shape)
    return 2.0 * contracted * _elements(operation.results[0])


def _convolution(operation: Operation) -> float:
    _, kernel = operation.operands
    features = jax_compat.convolution_output_features(operation.eqn, kernel.aval.shape)
    return 2.0 * _elements(operation.results[0]) * _elements(kernel) / max(features, 1)


def _random(operation: Operation) -> float:
    return _RANDOM_OPERATIONS_PER_WORD * sum(result.nbytes for result in operation.results) / 4


_FORMULAS: dict[str, Callable[[Operation], float]] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "random_bits": _random,
    "threefry2x32": _random,
    **dict.fromkeys(
        (
            "argmax",
            "argmin",
            "cumlogsumexp",
            "cummax",
            "cummin",
            "cumprod",
            "cumsum",
            "reduce_and",
            "reduce_max",
            "reduce_min",
            "reduce_or",
            "reduce_prod",
            "reduce_sum",
        ),
        _reduction,
    ),
    **dict.fromkeys(
        (
            "broadcast_in_dim",
            "concatenate",
            "copy",
            "dynamic_slice",
            "dynamic_update_slice",
            "expand_dims",
            "gather",
            "iota",
            "name",
            "optimization_barrier",
            "pad",
            "reshape",
            "rev",
            "slice",
            "squeeze",
            "stop_gradient",
            "transpose",
        ),
        _nothing,
    ),
}
