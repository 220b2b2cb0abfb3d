"""Parts 3 and 4: what a prediction is worth in time and traffic, and what a wrong one costs.

All policies run the same compiled step on the same batches in turn; what is told to the step before
it starts is all that differs. "watermark" expects nothing, so bytes leave the pool only when it
runs low; "everything" expects the worst path. The headroom is what the oracle saves over the better
of the two; where it is small there is nothing to win, and the table says so.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np

import jdynoff
from benchmarks.harness import Claim, megabytes, skipped
from benchmarks.pilot.recording import Recording

WITHOUT = ("watermark", "everything")
_HEADROOM = 0.05
_CLOSED = 0.8


@dataclasses.dataclass(eq=False)
class Told:
    """A step that is told its path from outside."""

    step: Any
    counters: np.ndarray

    @classmethod
    def of(cls, recording: Recording, **options: Any) -> Told:
        """Compiles the step of a recording."""
        step = jdynoff.managed(jax.jit(recording.workload.step), **recording.options, **options)
        told = cls(step, np.zeros(len(recording.names), np.int32))
        shape = jax.ShapeDtypeStruct(told.counters.shape, np.int32)
        step._foretell = lambda leaves: jax.pure_callback(lambda: told.counters, shape)
        return told

    def run(self, counters: np.ndarray, state: Any, batch: Any) -> tuple[Any, float]:
        """One step; its results and its seconds."""
        self.counters = np.asarray(counters, np.int32)
        started = time.perf_counter()
        results = jax.block_until_ready(self.step(state, batch))
        return results, time.perf_counter() - started


@dataclasses.dataclass
class Sums:
    """Of one policy over all rounds."""

    seconds: list[float] = dataclasses.field(default_factory=list)
    moved: int = 0
    stalled: float = 0.0

    def add(self, seconds: float, stats: Any) -> None:
        """Adds one step."""
        self.seconds.append(seconds)
        self.moved += stats.bytes_written + stats.bytes_read
        self.stalled += stats.stall_seconds


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


def compare(recording: Recording, budget: int, variants: int, rounds: int) -> dict[str, Sums]:
    """Every policy on every kept batch, in turn."""
    told = Told.of(recording, budget=budget, variants=variants)
    pilot = jdynoff.managed(
        jax.jit(recording.workload.step), budget=budget, variants=variants, **recording.options
    )
    paths = true_paths(recording, told)
    highest = worst(recording)
    rng = np.random.default_rng(0)
    sums: dict[str, Sums] = {name: Sums() for name in (*WITHOUT, "last path", "oracle", "pilot")}
    state = recording.state
    for _ in range(2):  # the pilot learns, and everything is compiled
        for batch in recording.batches:
            jax.block_until_ready(pilot(state, batch))
    for _ in range(rounds):
        last = paths[-1]
        for number in rng.permutation(len(paths)):
            batch, path = recording.batches[number], paths[number]
            expectations = {
                "watermark": np.zeros_like(path),
                "everything": highest,
                "last path": last,
                "oracle": path,
            }
            for name, expected in expectations.items():
                _, seconds = told.run(expected, state, batch)
                sums[name].add(seconds, told.step.stats())
            started = time.perf_counter()
            jax.block_until_ready(pilot(state, batch))
            sums["pilot"].add(time.perf_counter() - started, pilot.stats())
            last = path
    return sums


def claims(
    recording: Recording, plain: int, shares: tuple[float, ...], rounds: int, bounds: bool
) -> list[Claim]:
    """Headroom at each budget, and what the pilot closes of it."""
    found = []
    name = recording.workload.name
    least = recording.managed.plan(recording.state, recording.batches[-1]).min_feasible_bytes
    for share in shares:
        budget = int(share * plain)
        if budget < least:
            title = f"{name}: {100 * share:.0f}% of plain"
            found.append(skipped(title, f"the least budget is {100 * least / plain:.0f}%"))
            continue
        told = Told.of(recording, budget=budget, variants=1)
        if not told.step.plan(recording.state, recording.batches[-1]).traffic_bytes:
            title = f"{name}: {100 * share:.0f}% of plain"
            found.append(skipped(title, "the budget is kept without the manager: nothing to win"))
            continue
        for variants in (1, 3):
            sums = compare(recording, budget, variants, rounds)
            found += _rows(
                f"{name}: {100 * share:.0f}% of plain, {variants} programs", sums, bounds
            )
    return found


def _rows(title: str, sums: dict[str, Sums], bounds: bool) -> list[Claim]:
    def mean(policy: str) -> float:
        return float(np.mean(sums[policy].seconds))

    without = min(WITHOUT, key=mean)
    oracle, pilot = mean("oracle"), mean("pilot")
    headroom = 1 - oracle / mean(without)
    steps = len(sums["pilot"].seconds)
    listed = "; ".join(
        f"{policy} {mean(policy) / oracle:.2f}x, {megabytes(one.moved / steps):.3g} MB, "
        f"{1e3 * one.stalled / steps:.2g} ms stalled"
        for policy, one in sums.items()
    )
    rows = [
        Claim(
            f"{title}: headroom",
            "",
            100 * headroom,
            "% of the step",
            None,
            note=f"best without prediction: {without}. Time of the oracle's, through the disk: "
            + listed,
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
    cases = list(zip(recording.batches, paths, strict=True))
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
        ),
    ]


def _identical(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
