"""Moves operations to where they free memory, before anything is decided about the rest.

JAX's trace lists the optimizer's update after the whole backward pass, so in program order every
gradient lives to the end. XLA's scheduler applies an update as soon as its gradient is there; this
pass does the same, so that live ranges measured on the program resemble the ones that XLA makes
and no gradient is offloaded that would have been consumed at once.
"""

from __future__ import annotations

from jdynoff import jax_compat
from jdynoff.program.graph import Operation, Region, Value


def shorten_live_ranges(region: Region) -> None:
    """Reorders `region` in place: consumes values early where that cannot grow memory.

    An operation moves up to its last-made operand if its results are no larger than the operands
    that only it uses. Relative order is otherwise kept. Linear apart from one sort.
    """
    key: dict[int, int] = {}
    for operation in region.operations:
        ready = -1
        freed = 0
        for operand in operation.operands:
            if not isinstance(operand, Value):
                continue
            if operand.producer is not None:
                ready = max(ready, key[id(operand.producer)])
            if operand.producer is not None and len(operand.uses) == 1:
                freed += operand.nbytes
        made = sum(result.nbytes for result in operation.results)
        movable = (
            operation.kind == "plain"
            and ready >= 0
            and not jax_compat.has_effects(operation.eqn)
            and made <= freed
        )
        key[id(operation)] = ready if movable else max(operation.position, ready)
    order: list[Operation] = sorted(
        region.operations, key=lambda operation: (key[id(operation)], operation.position)
    )
    for position, operation in enumerate(order):
        operation.position = position
    region.operations = order
