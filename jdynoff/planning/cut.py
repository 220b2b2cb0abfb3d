"""Which values to store and which to compute again: a minimum cut, exact for a given price.

Every value that a residual depends on may be stored, at the price of its bytes, or computed again
from its operands, at the cost of its operation; both count once for each time that their body runs.
The cheapest choice that makes all residuals available is a minimum cut (project selection, Picard
1976): the value lies on the source's side if the consumer needs it, its operation if the consumer
computes it again. All pairs of bodies of a region are one network, since an inner body may start
from what the body around it computes again.

The trap: capacities are 32-bit integers. They are scaled so that everything stored together is just
below the limit; what costs less than one unit costs one, or whole chains of cheap operations would
be free and as long as the step.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from scipy.sparse import csr_array  # SciPy comes with JAX
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from jdynoff.errors import ConfigurationError
from jdynoff.planning.cost import flops
from jdynoff.planning.pairs import Pair, Pairs
from jdynoff.planning.pins import Action, Pins
from jdynoff.planning.recompute import can_replay
from jdynoff.program.graph import Operation, Region, Value
from jdynoff.program.structure import is_stacked

# The least worth of a byte in FLOPs: an element may be computed again by as many elementwise
# operations as it has bytes, times this.
_LEAST_WORTH = 4.0
_MOST_WORTH = 1e12
# What a transfer costs beside its bytes, in bytes.
_CALL_BYTES = 4096
_FORBIDDEN = 1e30  # a store that the user does not want: finite, so that there is always a cut
_SOURCE, _SINK = 0, 1
_UNLIMITED = 2**31 - 1
_MOST_UNITS = 2**30

Needed = tuple[Pair, Value]


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Cut:
    """What the consumers need: stored, or computed again. In the order of discovery."""

    stored: dict[Needed, None]
    computed: dict[Needed, None]  # values that follow from others, or from outside


class Network:
    """The values that residuals depend on, with what it costs to store or to compute each."""

    def __init__(
        self,
        residuals: Sequence[Needed],
        pairs: Pairs,
        price: float,
        pins: Pins | None = None,
        spread: float = 0.0,
    ) -> None:
        """Follows the residuals back to where nothing can be computed again.

        Args:
          residuals: what the consumers of pairs need.
          pairs: of one region.
          price: FLOPs that are paid rather than store one byte.
          pins: the user's actions.
          spread: by which share the price falls over a body, first operation to last. Products of
            one width cost the same a byte and would all change sides at one price; with a spread a
            price in between divides them.
        """
        self.residuals = dict.fromkeys(residuals)
        self.pairs = pairs
        self.price = price
        self.spread = spread if _LEAST_WORTH < price < math.inf else 0.0
        self.pins = pins or {}
        self.worth = max(min(price, _MOST_WORTH), _LEAST_WORTH)
        self.needed: dict[Needed, int] = {}  # vertex of a value
        self.made: dict[tuple[Pair, Operation], int] = {}  # vertex of a computation
        self.edges: dict[tuple[int, int], float] = {}
        self.count = 2
        waiting: list[Needed] = []
        for node in self.residuals:
            self.edges[_SOURCE, self.value(node, waiting)] = math.inf
        while waiting:
            self.expand(waiting.pop(), waiting)

    def action(self, value: Value) -> Action | None:
        """The user's action for a value."""
        return None if value.producer is None else self.pins.get(value.producer)

    def vertex(self) -> int:
        """A new vertex."""
        self.count += 1
        return self.count - 1

    def value(self, node: Needed, waiting: list[Needed]) -> int:
        """The vertex of a value, which waits to be expanded if it is new."""
        if node not in self.needed:
            self.needed[node] = self.vertex()
            waiting.append(node)
        return self.needed[node]

    def store_cost(self, node: Needed) -> float:
        """What storing a value costs; infinite where it cannot be.

        Nothing where the user wants it: of equal cuts the one nearest the source is taken, so it is
        stored even if computing it again is as cheap.
        """
        _, value = node
        if node not in self.residuals and (
            value.nbytes == 0
            or value in self.pairs.hidden
            or is_stacked(value)  # need not be built at all
        ):
            return math.inf
        action = self.action(value)
        if action is not None:
            return _FORBIDDEN if action == "recompute" else 0.0
        return self.price_of(node)

    def price_of(self, node: Needed) -> float:
        """What storing a value is worth, whatever the user decides."""
        pair, value = node
        place = 0.0
        if value.producer is not None:
            place = value.producer.position / len(pair.producer.operations)
        worth = max(self.worth * (1 + self.spread * (0.5 - place)), _LEAST_WORTH)
        return worth * (value.nbytes + _CALL_BYTES) * expected_executions(pair.producer)

    def expand(self, node: Needed, waiting: list[Needed]) -> None:
        """Adds the two ways to a value: its store, and its computation."""
        pair, value = node
        here, store = self.needed[node], self.store_cost(node)
        operation = value.producer
        if operation is None:
            if self.pairs.free_origin(pair, value) is not None:
                return
            outer = self.pairs.around_operand(pair, value)
            if outer is None or pair.around is None or not self.may_follow(outer):
                self.edges[here, _SINK] = store
            else:
                self.edges[here, self.value((pair.around, outer), waiting)] = store
            return
        price = math.inf if self.action(value) == "recompute" else self.price
        if not can_replay(operation, price):
            self.edges[here, _SINK] = store
            return
        known = (pair, operation)
        if known not in self.made:
            made = self.made[known] = self.vertex()
            self.edges[made, _SINK] = flops(operation) * expected_executions(pair.producer)
            for operand in operation.operands:
                if isinstance(operand, Value):
                    self.edges[made, self.value((pair, operand), waiting)] = math.inf
        self.edges[here, self.made[known]] = store

    def may_follow(self, value: Value) -> bool:
        """Whether an inner body may get `value` of the body around it: no stack, no token."""
        if value.producer is None:
            return value not in self.pairs.hidden
        return value.producer.kind == "plain"

    def solve(self) -> Cut:
        """The cheapest choice: every residual, and what it is computed from.

        Raises:
          ConfigurationError: if a residual that is to be computed again cannot be.
        """
        if not self.residuals:
            return Cut({}, {})
        reached = self.source_side()
        found = Cut({}, {})
        for node, vertex in self.needed.items():
            if not reached[vertex]:
                continue
            pair, value = node
            if value.producer is not None:
                made = self.made.get((pair, value.producer))
                computed = made is not None and bool(reached[made])
            elif self.pairs.free_origin(pair, value) is not None:
                computed = True
            else:
                outer, around = self.pairs.around_operand(pair, value), pair.around
                computed = False
                if outer is not None and around is not None and (around, outer) in self.needed:
                    computed = bool(reached[self.needed[around, outer]])
            (found.computed if computed else found.stored)[node] = None
            if not computed and self.action(value) == "recompute":
                raise ConfigurationError(
                    f"actions= says recompute for a {value.aval} made at "
                    f"{value.producer.source if value.producer else 'the top'}, but it depends on "
                    "what cannot be computed again (a loop, a callback, or a loop's carry). Remove "
                    "that pattern, or choose offload or keep."
                )
        return found

    def source_side(self) -> np.ndarray:
        """Whether each vertex lies on the source's side of the smallest minimum cut."""
        total = sum(self.price_of(node) for node in self.residuals)
        scale = _MOST_UNITS / max(total, 1.0)
        ends = np.array(list(self.edges), np.int32).reshape(-1, 2)
        costs = np.array(list(self.edges.values()))
        # What is finite stays below what is not, or the source's own edges might be cut.
        units = np.clip(np.ceil(costs * scale), 1, _UNLIMITED // 2)
        units = np.where(np.isinf(costs), _UNLIMITED, units).astype(np.int32)
        graph = csr_array((units, (ends[:, 0], ends[:, 1])), shape=(self.count, self.count))
        flow = maximum_flow(graph, _SOURCE, _SINK).flow
        left = csr_array(graph - flow)
        left.eliminate_zeros()
        reached = np.zeros(self.count, bool)
        reached[breadth_first_order(left, _SOURCE, return_predecessors=False)] = True
        return reached


def expected_executions(region: Region) -> float:
    """How often a region runs in one step if every branch of a conditional is as likely.

    So a value that one branch needs is stored in that branch, not before it is chosen.
    """
    count = 1.0
    while region.owner is not None:
        if region.owner.kind == "scan":
            count *= region.owner.spec.length
        elif region.owner.kind == "cond":
            count /= len(region.owner.bodies)
        region = region.owner.region
    return count
