"""What can be computed again, and what it costs beside moving the result.

Elementwise, layout and reduction equations cost less than the transfer of what they make. Products,
convolutions and random bits are computed again at a price: so many FLOPs for each byte that need
not be moved.

The trap: an effect (a callback, a random number from a stateful source) must happen once, so
operations that have any are never computed again.
"""

from __future__ import annotations

from jdynoff import jax_compat
from jdynoff.planning.cost import flops
from jdynoff.program.graph import Operation

TRANSCENDENTAL = frozenset(
    [
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "cos",
        "cosh",
        "div",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "logistic",
        "pow",
        "rem",
        "rsqrt",
        "sin",
        "sinh",
        "sqrt",
        "tan",
        "tanh",
    ]
)
"""Elementwise operations that XLA computes once, however many read the result."""

_ELEMENTWISE = TRANSCENDENTAL | frozenset(
    [
        "abs",
        "add",
        "add_any",
        "and",
        "ceil",
        "clamp",
        "complex",
        "conj",
        "convert_element_type",
        "copy",
        "copy_p",
        "eq",
        "floor",
        "ge",
        "gt",
        "imag",
        "integer_pow",
        "is_finite",
        "le",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "one_minus_square",
        "or",
        "population_count",
        "real",
        "reduce_precision",
        "round",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "square",
        "stop_gradient",
        "sub",
        "xor",
        "name",
    ]
)
_LAYOUT = frozenset(
    [
        "broadcast",
        "broadcast_in_dim",
        "concatenate",
        "dynamic_slice",
        "empty",
        "empty2",
        "expand_dims",
        "iota",
        "pad",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    ]
)
_REDUCTIONS = frozenset(
    [
        "argmax",
        "argmin",
        "reduce_and",
        "reduce_max",
        "reduce_min",
        "reduce_or",
        "reduce_prod",
        "reduce_sum",
    ]
)
_REARRANGEMENTS = frozenset(["expand_dims", "reshape", "rev", "squeeze", "transpose"])
_CHEAP = _ELEMENTWISE | _LAYOUT | _REDUCTIONS
# Replayed only at a price.
_PRICED = frozenset(
    [
        "conv_general_dilated",
        "cumlogsumexp",
        "cummax",
        "cummin",
        "cumprod",
        "cumsum",
        "dot_general",
        "gather",
        "random_bits",
        "threefry2x32",
    ]
)


def can_replay(operation: Operation, price: float) -> bool:
    """Whether `operation` may be computed again at all.

    Args:
      operation: of the step.
      price: FLOPs that are paid rather than move one byte; below 0 nothing is computed again but
        layout.
    """
    if operation.kind != "plain" or jax_compat.has_effects(operation.eqn):
        return False
    if price < 0:
        return operation.name in _LAYOUT
    return operation.name in _CHEAP or (price > 0 and operation.name in _PRICED)


def is_elementwise(operation: Operation) -> bool:
    """Whether each element of the one result depends on the same element of each operand."""
    return operation.name in _ELEMENTWISE and len(operation.results) == 1


def is_rearrangement(operation: Operation) -> bool:
    """Whether the result has the elements of the one operand in another order or shape."""
    return operation.name in _REARRANGEMENTS


def is_reduction(operation: Operation) -> bool:
    """Whether it goes through its operand once and makes something smaller."""
    return operation.name in _REDUCTIONS


def is_cheap(operation: Operation, price: float = 0.0) -> bool:
    """Whether replaying `operation` costs less than moving what it makes.

    Args:
      operation: of the step.
      price: FLOPs that are paid rather than move one byte.
    """
    if not can_replay(operation, price):
        return False
    made = sum(result.nbytes for result in operation.results)
    return operation.name in _CHEAP or flops(operation) <= price * made
