"""Puts constants back into the bodies that read them.

JAX hoists what does not depend on a loop's carry out of it, also a broadcast zero or a table of
indices, which then stand as one large array beside every iteration of every loop inside. Made again
where they are read they cost nothing: XLA fuses them into their readers.

The trap: such a value takes no memory, so it counts with zero bytes, and nothing ever moves it.
"""

from __future__ import annotations

from jdynoff.program.graph import Constant, Operation, Program, Region, Value
from jdynoff.program.structure import is_scanned, outer_operand

_FREE = frozenset(["broadcast_in_dim", "iota"])


def sink_constants(program: Program) -> None:
    """Changes `program` in place: bodies make broadcast constants themselves. Linear."""
    for region in program.regions:  # outermost first, so that a constant sinks all the way
        owner = region.owner
        if owner is None:
            continue
        branch = next(number for number, body in enumerate(owner.bodies) if body is region)
        made: list[Operation] = []
        for value in region.inputs:
            operand = outer_operand(owner, branch, value.index)
            if (
                isinstance(operand, Value)
                and operand.producer is not None
                and _is_free(operand.producer)
                and not is_scanned(owner, value.index)
                and (value.uses or value.output_positions)
            ):
                made.append(_copy(operand.producer, value, region))
        if made:
            region.operations = made + region.operations
            for position, operation in enumerate(region.operations):
                operation.position = position


def _is_free(operation: Operation) -> bool:
    return operation.name in _FREE and all(
        isinstance(operand, Constant) for operand in operation.operands
    )


def _copy(original: Operation, replaced: Value, region: Region) -> Operation:
    operation = Operation(
        eqn=original.eqn,
        name=original.name,
        kind=original.kind,
        operands=list(original.operands),
        results=[],
        region=region,
        position=0,
        source=original.source,
    )
    result = Value(replaced.aval, 0, region, operation, 0)
    operation.results.append(result)
    result.uses, replaced.uses = replaced.uses, []
    result.output_positions, replaced.output_positions = replaced.output_positions, []
    for reader, number in result.uses:
        reader.operands[number] = result
    for position in result.output_positions:
        region.outputs[position] = result
    return operation
