"""What the pilot is worth: memory, quality, time, errors and cost on the dynamic workloads.

    python -m benchmarks.pilot [--quick] [--workload NAME] [--figures DIR] [--json FILE]

Five parts: what plain JAX reserves and what the taken path needs; how often predictions are right
before the step, against trivial predictors and offline classifiers; what a prediction is worth in
time at budgets of 50, 25 and 12% of plain; wrong predictions on purpose; the pilot's cost. There is
one table for each workload and, with --figures, one figure for each part.
With --quick networks are small and untrained: it shows that everything runs, and what it says of
quality, time and cost has no bounds.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.harness import Claim, conclude, measure_rates, parse, show
from benchmarks.pilot import cost, memory, quality, worth
from benchmarks.pilot.figures import draw
from benchmarks.pilot.recording import record
from models.digits.train import make as make_digits
from models.frames.train import make as make_frames
from models.looped.train import make as make_looped
from models.moe.train import make as make_moe
from models.trees.train import make as make_trees
from models.workload import Workload

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "digits": make_digits,
    "noisy digits": partial(make_digits, form="noisy"),
    "moe": make_moe,
    "frames": make_frames,
    "looped": make_looped,
    "trees": make_trees,
}
_BUDGETS = (0.5, 0.25, 0.12)


def run(quick: bool, names: Sequence[str]) -> dict[str, list[Claim]]:
    """All parts, workload by workload; rows by part."""
    size, steps, kept, rounds = ("small", 80, 6, 1) if quick else ("full", 300, 17, 3)
    # A small step needs less than the manager's pool: it is made to move something nevertheless.
    options = {"min_bytes": 1, "flops_per_byte": -1.0} if quick else {}
    measure_rates()
    parts: dict[str, list[Claim]] = {"memory": memory.switch_claims()}
    show("the pilot: a switch", parts["memory"])
    for name in names:
        make = WORKLOADS[name]
        print(f"{name}...", file=sys.stderr)
        recording = record(make(size), options, steps, kept)
        plain = memory.plain_bytes(recording.workload.step, recording.state, recording.batches[-1])
        half = max(
            plain // 2,
            recording.managed.plan(recording.state, recording.batches[-1]).min_feasible_bytes,
        )
        found = {
            "memory": memory.workload_claims(recording, half, plain),
            "quality": quality.claims(recording, bounds=not quick) + quality.ablation(recording),
            "worth": worth.claims(recording, plain, _BUDGETS, rounds, bounds=not quick),
            "mispredictions": worth.mispredictions(recording, rounds),
            "cost": cost.claims(recording, 10 * rounds, bounds=not quick),
        }
        show(f"the pilot: {name}", [claim for rows in found.values() for claim in rows])
        for part, rows in found.items():
            parts.setdefault(part, []).extend(rows)
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--workload", choices=WORKLOADS)
    parser.add_argument("--figures", type=pathlib.Path)
    own, rest = parser.parse_known_args(arguments)
    options = parse(__doc__, rest)
    names = [own.workload] if own.workload else list(WORKLOADS)
    parts = run(options.quick, names)
    if own.figures is not None:
        draw(parts, own.figures)
    return conclude("the pilot", [row for rows in parts.values() for row in rows], options.json)


if __name__ == "__main__":
    sys.exit(main())
