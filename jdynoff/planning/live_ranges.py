"""Simulates the device peak of a program, and finds what must leave XLA to keep it low.

The simulation walks a region in program order and adds up what is alive. Where that exceeds the
allowance, the value whose next use is farthest away leaves XLA until then (Belady 1966: for equal
sizes no choice causes fewer transfers). Control flow is entered: a loop's body may use what the
values around the loop leave free.

The trap: XLA fuses and schedules by rules of its own, which `fusion` follows only in outline. The
figure serves to choose; XLA's own `memory_analysis()` decides.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import math

from jdynoff.planning.decisions import Decisions, Site, Spill
from jdynoff.planning.fusion import MOST_ROOT_BYTES, Fusion
from jdynoff.planning.rebuilt_ranges import Range, rebuilt_ranges
from jdynoff.planning.recompute import is_cheap, is_elementwise
from jdynoff.planning.residency import Residency
from jdynoff.program.graph import Operation, Program, Region, Value
from jdynoff.program.structure import Leaf, leaves, root

# A value whose next use is closer than this many operations is not worth moving: XLA may run the
# operations in between in another order or as one.
_MIN_GAP_OPERATIONS = 6
# A value is computed again from others only if they come back within this many operations: they
# are then alive together anyway.
_ANCHOR_WINDOW = 64
_MOST_REPLAYED = 64  # operations


@dataclasses.dataclass(frozen=True)
class LiveTensor:
    """One array alive at the simulated peak."""

    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    source: str


@dataclasses.dataclass(eq=False, repr=False)
class Simulation:
    """Live ranges of one program under one set of decisions."""

    program: Program
    decisions: Decisions
    residency: Residency
    # For the least memory, all that is counted as built may be built, and moved or computed again:
    # where little is alive, one array is less than the two that it is fused from.
    fuses: bool = True

    def __post_init__(self) -> None:
        self.spilled_peak = 0
        self._totals: dict[Region, list[int]] = {}
        self._takers: dict[Value, Operation | None] = {}
        self._inside: dict[Value, bool] = {}  # values of the step that are made into a result
        self._peaks: dict[Region, int] = {}
        self._bounds: dict[Region, int] = {}
        self._site_of: dict[Value, tuple[Site, Leaf]] = {}
        for site in self.decisions.moved():
            for leaf in leaves(site.node):
                for value in leaf.consumed:
                    self._site_of[value] = site, leaf
        self._extras = self._extra()
        self._fusion = Fusion(self.residency, self._built(), fuses=self.fuses)

    def _built(self) -> set[Value]:
        """Values that transfers, computing again or the user need as arrays."""
        built = {result for operation in self.decisions.pins for result in operation.results}
        for site in self.decisions.moved():
            produced = (leaf.produced for leaf in leaves(site.node))
            built.update(value for value in produced if isinstance(value, Value))
        return built

    def _extra(self) -> dict[Region, list[Range]]:
        """What takes memory although the program has no value for it."""
        extra = rebuilt_ranges(self.decisions, self.residency)
        for site in self.decisions.sites:
            # The stack of an added base that the budget leaves to XLA.
            node = site.reach or site.node
            if site.kept and site.value is None and not (node is None or isinstance(node, Leaf)):
                first = node.producer.position
                last = max(use[0].position for use in node.consumers)
                extra.setdefault(site.region, []).append(Range(first, last, site.total_bytes))
        return extra

    def lower_bound(self, region: Region | None = None) -> int:
        """The allowance that no spilling can undercut: operands and results of one operation."""
        region = region or self.program.top
        if region not in self._bounds:
            bound = 0
            for operation in region.operations:
                # What is behind fused operands is at most so many times as large as they are.
                if not operation.bodies and MOST_ROOT_BYTES * operation.touched_bytes() <= bound:
                    continue
                operands = self._fusion.operands(operation)
                needed = sum(operand.nbytes for operand in operands if self._counts(operand))
                needed += self._made(operation)
                needed += max((self.lower_bound(body) for body in operation.bodies), default=0)
                bound = max(bound, needed)
            self._bounds[region] = bound
        return self._bounds[region]

    def peak(self, region: Region | None = None) -> int:
        """Most bytes alive at once in `region`, without spilling."""
        region = region or self.program.top
        if region not in self._peaks:
            self._peaks[region], _ = self._walk(region)
        return self._peaks[region]

    def spill(self, allowance: int) -> list[Spill]:
        """Chooses what leaves XLA so that the simulated peak stays within `allowance` bytes.

        Where that is impossible, it comes as near as it can; `spilled_peak` says how near.
        """
        spills: list[Spill] = []
        self.spilled_peak = self._spill(self.program.top, allowance, spills)
        return spills

    def totals(self, region: Region) -> list[int]:
        """Bytes alive at each operation of a region, without what its bodies add."""
        self.peak(region)
        return self._totals[region]

    def largest_at_peak(self, count: int = 10) -> list[LiveTensor]:
        """The largest arrays alive where the simulated peak is reached, outermost first."""
        found: list[LiveTensor] = []
        region = self.program.top
        while True:
            _, position = self._walk(region)
            if position is None:
                break
            operation = region.operations[position]
            found.extend(self._alive_at(region, position))
            bodies = sorted(operation.bodies, key=self.peak)
            if not bodies:
                break
            region = bodies[-1]
        return sorted(found, key=lambda tensor: -tensor.nbytes)[:count]

    def _alive_at(self, region: Region, position: int) -> list[LiveTensor]:
        alive = []
        for value in self._values(region):
            first, last = self._range(value)
            if first <= position <= last:
                alive.append(
                    LiveTensor(
                        tuple(value.aval.shape),
                        str(value.aval.dtype),
                        value.nbytes,
                        value.producer.source if value.producer is not None else "",
                    )
                )
        return alive

    def _counts(self, value: Value) -> bool:
        """Whether a value occupies memory of its own in its region."""
        if value in self.residency.dropped or value.nbytes == 0 or self._fusion.is_fused(value):
            return False
        if value.producer is None:
            owner = value.region.owner
            scanned = (
                owner is not None
                and owner.kind == "scan"
                and value.index >= owner.spec.num_consts + owner.spec.num_carry
            )
            # What nothing reads as an array is a token here.
            return (scanned or value in self.residency.late) and bool(self._positions(value))
        # The step's outputs have buffers of their own, counted apart, and what an output is made
        # from in place has the same one.
        return not (self._is_result(value) or self._in_result(value))

    def _is_result(self, value: Value) -> bool:
        return value.region.owner is None and bool(value.output_positions)

    def _in_result(self, value: Value) -> bool:
        if value.region.owner is not None:
            return False
        chain: list[Value] = []
        inside: bool | None = None
        while inside is None:
            inside = self._inside.get(value)
            if inside is None:
                chain.append(value)
                taker = self._taker(value)
                if taker is None or self._is_result(taker.results[0]):
                    inside = taker is not None
                else:
                    value = taker.results[0]
        self._inside.update(dict.fromkeys(chain, inside))
        return inside

    def _taker(self, value: Value) -> Operation | None:
        """The elementwise operation whose result takes the place of `value`, which dies there."""
        if value not in self._takers:
            self._takers[value] = self._find_taker(value)
        return self._takers[value]

    def _find_taker(self, value: Value) -> Operation | None:
        positions = self._positions(value)
        operations = value.region.operations
        if value.producer is None or not positions or positions[-1] == len(operations):
            return None
        last = operations[positions[-1]]
        if not is_elementwise(last) or last.results[0].nbytes != value.nbytes:
            return None
        for operand in self._fusion.operands(last):
            if operand.nbytes == value.nbytes:
                if operand is value:
                    return last
                if self._positions(operand)[-1:] == positions[-1:] and operand.producer is not None:
                    return None  # an earlier operand dies there too
        return None

    def _made(self, operation: Operation) -> int:
        return sum(result.nbytes for result in operation.results if self._counts(result))

    def _values(self, region: Region) -> list[Value]:
        values = [value for value in region.inputs if self._counts(value)]
        for operation in region.operations:
            values.extend(result for result in operation.results if self._counts(result))
        return values

    def _positions(self, value: Value) -> list[int]:
        """Positions that need the value as an array, in order."""
        return self._fusion.positions(value)

    def _range(self, value: Value) -> tuple[int, int]:
        positions = self._positions(value)
        if value.producer is not None:
            first = value.producer.position
        elif value in self.residency.late and positions:
            first = positions[0]
        else:
            first = 0
        end = positions[-1] if positions else first
        if end > first and self._taker(value) is not None:
            end -= 1
        return first, end

    def _walk(self, region: Region) -> tuple[int, int | None]:
        """The unspilled peak and the position at which it is reached."""
        count = len(region.operations)
        change = [0] * (count + 2)
        for value in self._values(region):
            first, last = self._range(value)
            change[first] += value.nbytes
            change[last + 1] -= value.nbytes
        for extra in self._extras.get(region, ()):
            change[extra.first] += extra.nbytes
            change[min(extra.last, count) + 1] -= extra.nbytes
        alive = peak = 0
        where: int | None = None
        totals = self._totals[region] = []
        for position, operation in enumerate(region.operations):
            alive += change[position]
            totals.append(alive)
            inside = max((self.peak(body) for body in operation.bodies), default=0)
            if alive + inside > peak:
                peak, where = alive + inside, position
        return peak, where

    def _spill(self, region: Region, allowance: int, spills: list[Spill]) -> int:
        """Adds the region's spills; returns the peak that is left."""
        if self.peak(region) <= allowance:
            return self.peak(region)
        starting: dict[int, list[Value]] = {}
        for value in self._values(region):
            first, _ = self._range(value)
            starting.setdefault(first, []).append(value)
        alive: dict[Value, None] = {}
        away: set[Value] = set()
        heap: list[tuple[int, int, Value]] = []  # (-next use, tie, value)
        evictions: dict[Value, list[Operation]] = {}
        total = peak = 0
        totals: list[int] = []
        tie = 0
        extras = [0] * (len(region.operations) + 2)
        for extra in self._extras.get(region, ()):
            extras[extra.first] += extra.nbytes
            extras[min(extra.last, len(region.operations)) + 1] -= extra.nbytes

        def next_use(value: Value, position: int) -> int | None:
            positions = self._positions(value)
            following = bisect.bisect_right(positions, position)
            return positions[following] if following < len(positions) else None

        for position, operation in enumerate(region.operations):
            total += extras[position]
            operands = self._fusion.operands(operation)
            arriving = starting.get(position, []) + [
                operand for operand in operands if operand in away
            ]
            for value in arriving:
                away.discard(value)
                alive[value] = None
                total += value.nbytes
            inside = max((self.peak(body) for body in operation.bodies), default=0)
            least = max((self.lower_bound(body) for body in operation.bodies), default=0)
            needed_here = {id(value) for value in (*operands, *operation.results)}
            postponed = []
            while total + inside > allowance and heap:
                negative, _, value = heapq.heappop(heap)
                following = next_use(value, position - 1)
                if value not in alive or following is None or -negative != following:
                    continue
                if id(value) in needed_here:
                    postponed.append((negative, _, value))
                    continue
                last = self._last_use_before(value, position)
                if following - last.position < _MIN_GAP_OPERATIONS:
                    continue
                del alive[value]
                away.add(value)
                total -= value.nbytes
                evictions.setdefault(value, []).append(last)
            for item in postponed:
                heapq.heappush(heap, item)
            if total + inside > allowance and operation.bodies:
                inside = 0
                for body in operation.bodies:
                    left = self.peak(body)
                    if not body.in_predicate:
                        left = self._spill(body, max(least, allowance - total), spills)
                    inside = max(inside, left)
            peak = max(peak, total + inside)
            totals.append(total)
            for value in dict.fromkeys((*operands, *operation.results)):
                if value not in alive:
                    continue
                following = next_use(value, position)
                if following is None:
                    del alive[value]
                    total -= value.nbytes
                elif self._movable(value):
                    tie += 1
                    heapq.heappush(heap, (-following, tie, value))
        anchors = self._derive(region, evictions)
        for value, points in evictions.items():
            spills.append(self._record(value, points, anchors.get(value)))
        spills.extend(self._fused_again(evictions))
        self._totals[region] = totals
        return peak

    def _fused_again(self, evictions: dict[Value, list[Operation]]) -> list[Spill]:
        """What is never built must be made from what has come back, or that would be of no use."""
        points: dict[Value, dict[int, Operation]] = {}
        for value, left in evictions.items():
            for fused in self._fusion.made_from(value):
                assert fused.producer is not None
                made, last = fused.producer.position, self._positions(fused)[-1]
                points.setdefault(fused, {}).update(
                    (after.position, after) for after in left if made <= after.position < last
                )
        return [
            Spill(
                None,
                fused,
                [found[position] for position in sorted(found)],
                tuple(self._fusion.roots(fused)),
                fused=True,
            )
            for fused, found in points.items()
            if found
        ]

    def _derive(
        self, region: Region, evictions: dict[Value, list[Operation]]
    ) -> dict[Value, tuple[Value, ...]]:
        """Which evicted values can be computed again where they are needed, and from what.

        In program order, a value is derived if the cheap operations that made it start from
        arguments, from values that are alive there anyway, or from evicted values that come back
        near there. What it is derived from stays a transfer, so nothing is derived in a circle.
        """
        arguments = self._arguments(region)
        back = {
            value: self._positions(value)[bisect.bisect(self._positions(value), last.position)]
            for value, (last, *more) in evictions.items()
            if not more
        }
        derived: dict[Value, tuple[Value, ...]] = {}

        def there(value: Value, position: int) -> bool:
            if value in arguments:
                return True
            if value in evictions:
                near = abs(back.get(value, -_ANCHOR_WINDOW) - position) <= _ANCHOR_WINDOW
                return value in back and value not in derived and near
            first, last = self._range(value)
            return value not in self.residency.dropped and first <= position <= last

        for value in sorted(back, key=lambda value: self._range(value)[0]):
            if value in self._site_of or self.decisions.pinned(value) == "offload":
                continue
            asked_for = self.decisions.pinned(value) == "recompute"
            price = math.inf if asked_for else self.decisions.price
            found: dict[Value, None] = {}  # ordered: the emitted program must not vary
            waiting = [value]
            operations: set[int] = set()
            while waiting and len(operations) <= _MOST_REPLAYED:
                operation = waiting.pop().producer
                if operation is None or not is_cheap(operation, price):
                    break
                if operation.position in operations:
                    continue
                operations.add(operation.position)
                for operand in operation.operands:
                    if isinstance(operand, Value):
                        built = not self._fusion.is_fused(operand)
                        if built and there(operand, back[value]):
                            found[operand] = None
                        else:
                            waiting.append(operand)
            else:
                if not waiting:
                    derived[value] = tuple(found)
        return derived

    def _movable(self, value: Value) -> bool:
        if value.nbytes < self.decisions.min_bytes or self.residency.is_output(value):
            return False
        if self.decisions.pinned(value) == "keep":
            return False
        return value.producer is not None or value in self._site_of

    def _last_use_before(self, value: Value, position: int) -> Operation:
        operations = value.region.operations
        earlier = bisect.bisect_left(self._positions(value), position)
        if earlier:
            return operations[self._positions(value)[earlier - 1]]
        assert value.producer is not None
        return value.producer

    def _arguments(self, region: Region) -> set[Value]:
        top = self.program.top
        found = set()
        for value in region.inputs:
            source = root(value)
            if not isinstance(source, Value) or (source.region is top and source.producer is None):
                found.add(value)
        return found

    def _record(
        self, value: Value, points: list[Operation], anchors: tuple[Value, ...] | None
    ) -> Spill:
        if value in self._site_of:
            site, leaf = self._site_of[value]
            site.readers[leaf.produced] = site.readers.get(leaf.produced, 1) + len(points)
            return Spill(site, value, points)
        if anchors is not None:
            return Spill(None, value, points, anchors)
        assert value.producer is not None
        site = Site(
            value=value,
            leaf=value,
            node=None,
            reach=None,
            region=value.region,
            aval=value.aval,
            entry_bytes=value.nbytes,
            entries=1,  # reloaded before the region runs again
            source=value.producer.source,
            reason="its next use is far away",
            readers={value: len(points)},
        )
        self.decisions.sites.append(site)
        return Spill(site, value, points)


def executions(region: Region) -> int:
    """How often a region runs in one step: the product of the loops around it.

    A `while` counts once, since nobody knows; a branch counts as taken.
    """
    count = 1
    while region.owner is not None:
        if region.owner.kind == "scan":
            count *= region.owner.spec.length
        region = region.owner.region
    return count
