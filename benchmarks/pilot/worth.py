"""Parts 3 and 4: what a prediction is worth in time and traffic, and what a wrong one costs.

All policies run compiled steps of one network on the same batches in turn, on batches that nobody
has seen before; what is told to the step before it starts, and which of its programs runs, is all
that differs. Without a prediction one program runs on every path: each of them, and each that a
price of the search gives (once if it is far slower than others), is tried with a "watermark", which
expects nothing, so that bytes leave the pool only when it runs low; and the one for the heaviest
path with "everything", which expects the worst. With a prediction, it picks the program. The
headroom is what the oracle saves over the best of those without; where it is small there is nothing
to win, and the table says so.

The disk of a machine may be so fast that nothing is worth predicting, so the smaller budgets are
measured with a disk of the rate of an ordinary cloud volume as well.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import jdynoff
from benchmarks.harness import Claim, megabytes, skipped
from benchmarks.pilot.recording import Recording
from jdynoff.planning.prices import PRICES
from jdynoff.runtime.tiers import default_tiers

_PROGRAMS = 3
_SLOW = "125MB"
_SLOW_BELOW = 0.5  # of plain
_TRIED = 12  # batches for wrong predictions
_HEADROOM = 0.05
_FAR = 1.25  # times the best without prediction
_CLOSED = 0.8


@dataclasses.dataclass(eq=False)
class Told:
    """A step that is told its path from outside."""

    step: Any

    @classmethod
    def of(cls, recording: Recording, **options: Any) -> Told:
        """Plans and compiles the step of a recording."""
        step = jdynoff.managed(jax.jit(recording.workload.step), **{**recording.options, **options})
        step._told = True
        step.plan(recording.state, recording.batches[-1])
        return cls(step)

    def run(
        self, counters: np.ndarray, state: Any, batch: Any, program: int | None = None
    ) -> tuple[Any, float]:
        """One step; its results and its seconds.

        Args:
          counters: what it is told.
          state: of the workload.
          batch: of the workload.
          program: which one runs; None for the one that is predicted to be the fastest.
        """
        if program is not None:
            self.step._fastest = lambda traced, *_: traced.ready.options[program]
        else:
            self.step.__dict__.pop("_fastest", None)
        # The last step's state lands when it is waited for, and must not replace this one.
        self.step._ledger.wait(self.step)
        self.step._last.pilot_state = np.asarray(counters, np.float32)
        started = time.perf_counter()
        results = jax.block_until_ready(self.step(state, batch))
        return results, time.perf_counter() - started


@dataclasses.dataclass
class Sums:
    """Of one policy over all batches and rounds."""

    seconds: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    moved: int = 0
    stalled: float = 0.0

    def add(self, batch: int, seconds: float, stats: Any) -> None:
        """Adds one step."""
        self.seconds.setdefault(batch, []).append(seconds)
        self.moved += stats.bytes_written + stats.bytes_read
        self.stalled += stats.stall_seconds

    @property
    def mean(self) -> float:
        """Seconds of a step: over the batches, of the median over rounds."""
        return float(np.mean([np.median(rounds) for rounds in self.seconds.values()]))

    @property
    def steps(self) -> int:
        """How many were added."""
        return sum(map(len, self.seconds.values()))

    @property
    def rounds(self) -> int:
        """How many times each batch was run."""
        return min(map(len, self.seconds.values()))


@dataclasses.dataclass(frozen=True)
class Compared:
    """What policies came to.

    Attributes:
      sums: by policy.
      programs: between which predictions choose.
      rounds: of the policies that were not given up.
    """

    sums: dict[str, Sums]
    programs: int
    rounds: int


def worst(recording: Recording) -> np.ndarray:
    """Counters of every block as high as it can be, or as it was."""
    most = [block.most for block in recording.guide.blocks.learned]
    seen = recording.counters.max(axis=0)
    pairs = zip(most, seen, strict=True)
    return np.asarray([high if limit is None else limit for limit, high in pairs])


def true_paths(recording: Recording, told: Told) -> list[np.ndarray]:
    """The counters of the kept batches on the kept state."""
    found = []
    for batch in recording.batches:
        told.run(worst(recording), recording.state, batch)
        path = told.step.stats().path
        found.append(np.asarray([path[name] for name in recording.names]))
    return found


@dataclasses.dataclass(eq=False)
class Experienced:
    """A step whose pilot knows what that of the recording has learned."""

    step: Any
    known: Any  # the pilot's state

    @classmethod
    def of(cls, recording: Recording, batch: Any, **options: Any) -> Experienced:
        """Compiles a step and runs it once."""
        step = jdynoff.managed(jax.jit(recording.workload.step), **options, **recording.options)
        with tempfile.TemporaryDirectory() as learned:
            if recording.learned.any():
                recording.managed.pilot.save(learned)
                step.pilot.restore(learned)
            jax.block_until_ready(step(recording.state, batch))
        step._ledger.wait(step)
        return cls(step, step._last.pilot_state)

    def forget(self) -> None:
        """Goes back to what was known in the beginning."""
        self.step._ledger.wait(self.step)
        self.step._last.pilot_state = self.known

    def run(self, state: Any, batch: Any) -> float:
        """The seconds of a step."""
        started = time.perf_counter()
        jax.block_until_ready(self.step(state, batch))
        return time.perf_counter() - started


def single_programs(
    recording: Recording, options: dict[str, Any], paths: list[np.ndarray]
) -> dict[str, Told]:
    """The step with each price of the search, as far as it fits, and as it is chosen.

    Each has run twice, on the shortest of the paths of the kept batches and on the longest.
    """
    order = sorted(range(len(paths)), key=lambda number: int(paths[number].sum()))
    found = {}
    for price in (None, *PRICES):
        try:
            told = Told.of(recording, **{**options, "flops_per_byte": price}, variants=1)
        except jdynoff.BudgetError:
            continue
        for number in (order[0], order[-1]):
            told.run(paths[number] * 0, recording.state, recording.batches[number])
        found[f"watermark, price {'chosen' if price is None else f'{price:g}'}"] = told
    return found


def compare(recording: Recording, budget: int, tiers: list[jdynoff.Disk], rounds: int) -> Compared:
    """Every policy on every kept batch, in turn, so many times.

    Single programs that are far from the best after the first round are left at that. In each
    round the pilots know what they knew in the first: they learn from these batches, too.
    """
    options = {"budget": budget, "tiers": tiers}
    told = Told.of(recording, variants=_PROGRAMS, **options)
    *batches, unused = recording.batches
    pilots = {
        name: Experienced.of(recording, unused, variants=variants, **options)
        for name, variants in (("pilot, one program", 1), ("pilot", _PROGRAMS))
    }
    programs = told.step.plan(recording.state, unused).variants
    paths = true_paths(recording, told)
    highest = worst(recording)
    for program in range(programs):
        told.run(highest, recording.state, unused, program)
    alone = {} if programs == 1 else single_programs(recording, options, paths)
    sums: dict[str, Sums] = defaultdict(Sums)
    for turn in range(rounds):
        if turn == 1:
            near = _FAR * min(sums[name].mean for name in sums if _is_unpredicted(name))
            alone = {name: single for name, single in alone.items() if sums[name].mean <= near}
        last = recording.counters[-1]
        for pilot in pilots.values():
            pilot.forget()
        for number, (batch, path) in enumerate(zip(batches, paths, strict=False)):
            policies = {
                f"watermark{f', program {program + 1}' if program else ''}": (path * 0, program)
                for program in range(programs)
            }
            policies["everything"] = highest, 0
            for name, (expected, program) in {
                **policies,
                "oracle, one program": (path, 0),
                "last path": (last, None),
                "oracle": (path, None),
            }.items():
                _, seconds = told.run(expected, recording.state, batch, program)
                sums[name].add(number, seconds, told.step.stats())
            for name, single in alone.items():
                _, seconds = single.run(path * 0, recording.state, batch)
                sums[name].add(number, seconds, single.step.stats())
            for name, pilot in pilots.items():
                sums[name].add(number, pilot.run(recording.state, batch), pilot.step.stats())
            last = path
    return Compared(dict(sums), programs, rounds)


def claims(
    recording: Recording, plain: int, shares: Sequence[float], rounds: int, bounds: bool
) -> list[Claim]:
    """Headroom at each budget, and what the pilot closes of it."""
    found = []
    name = recording.workload.name
    least = recording.managed.plan(recording.state, recording.batches[-1]).min_feasible_bytes
    (disk,) = default_tiers()
    for rate in (None, _SLOW):
        tiers = [dataclasses.replace(disk, rate=rate)]
        for share in shares:
            if rate is not None and share >= _SLOW_BELOW:
                continue
            budget = int(share * plain)
            title = f"{name}: {100 * share:.0f}% of plain"
            if rate is not None:
                title += f", disk of {rate}/s"
            if budget < least:
                found.append(skipped(title, f"the least budget is {100 * least / plain:.0f}%"))
                continue
            told = Told.of(recording, budget=budget, tiers=tiers, variants=_PROGRAMS)
            if not told.step.plan(recording.state, recording.batches[-1]).traffic_bytes:
                reason = "the budget is kept without the manager: nothing to win"
                found.append(skipped(title, reason))
                continue
            print(f"{title}...", file=sys.stderr)
            found += _rows(title, compare(recording, budget, tiers, rounds), bounds)
    return found


def _is_unpredicted(policy: str) -> bool:
    return policy.startswith(("watermark", "everything"))


def _rows(title: str, compared: Compared, bounds: bool) -> list[Claim]:
    sums = compared.sums

    def mean(policy: str) -> float:
        return sums[policy].mean

    complete = [name for name, one in sums.items() if one.rounds == compared.rounds]
    unpredicted = [name for name in complete if _is_unpredicted(name)]
    without = min(unpredicted, key=mean)
    oracle, pilot = mean("oracle"), mean("pilot")
    headroom = 1 - oracle / mean(without)
    listed = "; ".join(
        f"{policy} {mean(policy) / oracle:.2f}x{'' if policy in complete else ' (one round)'}, "
        f"{megabytes(one.moved / one.steps):.3g} MB, "
        f"{1e3 * one.stalled / one.steps:.2g} ms stalled"
        for policy, one in sums.items()
    )
    rows = [
        Claim(
            f"{title}: headroom",
            "",
            100 * headroom,
            "% of the step",
            None,
            note=f"best without prediction: {without}; {compared.programs} programs; "
            f"{len(sums['pilot'].seconds)} batches. Time of the oracle's, through the disk: "
            f"{listed}",
            series={f"{policy}, x": mean(policy) / oracle for policy in complete},
        )
    ]
    closed = (mean(without) - pilot) / max(mean(without) - oracle, 1e-12)
    worthwhile = headroom >= _HEADROOM
    rows.append(
        Claim(
            f"{title}: of it closed by the pilot",
            "",
            100 * closed if worthwhile else None,
            "%",
            100 * _CLOSED if worthwhile and bounds else None,
            at_least=True,
            note="" if worthwhile else "nothing to win",
        )
    )
    return rows


def mispredictions(recording: Recording, rounds: int) -> list[Claim]:
    """Wrong predictions in a rising share of steps, at the least budget: the same bits."""
    told = Told.of(recording, budget="min", variants=1)
    if not told.step.plan(recording.state, recording.batches[-1]).traffic_bytes:
        return [skipped(f"{recording.workload.name}: wrong predictions", "nothing is moved")]
    paths, highest = true_paths(recording, told), worst(recording)
    rng = np.random.default_rng(0)
    state = recording.state
    cases = list(zip(recording.batches, paths, strict=True))[:_TRIED]
    expected = [told.run(path, state, batch)[0] for batch, path in cases]
    differing, seconds = 0, {}
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)
    times: dict[float, list[float]] = {share: [] for share in shares}
    for _ in range(rounds):
        for number, (batch, path) in enumerate(cases):
            for share in shares:
                wrong = rng.uniform() < share
                said = rng.integers(0, highest + 1) if wrong else path
                results, elapsed = told.run(said, state, batch)
                times[share].append(elapsed)
                differing += not _identical(results, expected[number])
    seconds = {share: float(np.mean(values)) for share, values in times.items()}
    name = recording.workload.name
    slower = ", ".join(
        f"{100 * share:.0f}%: {value / seconds[0.0]:.2f}x" for share, value in seconds.items()
    )
    return [
        Claim(f"{name}: results that differ after wrong predictions", "", differing, "", 0),
        Claim(
            f"{name}: time with all predictions wrong",
            "",
            seconds[1.0] / seconds[0.0],
            "x",
            None,
            note=slower,
            series={
                f"{100 * share:.0f}% wrong, x": value / seconds[0.0]
                for share, value in seconds.items()
            },
        ),
    ]


def _identical(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
