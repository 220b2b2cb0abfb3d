"""How long what is computed again stays alive in the bodies that compute it.

The emitter computes a value again at its first use, with everything that it needs and that was not
computed again before. What two such chains share is alive from the first to the last of them: a
softmax that is computed to get at the activation after it waits for its own backward pass.

The trap: values that only one chain uses are not counted. XLA fuses most of them, and the others
are gone before the next chain starts.
"""

from __future__ import annotations

import dataclasses

from jdynoff.planning.decisions import Decisions, Replay
from jdynoff.planning.residency import Residency
from jdynoff.program.graph import Operation, Region, Value


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Positions in a region, both included, between which some bytes are alive."""

    first: int
    last: int
    nbytes: int


def rebuilt_ranges(decisions: Decisions, residency: Residency) -> dict[Region, list[Range]]:
    """The ranges of values that are computed again, by the region that does it."""
    asked = decisions.asked()
    uses: dict[Region, list[tuple[int, Value]]] = {}
    for consumer, replay in decisions.replays.items():
        own = uses[consumer] = [(owner.position, value) for owner, value in asked.get(consumer, ())]
        for consumed, produced in replay.rebuilds.items():
            positions = [operation.position for operation in residency.reads(consumed)]
            if residency.is_output(consumed):
                positions.append(len(consumer.operations))
            own.extend((position, produced) for position in positions)
    return {
        consumer: _ranges(decisions.replays[consumer], own) for consumer, own in uses.items() if own
    }


def _ranges(replay: Replay, uses: list[tuple[int, Value]]) -> list[Range]:
    made: dict[Value, int] = {}
    last: dict[Value, int] = {}
    done: set[Operation] = set()
    counted: dict[Value, tuple[int, int]] = {}  # targets, from their first to their last reader
    targets = set(replay.rebuilds.values())
    for position, target in sorted(uses, key=lambda use: use[0]):
        if target in targets:
            counted[target] = (counted.get(target, (position, 0))[0], position)
        waiting = [target]
        while waiting:
            value = waiting.pop()
            last[value] = position
            operation = value.producer
            if value in replay.origins or operation is None or operation in done:
                continue
            done.add(operation)
            made.update((result, position) for result in operation.results)
            waiting.extend(operand for operand in operation.operands if isinstance(operand, Value))
    ranges: list[Range] = []
    for value, first in made.items():
        end = last.get(value, first)
        if value in counted:  # there it is an input of the region, which is counted anyway
            begins, ends = counted[value]
            ranges.append(Range(first, begins - 1, value.nbytes))
            ranges.append(Range(ends + 1, end, value.nbytes))
        elif end > first:
            ranges.append(Range(first, end, value.nbytes))
    return [found for found in ranges if found.nbytes and found.last >= found.first]
