"""Residuals that need not be moved: they are cheap functions of what is there anyway.

JAX keeps slices of weights, casts, masks, and every intermediate of a softmax or a gelu. For each
pair of a producing and a consuming region (a forward scan's body and its backward twin) one pass
in program order decides, per residual, whether the consumer can compute it from arguments of the
step and from residuals that are moved anyway. Only elementwise, layout and reduction equations are
replayed here; they cost less than the transfer of what they make.

The trap: a residual may be replaced by the product it came from (a matmul's result) only where that
moves fewer bytes, because the replay then costs its elementwise chain for nothing.
"""

from __future__ import annotations

from jdynoff import jax_compat
from jdynoff.planning.cost import flops
from jdynoff.planning.decisions import Origin, Outer, Own, Replay
from jdynoff.program.graph import Constant, Operation, Region, Value
from jdynoff.program.structure import is_scanned, root

_ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "cbrt",
        "ceil",
        "clamp",
        "complex",
        "conj",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "imag",
        "integer_pow",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
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
        "pow",
        "real",
        "reduce_precision",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
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
_MOST_MISSING = 2  # a value that needs more unavailable products than this is not considered


def is_cheap(operation: Operation, price: float = 0.0) -> bool:
    """Whether replaying `operation` costs less than moving what it makes.

    Args:
      operation: of the step.
      price: FLOPs that are paid rather than move one byte.
    """
    if operation.kind != "plain" or jax_compat.has_effects(operation.eqn):
        return False
    if operation.name in _CHEAP:
        return True
    made = sum(result.nbytes for result in operation.results)
    return operation.name in _PRICED and price > 0 and flops(operation) <= price * made


def reachable_inputs(
    region: Region, consumer: Region, around: Replay | None, top: Region
) -> dict[Value, Origin]:
    """Inputs of a producing region that its consuming region can read again.

    Args:
      region: the producing body or branch.
      consumer: the consuming one.
      around: how the region around the consumer reads the region around the producer; None where
        both are in one region.
      top: the step's own region.

    Returns:
      The inputs that are, or are slices of: arguments of the step, constants, operands of the
      consuming operation, or values that the region around can get at.
    """
    producer, consuming = region.owner, consumer.owner
    assert producer is not None
    assert consuming is not None
    held: dict[tuple[int, bool], Value] = {}
    for value in consumer.inputs:
        operand = _passed(consuming, value.index)
        if isinstance(operand, Value):
            held.setdefault((id(operand), _scanned(consuming, value.index)), value)
    origins: dict[Value, Origin] = {}
    for value in region.inputs:
        operand = _passed(producer, value.index)
        if operand is None:
            continue
        scanned = _scanned(producer, value.index)
        if isinstance(operand, Constant):
            origins[value] = Outer(operand, scanned)
            continue
        outside = around.origins.get(operand) if around is not None else None
        twin = operand if around is None else getattr(outside, "value", None)
        if (id(twin), scanned) in held:
            origins[value] = Own(held[id(twin), scanned])
            continue
        source = root(operand)
        if isinstance(source, Constant) or (source.region is top and source.producer is None):
            origins[value] = Outer(source, scanned)
        elif outside is not None:
            origins[value] = Outer(operand, scanned)
    return origins


def prune(replay: Replay, around: Replay | None) -> None:
    """Drops the origins that no rebuilt value needs, so that nothing is carried in vain."""
    needed: set[Value] = set(replay.needed)
    waiting = list(replay.rebuilds.values())
    seen: set[Value] = set()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in replay.origins:
            needed.add(value)
        elif value.producer is not None:
            waiting.extend(
                operand for operand in value.producer.operands if isinstance(operand, Value)
            )
    # In the order of the dict: that of a set differs between processes, and so would the program.
    replay.origins = {value: origin for value, origin in replay.origins.items() if value in needed}
    for origin in replay.origins.values():
        if isinstance(origin, Outer) and around is not None and origin.operand in around.origins:
            around.needed.add(origin.operand)


def _scanned(operation: Operation, number: int) -> bool:
    return operation.kind == "scan" and is_scanned(operation, number)


def _passed(operation: Operation, number: int) -> Value | Constant | None:
    if operation.kind == "cond":
        return operation.operands[number + 1]
    spec = operation.spec
    if spec.num_consts <= number < spec.num_consts + spec.num_carry:
        return None
    return operation.operands[number]


def choose(
    region: Region, residuals: dict[Value, int], available: set[Value], price: float = 0.0
) -> tuple[set[Value], set[Value], set[Value]]:
    """Splits residuals into kept and rebuilt.

    Args:
      region: the producing region.
      residuals: its values that the consumer needs, with their bytes.
      available: its values that the consumer has anyway.
      price: FLOPs that are paid rather than move one byte.

    Returns:
      (kept residuals, rebuilt residuals, products to be moved instead of residuals).
    """
    kept, rebuilt, missing = _greedy(region, residuals, available, price)
    # A product from which several kept residuals follow is moved in their place.
    gain: dict[Value, int] = {}
    for residual in kept:
        lacks = missing.get(residual)
        if lacks is not None and len(lacks) == 1:
            (product,) = lacks
            if product is not residual:
                gain[product] = gain.get(product, 0) + residuals[residual]
    bases = {
        product
        for product, saved in gain.items()
        if product not in residuals and 0 < 2 * product.nbytes <= saved
    }
    if bases:
        kept, rebuilt, _ = _greedy(region, residuals, available | bases, price)
    return kept, rebuilt, bases


def _greedy(
    region: Region, residuals: dict[Value, int], available: set[Value], price: float
) -> tuple[set[Value], set[Value], dict[Value, frozenset[Value] | None]]:
    missing: dict[Value, frozenset[Value] | None] = {}
    lacking: dict[Value, frozenset[Value] | None] = {}
    kept: set[Value] = set()
    rebuilt: set[Value] = set()
    nothing: frozenset[Value] = frozenset()

    def settle(value: Value, lacks: frozenset[Value] | None) -> None:
        missing[value] = lacks
        if value in residuals and value not in available:
            lacking[value] = lacks
            if lacks is not None and not lacks:
                rebuilt.add(value)
            else:
                kept.add(value)
                missing[value] = nothing

    for value in region.inputs:
        settle(value, nothing if value in available else frozenset((value,)))
    for operation in region.operations:
        cheap = is_cheap(operation, price)
        lacks: frozenset[Value] | None = nothing
        if cheap:
            for operand in operation.operands:
                if isinstance(operand, Constant):
                    continue
                other = missing[operand]
                lacks = None if other is None or lacks is None else lacks | other
                if lacks is not None and len(lacks) > _MOST_MISSING:
                    lacks = None
        for result in operation.results:
            if result in available:
                settle(result, nothing)
            elif cheap:
                settle(result, lacks)
            else:
                settle(result, frozenset((result,)))
    return kept, rebuilt, lacking
