"""Runs a program operation by operation and counts its bodies: the long way, to compare with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdynoff import jax_compat
from jdynoff.program.graph import Constant, Operand, Operation, Program, Region, Value
from tests.programs.rewritten import Rewritten


def count_bodies(program: Program, arguments: Sequence[Any]) -> Counter[Region]:
    """How often each region runs for these flat arguments."""
    counts: Counter[Region] = Counter()
    _run(program.top, list(arguments), counts)
    return counts


def assert_counted(rewritten: Rewritten, arguments: Any) -> None:
    """Asserts that the last run has counted every block right, twins included."""
    counts = count_bodies(rewritten.program, jax.tree.leaves(arguments))
    counters = np.concatenate([np.zeros(0, int), *map(np.asarray, rewritten.counters)])
    for block, count in rewritten.blocks.path(counters.tolist()).items():
        if block.region is not None:
            assert count == counts[block.region], block.name
            assert block.most is None or count <= block.most


def _run(region: Region, inputs: list[Any], counts: Counter[Region]) -> list[Any]:
    counts[region] += 1
    values: dict[Value, Any] = dict(zip(region.inputs, inputs, strict=True))

    def read(operand: Operand) -> Any:
        return operand.value if isinstance(operand, Constant) else values[operand]

    for operation in region.operations:
        operands = [read(operand) for operand in operation.operands]
        results = _control(operation, operands, counts)
        values.update(zip(operation.results, results, strict=True))
    return [read(output) for output in region.outputs]


def _control(operation: Operation, operands: list[Any], counts: Counter[Region]) -> list[Any]:
    if operation.kind == "barrier":
        return operands
    if operation.kind == "cond":
        index = int(jnp.clip(jnp.asarray(operands[0], jnp.int32), 0, len(operation.bodies) - 1))
        return _run(operation.bodies[index], operands[1:], counts)
    if operation.kind == "while":
        spec, (cond, body) = operation.spec, operation.bodies
        tests = operands[: spec.cond_num_consts]
        first = spec.cond_num_consts + spec.body_num_consts
        constants, state = operands[spec.cond_num_consts : first], operands[first:]
        while bool(_run(cond, [*tests, *state], counts)[0]):
            state = _run(body, [*constants, *state], counts)
        return state
    if operation.kind == "scan":
        return _scan(operation, operands, counts)
    return jax_compat.bind_equation(operation.eqn, operands)


def _scan(operation: Operation, operands: list[Any], counts: Counter[Region]) -> list[Any]:
    spec, (body,) = operation.spec, operation.bodies
    first = spec.num_consts + spec.num_carry
    constants, state, stacks = operands[: spec.num_consts], operands[spec.num_consts : first], None
    stacks = operands[first:]
    rows: list[Any] = [None] * spec.length
    order = range(spec.length)
    for number in reversed(order) if spec.reverse else order:
        slices = [stack[number] for stack in stacks]
        outputs = _run(body, [*constants, *state, *slices], counts)
        state, rows[number] = outputs[: spec.num_carry], outputs[spec.num_carry :]
    if not rows:
        avals = [value.aval for value in operation.results[spec.num_carry :]]
        return [*state, *(jnp.zeros(aval.shape, aval.dtype) for aval in avals)]
    stacked = [
        jax.tree.map(lambda *parts: jnp.stack(parts), *column) for column in zip(*rows, strict=True)
    ]
    return [*state, *stacked]
