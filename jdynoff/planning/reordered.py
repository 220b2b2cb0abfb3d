"""Operands of products that XLA has to copy, since it cannot multiply their axes as they lie.

A matrix product takes each operand as batch axes, then the free and the contracted ones as two
groups, in either order. Where the axes of an operand lie otherwise (attention over [batch, token,
head, channel], an outer product contracted over its middle), XLA makes a copy that is alive while
the product runs.

The trap: axes of size 1 have no place.
"""

from __future__ import annotations

from collections.abc import Sequence

from jdynoff import jax_compat
from jdynoff.program.graph import Operation, Value


def reordered_bytes(operation: Operation) -> int:
    """Bytes of the copies that an operation makes of its operands."""
    if operation.name != "dot_general":
        return 0
    sides = jax_compat.product_axes(operation.eqn)
    return sum(
        operand.nbytes
        for operand, (contracted, batch) in zip(operation.operands, sides, strict=True)
        if isinstance(operand, Value)
        and not _is_matrix(operand.aval.shape, tuple(contracted), tuple(batch))
    )


def _is_matrix(shape: Sequence[int], contracted: Sequence[int], batch: Sequence[int]) -> bool:
    """Whether an operand is a stack of matrices as it lies."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    leading = [axis for axis in batch if shape[axis] > 1]
    if axes[: len(leading)] != leading:
        return False
    rest = axes[len(leading) :]
    inner = [axis for axis in contracted if shape[axis] > 1]
    free = [axis for axis in rest if axis not in inner]
    return rest in (free + inner, inner + free)
