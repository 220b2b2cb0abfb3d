"""What a step needs on each path: bytes that the manager holds, and time.

A branch that is not taken stores nothing and takes no time. For a path that is known (or predicted)
bytes and seconds follow from how often each region runs, which is a linear function of the
counters; before it is known, what must be reserved is the worst path: of the branches of one
conditional the largest, not their sum.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from jdynoff import jax_compat
from jdynoff._native import PAGE_BYTES
from jdynoff.planning.decisions import Decisions, Site
from jdynoff.planning.predict import Load, Model, Prediction, predicted, replayed
from jdynoff.program.blocks import Block, Blocks
from jdynoff.program.graph import Operand, Operation, Program, Region, Value
from jdynoff.program.structure import CondNode, Leaf, Node, ScanNode

# Of the way from the lightest path to the heaviest.
_SHARES = (0.1, 0.25, 0.5, 0.75, 1.0)


@dataclasses.dataclass(eq=False)
class Linear:
    """An amount as a function of the counters.

    Attributes:
      fixed: on every path.
      per_count: f64[n], for each run of each learned block, in the order of `Blocks.learned`.
    """

    fixed: float
    per_count: np.ndarray

    def of(self, counters: Sequence[float] | np.ndarray) -> float:
        """The amount on one path, from its counters (n of them)."""
        return float(self.fixed + self.per_count @ np.asarray(counters, np.float64))


class Runs:
    """How often the regions of a program run, as a function of its counters."""

    def __init__(self, blocks: Blocks) -> None:
        """Indexes the blocks."""
        self._of_region = {block.region: block for block in blocks.blocks if block.region}
        self._numbers = {block.counter: number for number, block in enumerate(blocks.learned)}

    def zero(self) -> Linear:
        """An amount to begin with."""
        return Linear(0.0, np.zeros(len(self._numbers)))

    def add(self, amount: Linear, region: Region, each: float) -> None:
        """Adds `each` for every run of `region`."""
        times, block = 1, self._of_region.get(region)
        while block is not None and block.times is not None:
            times, block = times * block.times, block.parent
        if block is None:
            amount.fixed += times * each
        else:
            amount.per_count[self._numbers[block.counter]] += times * each


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """Bytes that the entries of one step need at once.

    Attributes:
      by_path: for a path that is known.
      worst: on the worst path.
    """

    by_path: Linear
    worst: int


def held_bytes(program: Program, blocks: Blocks, decisions: Decisions) -> Held:
    """Sums up where entries are made; linear in sites and nesting depth."""
    runs = Runs(blocks)
    by_path = runs.zero()
    made: dict[Region, dict[Region, int]] = defaultdict(lambda: defaultdict(int))
    for site in decisions.moved():
        nbytes = -(-site.entry_bytes // PAGE_BYTES) * PAGE_BYTES
        if site.region is not program.top:
            # Held within one run of an inner body: little, and at most once at a time.
            by_path.fixed += nbytes * site.entries
        for region in made_in(site):
            made[site.region][region] += nbytes
            if site.region is program.top:
                runs.add(by_path, region, nbytes)
    for number, block in enumerate(blocks.learned):
        loop = block.counter[0] if block.counter is not None else None
        if loop is not None and loop.kind == "loop":
            by_path.per_count[number] += jax_compat.loop_frame_bytes(loop.eqn) or 0
    positions = {region: number for number, region in enumerate(program.regions)}
    worst = sum(_worst(within, regions, positions) for within, regions in made.items())
    return Held(by_path, worst)


class Outlook:
    """The predicted time of one set of decisions, path by path.

    Attributes:
      machine: whose rates it goes by.
      paths: how many counters tell a path.
    """

    def __init__(
        self,
        program: Program,
        blocks: Blocks,
        model: Model,
        decisions: Decisions,
        *,
        pool_bytes: int,
        temporary_bytes: int,
    ) -> None:
        """Sums up what each region costs; linear.

        Args:
          program: the step.
          blocks: of it.
          model: of its operations' time.
          decisions: what is moved and computed again.
          pool_bytes: of the manager.
          temporary_bytes: of XLA.
        """
        runs = Runs(blocks)
        self.machine = model.machine
        self.paths = len(blocks.learned)
        self._held = held_bytes(program, blocks, decisions).by_path
        self._pool_bytes, self._temporary_bytes = pool_bytes, temporary_bytes
        self._compute, self._extra, self._calls = runs.zero(), runs.zero(), runs.zero()
        self._offloaded, self._reloaded = runs.zero(), runs.zero()
        for region in program.regions:
            own = sum(model.seconds(one) for one in region.operations if not one.bodies)
            runs.add(self._compute, region, own)
        for operation, region in replayed(decisions):
            runs.add(self._extra, region, model.seconds(operation))
        for site in decisions.moved():
            for region in made_in(site):
                runs.add(self._offloaded, region, site.entry_bytes)
                runs.add(self._reloaded, region, site.entry_bytes * site.most_readers)
                runs.add(self._calls, region, 1 + site.most_readers)

    def predict(self, counters: Sequence[float] | np.ndarray) -> Prediction:
        """The time of a step on one path, from its counters."""
        load = Load(
            offloaded_bytes=int(self._offloaded.of(counters)),
            reloaded_bytes=int(self._reloaded.of(counters)),
            calls=int(self._calls.of(counters)),
            held_bytes=int(self._held.of(counters)),
            pool_bytes=self._pool_bytes,
            temporary_bytes=self._temporary_bytes,
        )
        return predicted(self.machine, self._compute.of(counters), self._extra.of(counters), load)


def typical_paths(blocks: Blocks, weigh: Callable[[Block], float]) -> list[np.ndarray]:
    """Counters (f64[n]) of paths between the lightest and the heaviest.

    Of each conditional the lightest path takes the branch that weighs least, the heaviest one the
    branch that weighs most. A loop whose length is not known runs once.
    """
    groups: dict[Operation, list[Block]] = defaultdict(list)
    for block in blocks.learned:
        assert block.counter is not None
        groups[block.counter[0]].append(block)

    def counters(choose: Callable[[list[float]], list[float]]) -> np.ndarray:
        shares: dict[Block, float] = {}
        for group in groups.values():
            chosen = choose([weigh(block) for block in group]) if len(group) > 1 else [1.0]
            shares.update(zip(group, chosen, strict=True))
        counts: dict[Block, float] = {}
        leaders = {block.counter: block for block in blocks.learned}
        for block in blocks.blocks:
            around = 1.0 if block.parent is None else counts[block.parent]
            if block.times is not None:
                counts[block] = block.times * around
            elif block.is_twin:
                counts[block] = counts[leaders[block.counter]]
            else:
                counts[block] = around * shares[block]
        return np.asarray([counts[block] for block in blocks.learned])

    def only(pick: Callable[[list[float]], float]) -> Callable[[list[float]], list[float]]:
        def choose(weights: list[float]) -> list[float]:
            chosen = weights.index(pick(weights))
            return [float(number == chosen) for number in range(len(weights))]

        return choose

    light, heavy = counters(only(min)), counters(only(max))
    return [light + share * (heavy - light) for share in _SHARES]


def made_in(site: Site) -> list[Region]:
    """The regions in which entries of a site are made, one for each leaf."""
    if site.node is None:
        return [site.region]
    found: list[Region] = []

    def visit(node: Node | None, region: Region) -> None:
        if isinstance(node, Leaf):
            found.append(_region(node.produced, region))
        elif isinstance(node, ScanNode):
            visit(node.inner, node.producer.bodies[0])
        elif isinstance(node, CondNode):
            for branch, body in zip(node.branches, node.producer.bodies, strict=True):
                visit(branch, body)

    visit(site.node, site.region)
    return found


def _region(produced: Operand, within: Region) -> Region:
    return produced.region if isinstance(produced, Value) else within


def _worst(within: Region, made: dict[Region, int], positions: dict[Region, int]) -> int:
    """The most bytes that one run of `within` makes, from what single bodies make."""
    totals = dict(made)
    branches: dict[Operation, int] = {}
    waiting = [(-positions[region], region) for region in totals]
    heapq.heapify(waiting)
    # Inner bodies come later in the program's list, so each is complete when it is taken.
    while waiting:
        _, region = heapq.heappop(waiting)
        owner = region.owner
        if region is within or owner is None:
            continue
        around = owner.region
        if around not in totals:
            totals[around] = 0
            heapq.heappush(waiting, (-positions[around], around))
        if owner.kind == "cond":
            before = branches.get(owner, 0)
            branches[owner] = max(before, totals[region])
            totals[around] += branches[owner] - before
        else:
            runs = owner.spec.length if owner.kind == "scan" else 1
            totals[around] += runs * totals[region]
    return totals[within]


__all__ = ["Held", "Linear", "Outlook", "Runs", "held_bytes", "made_in", "typical_paths"]
