"""Blocks and paths: which bodies of a step's control flow run how often.

A *block* is a scan body, a branch or a loop body. How often it runs is fixed by the program
(scans), follows from another block's count (the backward pass takes the branches that the forward
pass took), or is known only when the step has run: then its operation is *counted*, and the
rewritten step returns the counters. The *path* of a step is every block's count.

Whether two conditionals take the same branches is decided by numbering values: two values have one
number if they are provably the same arrays, or the same stack of arrays read slice by slice. So a
branch of the backward pass is found again behind stacked predicates, casts and `jax.checkpoint`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from jdynoff import jax_compat
from jdynoff.program.graph import Operand, Operation, Program, Region, Value
from jdynoff.program.structure import is_scanned, is_stacked, outer_operand


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Block:
    """One body of control flow.

    Attributes:
      name: unique in the program and the same in every process: `file.py:12 branch 1`.
      region: the body; None for a `jdynoff.while_loop`, which is opaque.
      source: file:line of its control flow.
      parent: the block around it; None for one in the step itself.
      times: how often it runs for each run of its parent; None where that is counted.
      counter: the counted operation whose counter tells, and the position in it; for a twin, those
        of the block that it follows. None where `times` is known.
      is_twin: whether it follows another block.
      most: how often it can run in one step; None if nothing bounds it.
    """

    name: str
    region: Region | None
    source: str
    parent: Block | None
    times: int | None
    counter: tuple[Operation, int] | None
    is_twin: bool
    most: int | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Blocks:
    """All blocks of a program, outermost first, and what has to be counted."""

    blocks: tuple[Block, ...]
    counted: Mapping[Operation, int]  # operation -> length of its counter, in program order

    @property
    def learned(self) -> tuple[Block, ...]:
        """The blocks whose counts nothing but the step tells, in the order of their counters."""
        return tuple(
            block for block in self.blocks if block.counter is not None and not block.is_twin
        )

    def path(self, counters: Sequence[int]) -> dict[Block, int]:
        """The count of every block.

        Args:
          counters: of the learned blocks, in their order.
        """
        known = dict(zip((block.counter for block in self.learned), counters, strict=True))
        found: dict[Block, int] = {}
        for block in self.blocks:
            if block.times is not None:
                around = 1 if block.parent is None else found[block.parent]
                found[block] = block.times * around
            else:
                found[block] = int(known[block.counter])
        return found


def find_blocks(program: Program) -> Blocks:
    """Names every block and tells which operations must be counted; linear."""
    numbering = _Numbering()
    counted: dict[Operation, int] = {}
    first: dict[Hashable, Operation] = {}  # by what decides its path
    by_region: dict[Region, Block] = {}
    blocks: list[Block] = []
    names: dict[str, int] = {}

    def add(operation: Operation, body: Region | None, role: str, leader: Operation) -> None:
        around = by_region.get(operation.region)
        name = f"{_short(operation)} {role}"
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name} #{names[name]}"
        scanned = operation.kind == "scan"
        position = operation.bodies.index(body) if operation.kind == "cond" and body else 0
        block = Block(
            name=name,
            region=body,
            source=operation.source,
            parent=around,
            times=operation.spec.length if scanned else None,
            counter=None if scanned else (leader, position),
            is_twin=leader is not operation and not scanned,
            most=_most(operation, around),
        )
        blocks.append(block)
        if body is not None:
            by_region[body] = block

    for region in program.regions:
        for operation in region.operations:
            if operation.kind not in ("scan", "cond", "while", "loop"):
                continue
            if region.in_predicate:
                continue
            if operation.kind == "loop":
                if jax_compat.counts_trips(operation.eqn):
                    counted[operation] = 1
                    add(operation, None, "loop", operation)
                continue
            leader = first.setdefault(numbering.control(operation), operation)
            if operation.kind != "scan" and leader is operation:
                counted[operation] = len(operation.bodies) if operation.kind == "cond" else 1
            for body in operation.bodies:
                if body.role != "while cond":
                    add(operation, body, body.role, leader)
    return Blocks(tuple(blocks), counted)


def _most(operation: Operation, around: Block | None) -> int | None:
    """The largest count of a body of `operation`."""
    outside = 1 if around is None else around.most
    if outside is None or operation.kind in ("while", "loop"):
        return None
    return outside * (operation.spec.length if operation.kind == "scan" else 1)


def _short(operation: Operation) -> str:
    file, _, line = operation.source.rpartition(":")
    return f"{PurePath(file).name}:{line}" if file else operation.source or "the step"


class _Numbering:
    """Numbers that are equal only for values that are provably the same."""

    def __init__(self) -> None:
        self.numbers: dict[Hashable, int] = {}
        self.of_value: dict[Value, int] = {}
        self.of_region: dict[Region, Hashable] = {}
        self.resolved: dict[Value, Operand] = {}

    def control(self, operation: Operation) -> Hashable:
        """What decides which bodies of a control-flow operation run, and how often."""
        around = self.region(operation.region)
        if operation.kind == "scan":
            return around, "scan", operation.spec.length
        if operation.kind == "cond":
            return around, "cond", len(operation.bodies), self.value(operation.operands[0])
        return operation

    def region(self, region: Region) -> Hashable:
        """What decides how often a region runs."""
        known = self.of_region.get(region)
        if known is None:
            owner = region.owner
            key = (
                ()
                if owner is None
                else (self.control(owner), 0 if owner.kind == "scan" else region.role)
            )
            known = self.of_region[region] = self._number(("region", key))
        return known

    def value(self, operand: Operand) -> int:
        """The number of a value. Not recursive: a predicate may follow from thousands of values."""
        operand = self.resolve(operand)
        if not isinstance(operand, Value):
            return self._number(_constant(operand))
        waiting = [operand]
        while waiting:
            value = waiting[-1]
            if value in self.of_value:
                waiting.pop()
                continue
            sources = [self.resolve(source) for source in _sources(value)]
            missing = [
                source
                for source in sources
                if isinstance(source, Value) and source not in self.of_value
            ]
            if missing:
                waiting.extend(missing)
                continue
            waiting.pop()
            self.of_value[value] = self._conclude(value, sources)
        return self.of_value[operand]

    def resolve(self, operand: Operand) -> Operand:
        """The value, as near to where it is made as can be proved, that `operand` is the same as.

        A slice of a stack is the result of the scan body that made it; what a conditional returns
        to a branch of another one on the same predicate is what its own branch made.
        """
        start = operand
        while isinstance(operand, Value):
            if operand in self.resolved:
                operand = self.resolved[operand]
                break
            producer = operand.producer
            if producer is not None:
                if producer.kind != "barrier":
                    break
                operand = producer.operands[operand.index]
                continue
            owner = operand.region.owner
            if owner is None:
                break
            branch = owner.bodies.index(operand.region)
            outside = outer_operand(owner, branch, operand.index)
            if outside is None:
                break
            outside = self.resolve(outside)
            made = outside.producer if isinstance(outside, Value) else None
            if owner.kind == "scan" and is_scanned(owner, operand.index):
                if made is None or not isinstance(outside, Value) or not is_stacked(outside):
                    break
                # Made at the same place of a nest of loops of the same lengths, and not by a loop
                # whose slices this one takes all of in each iteration of a loop around it.
                if self.region(made.bodies[0]) != self.region(operand.region):
                    break
                operand = made.bodies[0].outputs[outside.index]
                continue
            if owner.kind == "cond" and made is not None and made.kind == "cond":
                assert isinstance(outside, Value)
                if self.control(made) == self.control(owner):
                    operand = made.bodies[branch].outputs[outside.index]
                    continue
            operand = outside
        if isinstance(start, Value):
            self.resolved[start] = operand
        return operand

    def _conclude(self, value: Value, sources: list[Operand]) -> int:
        """The number of a resolved value whose sources have theirs."""
        numbers = tuple(
            self.of_value[source] if isinstance(source, Value) else self._number(_constant(source))
            for source in sources
        )
        producer = value.producer
        if producer is None:
            # Of several loops in a nest, the one that takes the slices.
            slicing = self.region(value.region)
            return self._number(("slice", slicing, *numbers) if numbers else value)
        params = jax_compat.comparable_params(producer.eqn) if _is_plain(producer) else None
        if params is None:
            return self._number(value)
        return self._number((producer.name, value.index, params, numbers))

    def _number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


def _is_plain(operation: Operation) -> bool:
    return operation.kind == "plain" and not operation.bodies


def _sources(value: Value) -> list[Operand]:
    """What a resolved value follows from: operands, or the stack that it is a slice of."""
    if value.producer is not None:
        return value.producer.operands if _is_plain(value.producer) else []
    owner = value.region.owner
    if owner is None or not is_scanned(owner, value.index):
        return []
    stack = outer_operand(owner, 0, value.index)
    return [] if stack is None else [stack]


def _constant(operand: Any) -> Hashable:
    value = operand.value
    if getattr(value, "shape", ()) == ():
        return "scalar", str(operand.aval.dtype), str(value)
    return "constant", id(value)


__all__ = ["Block", "Blocks", "find_blocks"]
