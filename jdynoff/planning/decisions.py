"""What the planner tells the rewriter: which values leave XLA, where, and how they come back.

The rewriter reads these tables and decides nothing. All of them are keyed by the objects of one
`Program`, so decisions belong to that program only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jdynoff.planning.pins import Action, Pins
from jdynoff.program.graph import Operand, Operation, Region, Value
from jdynoff.program.structure import Node


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Site:
    """One offload/reload pair of the rewritten program."""

    value: Value | None  # the value at the level of the pair; None for an added base
    leaf: Operand  # the array that is moved
    node: Node | None  # the control flow it is moved through; None for straight-line code
    reach: Node | None  # the same with the readers that compute it again
    region: Region  # where the pair meets
    aval: Any  # of one entry
    entry_bytes: int
    entries: int  # at most, in one step
    source: str  # file:line of the code that made it
    reason: str
    # Reloads of one entry before it is freed, by leaf: branches differ in their readers, and evict
    # independently what they have reloaded.
    readers: dict[Operand, int] = dataclasses.field(default_factory=dict)
    identifier: int = 0  # content hash, set by `number_sites`
    kept: bool = False  # left to XLA by the budget

    @property
    def carried_out(self) -> bool:
        """Whether tokens stand for its values; those of an added base do so also where it stays."""
        return self.node is not None and (not self.kept or self.value is None)

    @property
    def total_bytes(self) -> int:
        """Most bytes that the site holds at once in one step."""
        return self.entry_bytes * self.entries

    @property
    def most_readers(self) -> int:
        """Most reloads of any one entry."""
        return max(self.readers.values(), default=1)

    def readers_of(self, leaf: Operand) -> int:
        """Reloads of an entry that was made as `leaf`."""
        return self.readers.get(leaf, 1)


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Rebuild:
    """A residual that its consumers compute again instead of receiving it."""

    leaf: Operand  # the array, where it is made
    node: Node  # the control flow between the two
    entry_bytes: int
    entries: int
    source: str
    reason: str


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Own:
    """A value of the producing region that the consuming region has under another name."""

    value: Value


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Outer:
    """A value of the producing region that is re-read outside of it.

    `operand` is an argument of the step, a constant, an operand of the producer in the region
    where both sides meet, or, one level further in, a value of the producing region around.
    """

    operand: Operand
    scanned: bool


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Stored:
    """A value of the producing region that a site of its own brings over."""

    site: Site


Origin = Own | Outer | Stored


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Replay:
    """How a consuming region gets at the values of its producing region."""

    producer: Region
    consumer: Region
    origins: dict[Value, Origin] = dataclasses.field(default_factory=dict)
    rebuilds: dict[Value, Value] = dataclasses.field(default_factory=dict)  # consumed -> produced


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Spill:
    """A straight-line value that leaves XLA between two of its uses."""

    site: Site | None  # None: computed again from `anchors`
    value: Value
    evictions: list[Operation]  # the value leaves XLA after each of these, until its next use
    anchors: tuple[Value, ...] = ()  # what is there, or reloaded, when it is needed again
    fused: bool = False  # never built, and computed where it is read in any case


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Decisions:
    """Everything the rewriter has to know."""

    sites: list[Site] = dataclasses.field(default_factory=list)
    rebuilt: list[Rebuild] = dataclasses.field(default_factory=list)
    replays: dict[Region, Replay] = dataclasses.field(default_factory=dict)  # by consumer
    spills: list[Spill] = dataclasses.field(default_factory=list)
    min_bytes: int = 0
    price: float = 0.0  # FLOPs paid for computing again rather than move one byte
    loops: bool = False  # the step has loops that keep values on the manager's stacks
    pins: Pins = dataclasses.field(default_factory=dict)  # what the user decided

    def pinned(self, value: Operand | None) -> Action | None:
        """The user's action for a value."""
        producer = value.producer if isinstance(value, Value) else None
        return None if producer is None else self.pins.get(producer)

    def asked(self) -> dict[Region, list[tuple[Operation, Value]]]:
        """By consuming body, what its replay makes for replays further in, and for which operation.

        The values are named as the producing body names them.
        """
        found: dict[Region, list[tuple[Operation, Value]]] = {}
        for consumer, replay in self.replays.items():
            owner = consumer.owner
            around = None if owner is None else self.replays.get(owner.region)
            if owner is None or around is None:
                continue
            for origin in replay.origins.values():
                operand = origin.operand if isinstance(origin, Outer) else None
                if isinstance(operand, Value) and operand.region is around.producer:
                    found.setdefault(owner.region, []).append((owner, operand))
        return found

    def moved(self) -> list[Site]:
        """The sites whose values the manager takes."""
        return [site for site in self.sites if not site.kept]

    def calls_manager(self) -> bool:
        """Whether the step needs a ticket."""
        return self.loops or bool(self.moved())
