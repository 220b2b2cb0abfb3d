"""Builds a `Program` from a traced step: one walk, calls put in place, uses indexed.

`jax.checkpoint` bodies are put in place too, behind the optimization barrier that JAX would emit
around them, so that a scan inside a checkpoint can be managed like any other.
"""

from __future__ import annotations

import sys
from typing import Any

from jdynoff import jax_compat
from jdynoff.program.graph import Constant, Operand, Operation, Program, Region, Value
from jdynoff.program.sink import sink_constants

# A checkpoint around the whole loss holds the forward pass again and the backward pass: about three
# quarters of the step. One that holds this share of it recomputes what jdynoff would move.
_POINTLESS_CHECKPOINT_SHARE = 0.6
_SMALLEST_PROGRAM = 12  # equations; below, shares mean nothing


def build(closed_jaxpr: Any) -> Program:
    """Indexes a traced step.

    Args:
      closed_jaxpr: the jaxpr of a `jax.stages.Traced`.

    Returns:
      The program; its top region's inputs and outputs are in the order of the jaxpr's.
    """
    builder = _Builder()
    top = builder.region(jax_compat.remove_dead_code(closed_jaxpr), None, "step")
    program = Program(top, builder.regions, builder.loops, builder.warnings(top))
    sink_constants(program)
    return program


class _Builder:
    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.loops: list[Operation] = []
        self.checkpoints: list[tuple[str, int]] = []
        self.equations = 0

    def region(self, jaxpr: Any, owner: Operation | None, role: str) -> Region:
        body = jax_compat.view(jaxpr)
        region = Region(owner, role)
        self.regions.append(region)
        environment: dict[Any, Operand] = {}
        for variable, constant in zip(body.constvars, body.consts, strict=True):
            environment[variable] = Constant(constant, variable.aval)
        for number, variable in enumerate(body.invars):
            value = _value(variable.aval, region, None, number)
            environment[variable] = value
            region.inputs.append(value)
        # Calls nest as deeply as the user's code; the walk itself must not run out of stack.
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 20_000))
        try:
            self.extend(region, body, environment)
        finally:
            sys.setrecursionlimit(limit)
        region.outputs = [_read(environment, atom) for atom in body.outvars]
        for position, output in enumerate(region.outputs):
            if isinstance(output, Value):
                output.output_positions.append(position)
        return region

    def extend(
        self, region: Region, body: jax_compat.Body, environment: dict[Any, Operand]
    ) -> None:
        for eqn in body.eqns:
            operands = [_read(environment, atom) for atom in eqn.invars]
            inner = jax_compat.called_body(eqn)
            if inner is None:
                operation = self.operation(region, eqn, operands)
                for variable, result in zip(eqn.outvars, operation.results, strict=True):
                    environment[variable] = result
                continue
            before = self.equations
            barrier = jax_compat.barrier_mask(eqn)
            if barrier is not None:
                operands = self.barrier(region, eqn, operands, barrier)
            called = jax_compat.view(inner)
            scope: dict[Any, Operand] = {}
            for variable, constant in zip(called.constvars, called.consts, strict=True):
                scope[variable] = Constant(constant, variable.aval)
            scope.update(zip(called.invars, operands, strict=True))
            self.extend(region, called, scope)
            for variable, atom in zip(eqn.outvars, called.outvars, strict=True):
                environment[variable] = _read(scope, atom)
            if jax_compat.is_differentiated_checkpoint(eqn) and region.owner is None:
                self.checkpoints.append((jax_compat.source_line(eqn), self.equations - before))

    def operation(self, region: Region, eqn: Any, operands: list[Operand]) -> Operation:
        self.equations += 1
        operation = Operation(
            eqn=eqn,
            name=eqn.primitive.name,
            kind="plain",
            operands=operands,
            results=[],
            region=region,
            position=len(region.operations),
            source=jax_compat.source_line(eqn),
        )
        self._attach(region, operation, [variable.aval for variable in eqn.outvars])
        if (scan := jax_compat.scan_spec(eqn)) is not None:
            operation.kind, operation.spec = "scan", scan
            operation.bodies = (self.region(scan.body, operation, "scan"),)
        elif (branches := jax_compat.cond_branches(eqn)) is not None:
            operation.kind = "cond"
            operation.bodies = tuple(
                self.region(branch, operation, f"branch {number}")
                for number, branch in enumerate(branches)
            )
        elif (loop := jax_compat.while_spec(eqn)) is not None:
            operation.kind, operation.spec = "while", loop
            operation.bodies = (
                self.region(loop.cond, operation, "while cond"),
                self.region(loop.body, operation, "while body"),
            )
        elif jax_compat.uses_loop_stack(eqn):
            # Not a plain operation: it must not be computed again elsewhere.
            operation.kind = "loop"
            self.loops.append(operation)
        return operation

    def barrier(
        self, region: Region, eqn: Any, operands: list[Operand], mask: tuple[bool, ...]
    ) -> list[Operand]:
        chosen = [
            number
            for number, behind in enumerate(mask)
            if behind and isinstance(operands[number], Value)
        ]
        if not chosen:
            return operands
        operation = Operation(
            eqn=eqn,
            name="optimization_barrier",
            kind="barrier",
            operands=[operands[number] for number in chosen],
            results=[],
            region=region,
            position=len(region.operations),
            source=jax_compat.source_line(eqn),
        )
        self._attach(region, operation, [operands[number].aval for number in chosen])
        replaced = list(operands)
        for number, result in zip(chosen, operation.results, strict=True):
            replaced[number] = result
        return replaced

    def _attach(self, region: Region, operation: Operation, avals: list[Any]) -> None:
        operation.results = [
            _value(aval, region, operation, number) for number, aval in enumerate(avals)
        ]
        for number, operand in enumerate(operation.operands):
            if isinstance(operand, Value):
                operand.uses.append((operation, number))
        region.operations.append(operation)

    def warnings(self, top: Region) -> list[str]:
        return [
            f"{source or 'the step'}: jax.checkpoint covers {count} of the step's "
            f"{self.equations} equations: the whole forward pass is computed twice, although "
            "jdynoff would move or derive what it recomputes. Remove it, and managing the step "
            "keeps the memory low at less cost."
            for source, count in self.checkpoints
            if count >= _POINTLESS_CHECKPOINT_SHARE * self.equations
            and self.equations >= _SMALLEST_PROGRAM
        ]


def _value(aval: Any, region: Region, producer: Operation | None, index: int) -> Value:
    return Value(aval, jax_compat.saveable_bytes(aval), region, producer, index)


def _read(environment: dict[Any, Operand], atom: Any) -> Operand:
    if jax_compat.is_literal(atom):
        return Constant(atom.val, atom.aval)
    return environment[atom]
