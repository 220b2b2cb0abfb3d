"""The traced step as an indexed graph, for every later stage.

A jaxpr answers "what are the operands of this equation" but not "who uses this value", and it
hides straight-line code behind calls. `Program` is the same program with calls in place and both
directions indexed, so that every later pass is linear. Since everything refers to everything, no
class of the graph, or of the tables about it, has a generated `repr`: an exception that names one
value would print the program many times over.

The trap: a `Value` belongs to exactly one region. A scan body's input is a different value from
the array that the scan slices; only the structures of `program.structure` relate the two.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Value:
    """One array in one region: a region input, a constant, or a result of an operation."""

    aval: Any
    nbytes: int  # 0 where the value is not plain bytes (PRNG keys, tokens)
    region: Region
    producer: Operation | None = None  # None for inputs and constants of the region
    index: int = 0  # result number of `producer`, or input number of `region`
    uses: list[tuple[Operation, int]] = dataclasses.field(default_factory=list)
    output_positions: list[int] = dataclasses.field(default_factory=list)  # of `region`

    def __repr__(self) -> str:
        made = "input" if self.producer is None else self.producer.name
        return f"<{made} {self.index}: {self.aval}>"


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Constant:
    """A literal or a captured constant: available everywhere, never moved."""

    value: Any
    aval: Any


Operand = Value | Constant


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Operation:
    """One equation: what it reads, what it makes, and the regions it runs."""

    eqn: Any
    name: str
    kind: str  # "plain", "scan", "cond", "while", "barrier", or "loop": of `jdynoff.while_loop`
    operands: list[Operand]
    results: list[Value]
    region: Region
    position: int  # in `region.operations`
    bodies: tuple[Region, ...] = ()
    spec: Any = None  # ScanSpec or WhileSpec
    source: str = ""  # file:line
    _touched_bytes: int = -1

    def touched_bytes(self) -> int:
        """Bytes of all that it reads and makes."""
        if self._touched_bytes < 0:
            read = sum(value.nbytes for value in self.operands if isinstance(value, Value))
            self._touched_bytes = read + sum(value.nbytes for value in self.results)
        return self._touched_bytes

    def __repr__(self) -> str:
        return f"<{self.name} at {self.source}>"


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Region:
    """A straight line of operations: the step itself, a scan body, a branch, a while body."""

    owner: Operation | None
    role: str  # "step", "scan", "branch 0", "while cond", "while body"
    inputs: list[Value] = dataclasses.field(default_factory=list)
    operations: list[Operation] = dataclasses.field(default_factory=list)
    outputs: list[Operand] = dataclasses.field(default_factory=list)

    @property
    def in_predicate(self) -> bool:
        """Whether it belongs to a loop's predicate, which cannot carry a serial out."""
        region = self
        while region.owner is not None and region.role != "while cond":
            region = region.owner.region
        return region.owner is not None


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Program:
    """A whole traced step."""

    top: Region
    regions: list[Region]  # outermost first
    loops: list[Operation]  # that keep values on stacks of the manager, however many
    warnings: list[str]  # constructs that make managing pointless, with their source line
