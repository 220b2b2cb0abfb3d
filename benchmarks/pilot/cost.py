"""Part 5: what the pilot costs, in the step and before it."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from benchmarks.harness import Claim, interleave
from benchmarks.pilot.recording import Recording

_SHARE = 1.0  # % of the step
_BYTES = 1 << 20


def claims(recording: Recording, rounds: int, bounds: bool) -> list[Claim]:
    """Time of features, prediction and learning alone, against the step's."""
    guide, name = recording.guide, recording.workload.name
    batch = recording.batches[-1]
    leaves = jax.tree.leaves(((recording.state, batch), {}))
    pilot_state = recording.managed._last.pilot_state

    def alone(state: Any, leaves: Any, counters: Any) -> Any:
        foreseen = guide.foresee(state, leaves)
        return guide.learn(state, foreseen, counters), foreseen.counters

    compiled = jax.jit(alone)
    counters = recording.counters[-1]
    times = interleave(
        {
            "pilot": lambda: compiled(pilot_state, leaves, counters),
            "step": lambda: recording.managed(recording.state, batch),
        },
        rounds,
    )
    share, low, high = times["pilot"].ratio(times["step"])
    size = 0 if pilot_state is None else np.asarray(pilot_state).nbytes
    plan = recording.managed.plan(recording.state, batch)
    return [
        Claim(
            f"{name}: the pilot's time, of the step's",
            "",
            100 * share,
            "%",
            _SHARE if bounds else None,
            note=f"{100 * low:.2f} to {100 * high:.2f}, {1e6 * times['pilot'].median:.0f} us of "
            f"{1e3 * times['step'].median:.0f} ms",
            series={
                "pilot, ms": 1e3 * times["pilot"].median,
                "step": 1e3 * times["step"].median,
            },
        ),
        Claim(f"{name}: the pilot's size", "", size / 1e3, "kB", _BYTES / 1e3),
        Claim(
            f"{name}: planning and rewriting",
            "",
            100 * plan.rewrite_seconds / plan.compile_seconds,
            "% of XLA's time",
            None,
            note=f"{plan.rewrite_seconds:.2f} s",
        ),
    ]
