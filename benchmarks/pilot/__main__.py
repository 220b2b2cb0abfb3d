"""What the pilot is worth: memory, quality, time, errors and cost on the dynamic workloads.

    python -m benchmarks.pilot [--quick] [--workload NAME ...] [--part NAME ...] [--share 0.12 ...]
                               [--figures DIR] [--json FILE]

Five parts: what plain JAX reserves and what the taken path needs; how often predictions are right
before the step, against trivial predictors and offline classifiers; what a prediction is worth in
time at budgets of 50, 25 and 12% of plain; wrong predictions on purpose; the pilot's cost. There is
a table for each part of each workload and, with --figures, a figure for each part.
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
PARTS = ("memory", "quality", "worth", "mispredictions", "cost")
_BUDGETS = (0.5, 0.25, 0.12)


def run(
    quick: bool, names: Sequence[str], wanted: Sequence[str], shares: Sequence[float]
) -> dict[str, list[Claim]]:
    """The parts that are wanted, workload by workload; rows by part."""
    size, steps, kept, rounds = ("small", 80, 6, 1) if quick else ("full", 300, 17, 3)
    # A small step needs less than the manager's pool: it is made to move something nevertheless.
    options = {"min_bytes": 1, "flops_per_byte": -1.0} if quick else {}
    measure_rates()
    parts: dict[str, list[Claim]] = {}
    if "memory" in wanted:
        parts["memory"] = memory.switch_claims()
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
        measure: dict[str, Callable[[], list[Claim]]] = {
            "memory": partial(memory.workload_claims, recording, half, plain),
            "quality": partial(quality.claims, recording, bounds=not quick),
            "worth": partial(worth.claims, recording, plain, shares, rounds, bounds=not quick),
            "mispredictions": partial(worth.mispredictions, recording, rounds),
            "cost": partial(cost.claims, recording, 10 * rounds, bounds=not quick),
        }
        for part in PARTS:
            if part in wanted:
                rows = measure[part]()
                show(f"the pilot: {name}, {part}", rows)
                parts.setdefault(part, []).extend(rows)
    return parts


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--workload", choices=WORKLOADS, action="append")
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--share", type=float, action="append")
    parser.add_argument("--figures", type=pathlib.Path)
    own, rest = parser.parse_known_args(arguments)
    options = parse(__doc__, rest)
    parts = run(
        options.quick, own.workload or list(WORKLOADS), own.part or PARTS, own.share or _BUDGETS
    )
    if own.figures is not None:
        draw(parts, own.figures)
    return conclude("the pilot", [row for rows in parts.values() for row in rows], options.json)


if __name__ == "__main__":
    sys.exit(main())
