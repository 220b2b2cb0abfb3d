"""Predicate slicing: counts that need no prediction, since they can be computed beforehand.

What a branch index or a loop's predicate follows from is often little: a mask, a length, a random
draw. The step's counters are traced as a program of their own; without the dead code of each
counter it holds what that counter needs and nothing else. Where that costs next to nothing, it is
evaluated at the start of the step, and the count is exact.

The trap: a slice may hold what must not run twice (a callback) or takes nobody knows how long (a
loop whose length depends on data).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from jdynoff import jax_compat
from jdynoff.planning.decisions import Decisions
from jdynoff.planning.machine import Machine
from jdynoff.planning.predict import Model
from jdynoff.program.blocks import Blocks
from jdynoff.program.build import build
from jdynoff.program.graph import Operation, Program, Region
from jdynoff.rewrite.emit import emit

# Of the predicted time of the step, all slices together.
_CHEAP_SHARE = 0.01
# A loop whose length is not known is taken for one of so many trips.
_TRIPS = 1000
# Each slice is a pass over the program.
_MOST_SLICES = 64


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Slice:
    """The computation of one operation's counter from the step's arguments.

    Attributes:
      operation: the counted operation.
      seconds: predicted time of the slice.
      share: of the step's.
    """

    operation: Operation
    seconds: float
    share: float
    _jaxpr: Any
    _inputs: tuple[int, ...]

    def evaluate(self, arguments: Sequence[Any]) -> jax.Array:
        """The counter, i32[n], from the step's flat arguments. Traceable."""
        chosen = [arguments[number] for number in self._inputs]
        return jax_compat.evaluate(self._jaxpr, *chosen)[0]


def find_slices(program: Program, blocks: Blocks, machine: Machine) -> dict[Operation, Slice]:
    """The counted operations whose counters are cheap to compute at the start of the step."""
    counted = list(blocks.counted)[:_MOST_SLICES]
    if not counted:
        return {}
    total = Model(program, machine).compute_seconds

    def counters(*arguments: Any) -> list[Any]:
        emitted = emit(program, Decisions(), None, arguments, counted=blocks.counted)
        return [emitted.counters[operation] for operation in counted]

    whole = jax_compat.trace(counters, [value.aval for value in program.top.inputs])
    found: list[Slice] = []
    for number, operation in enumerate(counted):
        jaxpr, inputs = jax_compat.needed_for(whole, number)
        part = build(jaxpr)
        inside = [one for region in part.regions for one in region.operations]
        # A `jdynoff.while_loop` that keeps its trips would keep them twice.
        if any(one.kind == "loop" or not _is_pure(one) for one in inside):
            continue
        seconds = Model(part, machine).compute_seconds
        seconds *= _TRIPS ** max((_whiles_around(region) for region in part.regions), default=0)
        share = seconds / max(total, 1e-12)
        found.append(Slice(operation, seconds, share, jaxpr, tuple(inputs)))
    # The cheapest first, as long as all of them together are cheap.
    chosen: dict[Operation, Slice] = {}
    left = _CHEAP_SHARE
    for piece in sorted(found, key=lambda piece: piece.share):
        if piece.share > left:
            break
        chosen[piece.operation] = piece
        left -= piece.share
    return chosen


def _is_pure(operation: Operation) -> bool:
    return bool(operation.bodies) or jax_compat.is_repeatable(operation.eqn)


def _whiles_around(region: Region) -> int:
    count = 0
    while region.owner is not None:
        count += region.owner.kind == "while"
        region = region.owner.region
    return count


__all__ = ["Slice", "find_slices"]
