"""Finds decisions that keep a budget, and proves them with XLA's own memory analysis.

For each of a few prices of a byte, from computing nothing again to computing everything again,
decisions are made and their peak is simulated and their time predicted; the fastest that fit are
compiled. XLA decides: a candidate counts only if what it reports for the compiled program plus the
manager's pool stays within the budget. At most three programs are compiled: the step unchanged
where it may fit, the one with least memory, and one in between (twice, if the first was not there).
Where the step fits unchanged and moving is predicted to be faster nevertheless (on a CPU, whose
kernel clears the memory of large temporaries in every step), that is compiled too.

The trap: `min_feasible_bytes` is a promise (it must work as a budget, and less must not), so it is
always the compiled figure of the least-memory program, never a simulated one.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jdynoff._native import PAGE_BYTES
from jdynoff.errors import BudgetError
from jdynoff.planning.amounts import calls, offloaded_bytes, reloaded_bytes
from jdynoff.planning.budget import MINIMUM, format_bytes
from jdynoff.planning.by_path import held_bytes
from jdynoff.planning.choice import LOOP_TOPS_BYTES, Candidate, Choice
from jdynoff.planning.decisions import Decisions, Site
from jdynoff.planning.described import describe, planned_loops, planned_sites
from jdynoff.planning.live_ranges import Simulation, executions
from jdynoff.planning.machine import Machine
from jdynoff.planning.pins import Pins
from jdynoff.planning.plan import Compiled, Forecast, MemoryUse, Plan
from jdynoff.planning.predict import Load, Model, Prediction
from jdynoff.planning.prices import PRICES, cheapest
from jdynoff.planning.profile import profile
from jdynoff.planning.remembered import Recipe, Remembered, fingerprint
from jdynoff.planning.residency import residency
from jdynoff.planning.sites import find_sites, number_sites
from jdynoff.program.blocks import Blocks
from jdynoff.program.graph import Program

# Least-memory programs are compared by simulation, which is not exact: among those within this
# share of the least the fastest is taken.
_SAME_PEAK = 1.05
# The smallest pool: staging for writes on their way out and reads on their way in.
_MIN_POOL_BYTES = 8 << 20
# What a loop's trips keep is counted at run time only, so their pool is what the budget leaves, or
# this share of it: two steps in flight then keep the budget together.
_LOOPS_SHARE = 0.5
# A simulated peak may be this many times XLA's figure (unrolled code, fused away); only beyond it
# is compiling the unchanged step a waste.
_SIMULATION_EXCESS = 3.0
# The in-between program aims at this share of what the budget leaves, since the simulation is not
# exact; the second attempt at this share of what the first one missed.
_AIM = 0.85
_MISSED = 1.3
_MOST_COMPILES = 3
# Times the simulated temporaries, beyond which the candidate of least memory is not trusted.
_MISLED = 1.5
# What a candidate must save to be compiled instead of a program that is there.
_WORTHWHILE = 0.99
# Of a price that the user names, over a body (`find_sites`). The search itself does without: time
# is the same on both sides of such a tie unless the link is just full.
SPREAD = 0.05
# What a program must save, as a share, to be compiled beside one that is good enough: instead of
# the unchanged step where that fits, or beside the program for all paths.
WORTHWHILE_EXTRA = 0.05

Compile = Callable[[Decisions], Compiled]


class Search:
    """Finds plans for one program, for one budget after the other.

    What does not depend on the budget, the unchanged step and the one with least memory, is
    compiled once.
    """

    def __init__(
        self,
        program: Program,
        compile_program: Compile,
        *,
        blocks: Blocks,
        machine: Machine,
        min_bytes: int,
        price: float | None = None,
        pins: Pins | None = None,
        has_disk: bool = True,
        conditions: tuple[Any, ...] = (),
        index_seconds: float = 0.0,
    ) -> None:
        """Simulates the unchanged step.

        Args:
          program: the step.
          compile_program: emits and compiles decisions.
          blocks: of the program.
          machine: its rates.
          min_bytes: arrays smaller than this are never moved.
          price: FLOPs that are paid for computing again rather than move one byte; None to choose
            by the predicted time.
          pins: the user's actions.
          has_disk: whether there is a far tier; without one the pool must hold all that is moved.
          conditions: what else the compiled program depends on.
          index_seconds: what indexing the program took, for the plan's figures.
        """
        started = time.perf_counter()
        self.program = program
        self.blocks = blocks
        self.limit: int | None = None
        self.min_bytes = min_bytes
        self.compile_program = compile_program
        self.has_disk = has_disk
        self.pins = pins or {}
        self.prices = PRICES if price is None else (price,)
        self.spread = 0.0 if price is None else SPREAD
        operations = (operation for region in program.regions for operation in region.operations)
        pinned = [
            (number, self.pins[operation])
            for number, operation in enumerate(operations)
            if operation in self.pins
        ]
        self.remembered = Remembered()
        self.conditions = (
            min_bytes,
            price,
            pinned,
            has_disk,
            machine,
            jax.__version__,
            *conditions,
        )
        self.chosen: Candidate
        self.decided: dict[tuple[float, int | None, bool], Candidate | None] = {}
        self.compiled: dict[int, Compiled] = {}
        self.programs: set[int] = set()  # of these, what this budget takes
        self.model = Model(program, machine)
        self.plain = Simulation(program, Decisions(), residency(program, Decisions()))
        self.plain_memory: MemoryUse | None = None
        self.minimum_memory: MemoryUse | None = None
        unchanged = Decisions(min_bytes=min_bytes)
        self.unchanged = self.candidate(-1.0, unchanged, self.plain, self.plain.peak())
        self.planning_seconds = index_seconds + time.perf_counter() - started

    def run(self, budget: int | str, *, always_minimum: bool = False) -> Choice:
        """Chooses the decisions for a budget.

        Args:
          budget: bytes, or "min".
          always_minimum: whether to compile the least-memory program even if the step fits
            unchanged (for a plan, which must name `min_feasible_bytes`).

        Raises:
          BudgetError: if even the least-memory program does not fit.
        """
        self.limit = None if budget == MINIMUM else int(budget)
        self.programs.clear()
        # What is made for a budget is of no use for another one.
        self.decided = {key: found for key, found in self.decided.items() if key[1] is None}
        key = fingerprint(self.program, budget, always_minimum, *self.conditions)
        recipe = self.remembered.read(key)
        choice = None if recipe is None else self.repeat(recipe)
        if choice is not None:
            return choice
        self.programs.clear()  # or what was remembered would count among those that may be tried
        choice = self.search(always_minimum)
        found = self.chosen
        self.remembered.write(
            key,
            Recipe(
                unchanged=found is self.unchanged,
                price=found.price,
                allowance=found.allowance,
                keeping=found.keeping,
                program_bytes=choice.plan.memory.total_bytes,
                least_bytes=choice.plan.min_feasible_bytes,
                note=choice.plan.note,
            ),
        )
        return choice

    def repeat(self, recipe: Recipe) -> Choice | None:
        """Decides as in an earlier process; None if that does not keep the budget any more."""
        if recipe.unchanged:
            found: Candidate | None = self.unchanged
        else:
            found = self.decide(recipe.price, recipe.allowance, recipe.keeping)
        if found is None:
            return None
        memory = self.compile_plain() if found is self.unchanged else self.compile(found)
        needed = memory.total_bytes + self.floor(found.decisions)
        if memory.total_bytes != recipe.program_bytes:
            return None
        if self.limit is not None and needed > self.limit:
            return None
        return self.choice(found, memory, recipe.note, recipe.least_bytes)

    def search(self, always_minimum: bool) -> Choice:
        """Chooses anew."""
        limit = self.limit
        if limit is not None and self.plain.peak() <= _SIMULATION_EXCESS * limit:
            memory = self.compile_plain()
            floor = self.floor(self.unchanged.decisions)
            if memory.total_bytes + floor <= limit:
                if always_minimum:
                    self.compile_minimum()
                faster = self.compile_faster(limit)
                if faster is not None:
                    return faster
                note = (
                    f"the step needs {format_bytes(memory.total_bytes)} and the budget is "
                    f"{format_bytes(limit)}: it fits without moving anything"
                    + (", except what its loops keep." if self.program.loops else ".")
                )
                return self.choice(self.unchanged, memory, note)
        memory = self.compile_minimum()
        decisions = self.minimum.decisions
        if not decisions.calls_manager() and not decisions.rebuilt and not decisions.spills:
            note = (
                f"nothing to move: no array of at least {format_bytes(self.min_bytes)} lives "
                "from one part of the step to a distant one, or the pool would need more than "
                "they do."
            )
            return self.choice(self.minimum, memory, note)
        if limit is not None and memory.total_bytes + self.floor(decisions) <= limit:
            between = self.compile_between(limit, _MOST_COMPILES - len(self.programs))
            if between is not None:
                return between
        return self.choice(self.minimum, memory, "")

    def compile_plain(self) -> MemoryUse:
        """Compiles the unchanged step."""
        self.plain_memory = self.compile(self.unchanged)
        return self.plain_memory

    def compile(self, candidate: Candidate) -> MemoryUse:
        """Compiles a candidate, the first time; returns XLA's figures."""
        key = id(candidate.decisions)
        self.programs.add(key)
        if key not in self.compiled:
            number_sites(candidate.decisions.sites)
            self.compiled[key] = self.compile_program(candidate.decisions)
        return self.compiled[key].memory

    def candidate(
        self, price: float, decisions: Decisions, simulation: Simulation, simulated: int
    ) -> Candidate:
        """Decisions with their predicted time."""
        decisions.loops = bool(self.program.loops)
        candidate = Candidate(price, decisions, simulation, simulated)
        candidate.prediction = self.predict(candidate)
        return candidate

    def predict(self, candidate: Candidate, *, least_pool: bool = False) -> Prediction:
        """The time of a candidate.

        Args:
          candidate: what to predict.
          least_pool: whether with the smallest pool, whatever the budget; else with what this
            budget leaves it, as far as that is known.
        """
        decisions = candidate.decisions
        pool, held = self.floor(decisions), self.held(decisions)
        if self.limit is not None and self.compiled and not least_pool:
            pool = max(pool, min(held, self.limit - self.fixed_bytes - candidate.simulated))
        load = Load(
            offloaded_bytes=offloaded_bytes(decisions),
            reloaded_bytes=reloaded_bytes(decisions),
            calls=calls(decisions),
            held_bytes=held,
            pool_bytes=pool,
            temporary_bytes=candidate.simulated,
        )
        return self.model.predict(decisions, load)

    @property
    def fixed_bytes(self) -> int:
        """What all programs of the step need: arguments and outputs, of any that is compiled."""
        memory = next(iter(self.compiled.values())).memory
        return memory.total_bytes - memory.temporary_bytes

    def decide(self, price: float, allowance: int | None, keeping: bool = True) -> Candidate | None:
        """Decisions whose simulated peak is `allowance`, or the least.

        Args:
          price: of a byte.
          allowance: for the temporaries.
          keeping: whether sites stay in XLA where there is room. On a CPU that may take longer than
            moving them through the pool, whose memory is there from step to step.

        Returns:
          The candidate; None if nothing could be kept.
        """
        key = (price, allowance, keeping)
        if key not in self.decided:
            self.decided[key] = self.decide_anew(*key)
        return self.decided[key]

    def decide_anew(self, price: float, allowance: int | None, keeping: bool) -> Candidate | None:
        """See `decide`."""
        started = time.perf_counter()
        decisions = find_sites(self.program, self.min_bytes, price, self.pins, spread=self.spread)
        fuses = allowance is not None
        state = residency(self.program, decisions)
        simulation = Simulation(self.program, decisions, state, fuses)
        least = simulation.lower_bound()
        if allowance is not None and keeping:
            if not keep(decisions, allowance - simulation.peak()):
                return None
            simulation = Simulation(self.program, decisions, residency(self.program, decisions))
        decisions.spills = simulation.spill(least if allowance is None else max(least, allowance))
        found = self.candidate(price, decisions, simulation, simulation.spilled_peak)
        found.allowance, found.keeping = allowance, keeping
        self.planning_seconds += time.perf_counter() - started
        return found

    @functools.cached_property
    def recomputed(self) -> Candidate:
        """Everything computed again that can be."""
        return self.least_of(math.inf)

    def least_of(self, price: float) -> Candidate:
        """Decisions of the least memory at a price."""
        found = self.decide(price, None)
        assert found is not None
        return found

    @functools.cached_property
    def minimum(self) -> Candidate:
        """The candidate of least memory: of those with about the least, the fastest."""
        # Nothing computed again never takes less memory.
        prices = self.prices[1:] if len(self.prices) > 1 else self.prices
        candidates = [self.least_of(price) for price in prices]
        if len(candidates) > 1:
            self.recomputed = candidates[-1]
        if len(self.prices) > 1:
            candidates.append(self.unchanged)  # a small step may need less than the pool
        peaks = {id(found): found.simulated + self.floor(found.decisions) for found in candidates}
        least = min(peaks.values())
        near = [found for found in candidates if peaks[id(found)] <= _SAME_PEAK * least]
        # The same for every budget, or the least of one would not be that of another.
        return min(near, key=lambda found: self.predict(found, least_pool=True).step_seconds)

    def compile_minimum(self) -> MemoryUse:
        """Compiles the candidate of least memory, once.

        Where XLA makes much more of it than was simulated, so is the one at the lowest price, of
        whose replays the schedule depends less.
        """
        if self.minimum_memory is not None:
            return self.compile(self.minimum)
        memory = self.compile(self.minimum)
        other = self.least_of(self.prices[min(1, len(self.prices) - 1)])
        if memory.temporary_bytes > _MISLED * self.minimum.simulated and other is not self.minimum:
            of_other = self.compile(other)
            needed = memory.total_bytes + self.floor(self.minimum.decisions)
            if of_other.total_bytes + self.floor(other.decisions) < needed:
                self.minimum, memory = other, of_other
        self.minimum_memory = memory
        return memory

    def compile_between(self, limit: int, attempts: int) -> Choice | None:
        """The fastest program that a part of the budget's spare bytes allows, if it holds."""
        assert self.minimum_memory is not None
        spare = limit - self.minimum_memory.total_bytes - self.floor(self.minimum.decisions)
        aim = int(_AIM * spare)
        prices = self.prices
        while attempts > 0 and aim > 0:
            attempts -= 1
            allowance = self.minimum.simulated + aim
            fastest = self.best(allowance, prices)
            if fastest is self.minimum:
                return None
            memory = self.compile(fastest)
            excess = memory.total_bytes + self.floor(fastest.decisions) - limit
            if excess <= 0:
                return self.choice(fastest, memory, "")
            aim -= int(_MISSED * excess)
            prices = (fastest.price,)
        return None

    def compile_faster(self, limit: int) -> Choice | None:
        """What is predicted to be faster than the unchanged step, which fits, if it holds."""
        # Where memory stays from step to step, moving what fits is never faster.
        if math.isinf(self.model.machine.fresh_bytes_per_second):
            return None
        room = max(limit - self.fixed_bytes - _MIN_POOL_BYTES, 0)
        fastest = self.best(room, self.prices)
        plain = self.predict(self.unchanged).step_seconds
        saved = plain - self.predict(fastest).step_seconds
        if saved <= WORTHWHILE_EXTRA * plain or not fastest.decisions.calls_manager():
            return None
        self.compile_minimum()  # which the plan must name
        memory = self.compile(fastest)
        if memory.total_bytes + self.floor(fastest.decisions) > limit:
            return None
        note = (
            f"the step fits unchanged; with what it keeps in the pool, whose memory need not be "
            f"cleared in every step, it is predicted to be {100 * saved / plain:.0f}% faster."
        )
        return self.choice(fastest, memory, note)

    def best(self, allowance: int, prices: Sequence[float]) -> Candidate:
        """The fastest within an allowance, or with least memory at a price.

        The latter are candidates as well, since straight-line code moves nothing while there is
        room. It is the one of least memory unless another is faster by more than nothing.
        """
        room = math.inf if self.limit is None else self.limit - self.fixed_bytes
        candidates = [self.fastest(allowance, prices)]
        candidates.extend(
            found
            for found in map(self.least_of, prices)
            if found.simulated + self.floor(found.decisions) <= room
        )
        seconds = [self.predict(candidate).step_seconds for candidate in candidates]
        worthwhile = min(seconds) <= _WORTHWHILE * self.predict(self.minimum).step_seconds
        return candidates[seconds.index(min(seconds))] if worthwhile else self.minimum

    def fastest(self, allowance: int, prices: Sequence[float]) -> Candidate:
        """The decisions of the least predicted time within an allowance for the temporaries."""

        def evaluate(price: float) -> tuple[float, Candidate]:
            found = self.decide(price, allowance)
            # Where memory stays from step to step, keeping what fits is never slower.
            if found is None or math.isfinite(self.model.machine.fresh_bytes_per_second):
                moved = self.decide(price, allowance, keeping=False)
                assert moved is not None
                if found is None or _seconds(moved) < _seconds(found):
                    found = moved
            return _seconds(found), found

        _, best = cheapest(evaluate, prices)
        return best

    def choice(
        self, candidate: Candidate, memory: MemoryUse, note: str, least: int | None = None
    ) -> Choice:
        """The plan of a compiled candidate; raises `BudgetError` if it breaks the contract."""
        self.chosen = candidate
        decisions, limit = candidate.decisions, self.limit
        floor = self.floor(decisions)
        # Only programs that a search with that budget finds again: the one in between is made for
        # a budget and may happen to need less than the least-memory one.
        known = [
            plain.total_bytes + self.floor(self.unchanged.decisions)
            for plain in (self.plain_memory,)
            if plain is not None
        ]
        if self.minimum_memory is not None:
            least_floor = self.floor(self.minimum.decisions)
            known.append(self.minimum_memory.total_bytes + least_floor)
        if least is None:
            least = min(known)
        if limit is not None and memory.total_bytes + floor > limit:
            raise self.error(limit, least, decisions)
        held = self.held(decisions)
        room = floor if limit is None else limit - memory.total_bytes
        wanted = held
        if decisions.loops:
            spare = max(room - held, 0)
            wanted += int(spare * _LOOPS_SHARE) if self.has_disk else spare
        pool = max(floor, min(room, wanted) // PAGE_BYTES * PAGE_BYTES)
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
            simulated_bytes=candidate.simulated,
            pool_bytes=pool,
            held_bytes=held,
            spill_bytes=held if on_disk else 0,
            offloaded_bytes=offloaded,
            reloaded_bytes=reloaded,
            disk_written_bytes=offloaded if on_disk else 0,
            forecast=self.forecast(candidate),
            sites=(*planned_loops(self.program), *planned_sites(decisions, on_disk)),
            note=note,
            warnings=tuple(self.program.warnings),
            profile=profile(candidate.simulation, self.program.top),
            plain_profile=profile(self.plain, self.program.top),
            largest=tuple(self.plain.largest_at_peak()),
            compiles=len(self.programs),
            rewrite_seconds=self.planning_seconds + compiled.emit_seconds,
            compile_seconds=compiled.compile_seconds,
        )
        return Choice(decisions, plan)

    def forecast(self, candidate: Candidate) -> Forecast:
        """The predicted time of a candidate, beside plain JAX and full recomputation."""
        prediction = self.predict(candidate)
        return Forecast(
            machine=self.model.machine.name,
            origin=self.model.machine.origin,
            flops_per_byte=candidate.price,
            step_seconds=prediction.step_seconds,
            stall_seconds=prediction.stall_seconds,
            plain_seconds=_seconds(self.unchanged),
            recompute_seconds=self.predict(self.recomputed).step_seconds,
            flops=prediction.flops,
            extra_flops=prediction.extra_flops,
        )

    def held(self, decisions: Decisions) -> int:
        """What the manager holds at once on the worst path."""
        return held_bytes(self.program, self.blocks, decisions).worst

    def floor(self, decisions: Decisions) -> int:
        """The smallest pool that the decisions can run with."""
        held = self.held(decisions)
        if self.program.loops:
            return (_MIN_POOL_BYTES if self.has_disk else held + _MIN_POOL_BYTES) + LOOP_TOPS_BYTES
        return min(held, _MIN_POOL_BYTES) if self.has_disk else held

    def error(self, limit: int, least: int, decisions: Decisions) -> BudgetError:
        """Says what is needed, and for what."""
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


def _seconds(candidate: Candidate) -> float:
    return candidate.prediction.step_seconds


def keep(decisions: Decisions, room: int) -> bool:
    """Leaves sites to XLA as far as there is room, the most moved byte for byte first."""

    def worth(site: Site) -> tuple[int, int]:
        return -(1 + site.most_readers) * executions(site.region), site.total_bytes

    kept = False
    for site in sorted(decisions.moved(), key=worth):
        offload = decisions.pinned(site.leaf) == "offload"
        if site.total_bytes > room or offload:
            continue
        site.kept = kept = True
        site.reason = "the budget has room for it"
        room -= site.total_bytes
    return kept
