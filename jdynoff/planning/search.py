"""Finds decisions that keep a budget, and proves them with XLA's own memory analysis.

The simulation chooses and XLA decides: a candidate counts only if what XLA reports for the compiled
program plus the manager's pool stays within the budget. At most three programs are compiled: the
step unchanged where it may fit, the one with least memory, and one in between that moves less.

The trap: `min_feasible_bytes` is a promise (it must work as a budget, and less must not), so it is
always the compiled figure of the least-memory program, never a simulated one.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from jdynoff._native import PAGE_BYTES
from jdynoff.errors import BudgetError
from jdynoff.planning.budget import MINIMUM, format_bytes
from jdynoff.planning.decisions import Decisions, Rebuild, Site
from jdynoff.planning.live_ranges import LiveTensor, Simulation, executions
from jdynoff.planning.plan import Compiled, MemoryUse, Plan, PlannedSite
from jdynoff.planning.residency import residency
from jdynoff.planning.sites import find_sites, number_sites
from jdynoff.program.graph import Program

# The smallest pool: staging for writes on their way out and reads on their way in.
_MIN_POOL_BYTES = 8 << 20
# A simulated peak may be this many times XLA's figure (unrolled code, fused away); only beyond it
# is compiling the unchanged step a waste.
_SIMULATION_EXCESS = 3.0
# The in-between program aims at this share of the budget, since the simulation is not exact.
_AIM = 0.85

Compile = Callable[[Decisions], Compiled]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The decisions of one signature and what they need at run time."""

    decisions: Decisions
    plan: Plan

    @property
    def moves(self) -> bool:
        """Whether the step calls the manager at all."""
        return bool(self.decisions.moved())


def search(
    program: Program,
    budget: int | str,
    min_bytes: int,
    compile_program: Compile,
    *,
    always_minimum: bool,
    has_disk: bool = True,
    price: float = 0.0,
    index_seconds: float = 0.0,
) -> Choice:
    """Chooses the decisions for one signature.

    Args:
      program: the step.
      budget: bytes, or "min".
      min_bytes: arrays smaller than this are never moved.
      compile_program: emits and compiles decisions.
      always_minimum: whether to compile the least-memory program even if the step fits unchanged
        (for a plan, which must name `min_feasible_bytes`).
      price: FLOPs that are paid for computing again rather than move one byte.
      has_disk: whether there is a far tier; without one the pool must hold all that is moved.
      index_seconds: what indexing the program took, for the plan's figures.

    Raises:
      BudgetError: if even the least-memory program does not fit.
    """
    found = _Search(program, budget, min_bytes, compile_program, has_disk, price)
    found.planning_seconds = index_seconds
    return found.run(always_minimum)


class _Search:
    def __init__(
        self,
        program: Program,
        budget: int | str,
        min_bytes: int,
        compile_program: Compile,
        has_disk: bool,
        price: float,
    ) -> None:
        self.program = program
        self.budget = budget
        self.min_bytes = min_bytes
        self.compile_program = compile_program
        self.has_disk = has_disk
        self.price = price
        self.compiled: dict[int, Compiled] = {}
        self.planning_seconds = 0.0
        self.plain = Simulation(program, Decisions(), residency(program, Decisions()))
        self.plain_memory: MemoryUse | None = None
        self.minimum_memory: MemoryUse | None = None

    def run(self, always_minimum: bool) -> Choice:
        limit = None if self.budget == MINIMUM else int(self.budget)
        if limit is not None and self.plain.peak() <= _SIMULATION_EXCESS * limit:
            unchanged = Decisions(min_bytes=self.min_bytes)
            self.plain_memory = self.compile(unchanged)
            if self.plain_memory.total_bytes <= limit:
                if always_minimum:
                    self.minimum_memory, self.minimum = self.compile_minimum()
                note = (
                    f"the step needs {format_bytes(self.plain_memory.total_bytes)} and the budget "
                    f"is {format_bytes(limit)}: it fits without moving anything."
                )
                return self.choice(unchanged, self.plain_memory, limit, note)
        self.minimum_memory, self.minimum = self.compile_minimum()
        if not self.minimum.moved() and not self.minimum.rebuilt:
            note = (
                f"nothing to move: no array of at least {format_bytes(self.min_bytes)} lives "
                "from one part of the step to a distant one."
            )
            return self.choice(self.minimum, self.minimum_memory, limit, note)
        if limit is not None:
            between = self.compile_between(limit)
            if between is not None:
                return between
        return self.choice(self.minimum, self.minimum_memory, limit, "")

    def compile(self, decisions: Decisions) -> MemoryUse:
        number_sites(decisions.sites)
        compiled = self.compile_program(decisions)
        self.compiled[id(decisions)] = compiled
        return compiled.memory

    def decide(self, allowance: int | None) -> tuple[Decisions, Simulation]:
        """Decisions whose simulated peak is `allowance`, or the least; sites kept if they fit."""
        started = time.perf_counter()
        decisions = find_sites(self.program, self.min_bytes, self.price)
        simulation = Simulation(self.program, decisions, residency(self.program, decisions))
        least = simulation.lower_bound()
        if allowance is None:
            decisions.spills = simulation.spill(least)
        else:
            room = allowance - min(simulation.peak(), allowance)
            for site in sorted(decisions.moved(), key=lambda site: site.total_bytes):
                if site.value is None or site.total_bytes > room:
                    continue
                site.kept = True
                site.reason = "the budget has room for it"
                room -= site.total_bytes
            simulation = Simulation(self.program, decisions, residency(self.program, decisions))
            decisions.spills = simulation.spill(max(least, allowance))
        self.planning_seconds += time.perf_counter() - started
        return decisions, simulation

    def compile_minimum(self) -> tuple[MemoryUse, Decisions]:
        decisions, self.minimum_simulation = self.decide(None)
        return self.compile(decisions), decisions

    def compile_between(self, limit: int) -> Choice | None:
        """A program that uses more of the budget and moves less, if one holds the contract."""
        assert self.minimum_memory is not None
        spare = limit - self.minimum_memory.total_bytes - self.floor(self.minimum)
        simulated = max(self.minimum_simulation.peak(), 1)
        if spare < 0.1 * limit:
            return None
        decisions, _ = self.decide(simulated + int(_AIM * spare))
        if traffic(decisions) >= traffic(self.minimum):
            return None
        memory = self.compile(decisions)
        if memory.total_bytes + self.floor(decisions) > limit:
            return None
        return self.choice(decisions, memory, limit, "")

    def choice(
        self, decisions: Decisions, memory: MemoryUse, limit: int | None, note: str
    ) -> Choice:
        floor = self.floor(decisions)
        # Only programs that a search with that budget finds again: the one in between is made for
        # a budget and may happen to need less than the least-memory one.
        known = [plain.total_bytes for plain in (self.plain_memory,) if plain is not None]
        if self.minimum_memory is not None:
            known.append(self.minimum_memory.total_bytes + self.floor(self.minimum))
        least = min(known)
        if limit is not None and memory.total_bytes + floor > limit:
            raise self.error(limit, least, decisions)
        held = held_bytes(decisions)
        room = floor if limit is None else limit - memory.total_bytes
        pool = max(floor, min(room, held) // PAGE_BYTES * PAGE_BYTES)
        on_disk = held > pool
        offloaded, reloaded = offloaded_bytes(decisions), reloaded_bytes(decisions)
        compiled = self.compiled[id(decisions)]
        plan = Plan(
            budget_bytes=limit,
            device_peak_bytes=memory.total_bytes + pool,
            min_feasible_bytes=least,
            plain_peak_bytes=(
                self.plain_memory.total_bytes
                if self.plain_memory is not None
                else memory.total_bytes - memory.temporary_bytes + self.plain.peak()
            ),
            plain_is_simulated=self.plain_memory is None,
            memory=memory,
            pool_bytes=pool,
            held_bytes=held,
            spill_bytes=held if on_disk else 0,
            offloaded_bytes=offloaded,
            reloaded_bytes=reloaded,
            disk_written_bytes=offloaded if on_disk else 0,
            sites=tuple(_planned(decisions, on_disk)),
            note=note,
            warnings=tuple(self.program.warnings),
            largest=tuple(self.plain.largest_at_peak()),
            compiles=len(self.compiled),
            rewrite_seconds=self.planning_seconds + compiled.emit_seconds,
            compile_seconds=compiled.compile_seconds,
        )
        return Choice(decisions, plan)

    def floor(self, decisions: Decisions) -> int:
        """The smallest pool that the decisions can run with."""
        held = held_bytes(decisions)
        return min(held, _MIN_POOL_BYTES) if self.has_disk else held

    def error(self, limit: int, least: int, decisions: Decisions) -> BudgetError:
        simulation = Simulation(self.program, decisions, residency(self.program, decisions))
        largest = simulation.largest_at_peak()
        lines = "\n".join(f"  {describe(tensor)}" for tensor in largest)
        return BudgetError(
            f"the step cannot run within budget={limit} bytes ({format_bytes(limit)}): it needs at "
            f"least {least} bytes ({format_bytes(least)}) with everything moved that can be. "
            f"Raise the budget to that, or shrink what is largest at the peak:\n{lines}",
            budget_bytes=limit,
            min_feasible_bytes=least,
            largest=largest,
        )


def describe(tensor: LiveTensor) -> str:
    """One line on one array: size, shape, dtype and where it is made."""
    shape = ", ".join(map(str, tensor.shape))
    return (
        f"{format_bytes(tensor.nbytes):>10}  {tensor.dtype}[{shape}]  "
        f"{tensor.source or 'argument of the step'}"
    )


def held_bytes(decisions: Decisions) -> int:
    """Pool or disk space that the step's entries need if every path is taken, whole pages."""
    return sum(
        -(-site.entry_bytes // PAGE_BYTES) * PAGE_BYTES * site.entries for site in decisions.moved()
    )


def offloaded_bytes(decisions: Decisions) -> int:
    """Bytes handed to the manager in one step, if every branch is taken."""
    return sum(site.total_bytes * executions(site.region) for site in decisions.moved())


def reloaded_bytes(decisions: Decisions) -> int:
    """Bytes taken back in one step, if every branch is taken."""
    return sum(
        site.total_bytes * site.most_readers * executions(site.region) for site in decisions.moved()
    )


def traffic(decisions: Decisions) -> int:
    """Bytes moved both ways in one step."""
    return offloaded_bytes(decisions) + reloaded_bytes(decisions)


def _planned(decisions: Decisions, on_disk: bool) -> list[PlannedSite]:
    planned = [_planned_site(site, on_disk) for site in decisions.sites]
    planned.extend(_planned_rebuild(rebuilt) for rebuilt in decisions.rebuilt)
    planned.extend(
        PlannedSite(
            source=spill.value.producer.source if spill.value.producer is not None else "",
            shape=tuple(spill.value.aval.shape),
            dtype=str(spill.value.aval.dtype),
            entry_bytes=spill.value.nbytes,
            entries=1,
            bytes=spill.value.nbytes,
            action="recompute",
            tier="xla",
            reason="follows cheaply from what is there",
        )
        for spill in decisions.spills
        if spill.site is None
    )
    return sorted(planned, key=lambda site: -site.bytes)


def _planned_site(site: Site, on_disk: bool) -> PlannedSite:
    tier = "xla" if site.kept else ("pool, then disk" if on_disk else "pool")
    return PlannedSite(
        source=site.source,
        shape=tuple(site.aval.shape),
        dtype=str(site.aval.dtype),
        entry_bytes=site.entry_bytes,
        entries=site.entries,
        bytes=site.total_bytes,
        action="keep" if site.kept else "offload",
        tier=tier,
        reason=site.reason,
    )


def _planned_rebuild(rebuilt: Rebuild) -> PlannedSite:
    return PlannedSite(
        source=rebuilt.source,
        shape=tuple(rebuilt.leaf.aval.shape),
        dtype=str(rebuilt.leaf.aval.dtype),
        entry_bytes=rebuilt.entry_bytes,
        entries=rebuilt.entries,
        bytes=rebuilt.entry_bytes * rebuilt.entries,
        action="recompute",
        tier="xla",
        reason=rebuilt.reason,
    )
