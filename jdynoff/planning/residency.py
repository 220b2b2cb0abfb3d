"""Which values still exist in XLA's memory once the sites of a plan are carried out.

Both the live-range simulation and the rewriter need it: a stack whose only reader takes its slices
from the manager is never built, and neither are the inner stacks that it was built from.
"""

from __future__ import annotations

import dataclasses

from jdynoff.planning.decisions import Decisions, Outer
from jdynoff.program.graph import Operand, Operation, Program, Region, Value
from jdynoff.program.structure import Leaf, Node, ScanNode, leaves


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Residency:
    """What XLA does not see any more."""

    # Operands that arrive as tokens, or are computed again, instead of as arrays.
    served: set[tuple[Operation, int]] = dataclasses.field(default_factory=set)
    # Results of control flow that nobody reads as arrays.
    dropped: set[Value] = dataclasses.field(default_factory=set)
    # Per region, the outputs that belong to dropped results of its operation.
    dead_outputs: dict[Region, set[int]] = dataclasses.field(default_factory=dict)
    # Values that exist only from their first use on: reloaded or computed again.
    late: set[Value] = dataclasses.field(default_factory=set)
    # What bodies of an operation compute from, although it is no operand of the operation.
    again: dict[Operation, list[Value]] = dataclasses.field(default_factory=dict)
    _readers: dict[Value, list[Operation]] = dataclasses.field(default_factory=dict)

    def read_again(self, operation: Operation, value: Value) -> None:
        """Records that bodies of `operation` compute from `value`, which is beside it."""
        self.again.setdefault(operation, []).append(value)
        self._readers.setdefault(value, []).append(operation)

    def operands(self, operation: Operation) -> list[Operand]:
        """What must be there when `operation` starts."""
        return [*operation.operands, *self.again.get(operation, ())]

    def reads(self, value: Value) -> list[Operation]:
        """Operations that read `value` as an array, in program order, each once."""
        if len(value.uses) == 1 and value not in self._readers:  # most values
            (use,) = value.uses
            return [] if use in self.served else [use[0]]
        operations = {
            operation.position: operation
            for operation, number in value.uses
            if (operation, number) not in self.served
        }
        operations.update(
            (operation.position, operation) for operation in self._readers.get(value, ())
        )
        return [operations[position] for position in sorted(operations)]

    def is_output(self, value: Value) -> bool:
        """Whether the region still returns `value` as an array."""
        if not value.output_positions:
            return False
        dead = self.dead_outputs.get(value.region, ())
        return any(position not in dead for position in value.output_positions)


def residency(program: Program, decisions: Decisions) -> Residency:
    """Follows the decisions' control flow once, from the outermost region inwards."""
    state = Residency()
    stored: set[object] = set()  # a stack that a site moves as a whole is built
    for site in decisions.sites:
        if site.carried_out:
            stored.update(leaf.produced for leaf in leaves(site.node))
        if site.kept or site.reach is None:
            continue
        _serve(site.reach, state)
    for rebuilt in decisions.rebuilt:
        _serve(rebuilt.node, state)
    for consumer, replay in decisions.replays.items():
        owner = consumer.owner
        for origin in replay.origins.values():
            if isinstance(origin, Outer) and isinstance(origin.operand, Value):
                value = origin.operand
                if (
                    owner is not None
                    and value.region is owner.region
                    and value.producer is not None
                ):
                    state.read_again(owner, value)
    for region in program.regions:
        for operation in region.operations:
            if operation.kind not in ("scan", "cond"):
                continue
            first = operation.spec.num_carry if operation.kind == "scan" else 0
            for value in operation.results[first:]:
                served = any(use in state.served for use in value.uses)
                dead = bool(value.output_positions) and not state.is_output(value)
                if value in stored or state.reads(value) or state.is_output(value):
                    continue
                if served or dead:
                    state.dropped.add(value)
                    for body in operation.bodies:
                        state.dead_outputs.setdefault(body, set()).add(value.index)
    return state


def _serve(node: Node, state: Residency) -> None:
    if isinstance(node, Leaf):
        state.late.update(node.consumed)
        return
    # Those of an added base have no operand for it.
    state.served.update(use for use in node.consumers if use[1] >= 0)
    inner = (node.inner,) if isinstance(node, ScanNode) else node.branches
    for child in inner:
        if child is not None:
            _serve(child, state)


def holds_calls(decisions: Decisions) -> set[Operation]:
    """Operations inside whose regions the rewritten program calls the manager."""
    found: set[Operation] = set()

    def mark(region: Region | None) -> None:
        while region is not None and region.owner is not None and region.owner not in found:
            found.add(region.owner)
            region = region.owner.region

    def visit(node: Node | None) -> None:
        if node is None or isinstance(node, Leaf):
            return
        for operation in (node.producer, *(use[0] for use in node.consumers)):
            found.add(operation)
            mark(operation.region)
        for child in (node.inner,) if isinstance(node, ScanNode) else node.branches:
            visit(child)

    for site in decisions.moved():
        visit(site.node)
        mark(site.region)
    for spill in decisions.spills:
        if spill.site is not None:
            mark(spill.value.region)
    return found
