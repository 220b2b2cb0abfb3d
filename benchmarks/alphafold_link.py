"""AlphaFold on an absent H200: what the link carries, and what is computed again.

One step of initial training. Within the peak of per-block `jax.checkpoint`, which computes every
block again, two plans: the fastest one that the planner predicts, and the one that computes least
again while the link carries, in each direction, at most 0.9 of what it could while the step
computes. Then how little any plan of this planner could compute again, by duality: at a price p of
a byte the cheapest choice costs C(p) FLOPs, so one that stores S bytes computes at least C(p) - p S
again.

The rates are those of `jdynoff.planning.machine`, from data sheets. A step sustains fewer FLOP/s
than its products alone, since much of it waits for memory: its own rate is its FLOPs over its
predicted time. What would hold if all of it ran at the rate of products is shown beside it.

FLOPs are by the usual formulas on traced operations, loops multiplied out: XLA's `cost_analysis`
says nothing of a program for an absent device, and elsewhere counts the body of a loop once.

It takes an environment with JAX's CUDA plugin (see `jdynoff.targets`), and half an hour, most of
it XLA's.

    python -m benchmarks.alphafold_link [--quick] [--target h200] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import jdynoff
from benchmarks.alphafold_memory import checkpointed_bytes, step_and_shapes
from benchmarks.harness import Claim, parse, report
from jdynoff.planning.budget import format_bytes
from jdynoff.planning.cost import flops
from jdynoff.planning.live_ranges import executions
from jdynoff.planning.machine import Machine, machine_of
from jdynoff.planning.predict import Model, replayed
from jdynoff.planning.search import SPREAD
from jdynoff.planning.sites import find_sites
from jdynoff.program.build import build
from jdynoff.program.graph import Program
from jdynoff.targets import described_sharding
from models.alphafold.training.settings import training_config

_MIN_BYTES = 16 << 10
_CALL_BYTES = 4096  # what the planner adds to each entry
_MOST_EXTRA = 5.0  # per cent
_LINK_SHARE = 0.9
_ATTEMPTS = 3
_PRICES = np.geomspace(8, 200, 80)
_NOTHING_AGAIN = -1.0  # a price
_SEARCHED = (32.0, 160.0)


@dataclasses.dataclass(frozen=True)
class Amounts:
    """What a choice at one price comes to.

    Attributes:
      again: FLOPs that are computed again.
      stored: bytes.
      entries: in how many arrays.
    """

    again: float
    stored: float
    entries: float


def amounts(program: Program, price: float, spread: float = 0.0) -> Amounts:
    """Sums up the choice at a price."""
    decisions = find_sites(program, _MIN_BYTES, price, spread=spread)
    sites = [(site, executions(site.region)) for site in decisions.sites]
    # What is stored within one run of a loop's body would not be there at once.
    assert all(times == 1 for _, times in sites)
    return Amounts(
        sum(flops(operation) * executions(region) for operation, region in replayed(decisions)),
        sum(site.total_bytes * times for site, times in sites),
        sum(site.entries * times for site, times in sites),
    )


def least_again(program: Program, stored: float) -> float:
    """A bound from below on the FLOPs that are computed again if so many bytes are stored."""
    most_entries = amounts(program, _NOTHING_AGAIN).entries
    bounds = []
    for price in map(float, _PRICES):
        found = amounts(program, price)
        # What is minimised counts a call for each entry, and another choice may have more of them.
        calls = _CALL_BYTES * (most_entries - found.entries)
        bounds.append(found.again + price * (found.stored - calls - stored))
    return max(0.0, *bounds)


def price_for(program: Program, stored: float, spread: float) -> float:
    """The lowest price, to a ten-thousandth, at which at most so many bytes are stored."""
    low, high = _SEARCHED
    assert amounts(program, low, spread).stored > stored >= amounts(program, high, spread).stored
    while high / low > 1.0001:
        middle = math.sqrt(low * high)
        if amounts(program, middle, spread).stored <= stored:
            high = middle
        else:
            low = middle
    return high


@dataclasses.dataclass(frozen=True)
class Planned:
    """One plan, by what it moves and computes again."""

    plan: Any
    program: Program
    again_share: float
    far_bytes: tuple[float, float]  # out and back


def planned(step: Any, shapes: tuple[Any, Any], **options: Any) -> Planned:
    """Plans and compiles."""
    managed = jdynoff.managed(step, **options)
    plan = managed.plan(*shapes)
    far = max(plan.held_bytes - plan.pool_bytes, 0) / max(plan.held_bytes, 1)
    forecast = plan.forecast
    return Planned(
        plan,
        managed._last.program,
        forecast.extra_flops / forecast.flops,
        (far * plan.offloaded_bytes, far * plan.reloaded_bytes),
    )


def rows(name: str, found: Planned, machine: Machine, model: Model, bounds: bool) -> list[Claim]:
    """The claims of one plan."""
    plan, forecast = found.plan, found.plan.forecast
    rates = (machine.out_bytes_per_second, machine.back_bytes_per_second)
    link = max(moved / rate for moved, rate in zip(found.far_bytes, rates, strict=True))
    products = model.flops / machine.flops_per_second
    out, back = (moved / 1e9 for moved in found.far_bytes)
    return [
        Claim(
            f"{name}: FLOPs computed again",
            "",
            100 * found.again_share,
            "% of plain's",
            _MOST_EXTRA if bounds else None,
            note=f"price {forecast.flops_per_byte:.3g} FLOPs a byte; peak "
            f"{format_bytes(plan.device_peak_bytes)}, of it pool {format_bytes(plan.pool_bytes)}; "
            f"predicted {forecast.step_seconds:.2f} s, plain {forecast.plain_seconds:.2f} s",
        ),
        Claim(
            f"{name}: time of the link",
            "",
            link / model.compute_seconds,
            "of the computation's",
            _LINK_SHARE if bounds else None,
            note=f"{out:.1f} GB out, {back:.1f} GB back, {rates[0] / 1e9:.1f} GB/s each way; "
            f"{link / products:.2f} of the products' time alone",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv, target=True)
    sharding = described_sharding(options.target or "h200")
    step, *shapes = step_and_shapes(training_config("initial_training"), sharding)
    program = build(step.trace(*shapes).jaxpr)
    (device,) = sharding.device_set
    machine = machine_of(device)
    model = Model(program, machine)
    budget = checkpointed_bytes("initial_training", sharding, chunks=False)
    print(f"per-block jax.checkpoint: {format_bytes(budget)}")
    rate = machine.out_bytes_per_second
    allowed = {
        "its own rate": _LINK_SHARE * model.compute_seconds * rate,
        "the rate of products": _LINK_SHARE * model.flops / machine.flops_per_second * rate,
    }
    claims = [
        Claim(
            f"least FLOPs again with {_LINK_SHARE} of the link, FLOPs at {name}",
            "",
            100 * least_again(program, moved + budget) / model.flops,
            "% of plain's",
            None,
            note=f"{moved / 1e9:.1f} GB each way, and as much again kept as the whole peak",
        )
        for name, moved in allowed.items()
    ]
    if not options.quick:
        fastest = planned(step, tuple(shapes), budget=budget)
        claims += rows("the fastest", fastest, machine, model, bounds=False)
        # What stays on the device is known when a plan is compiled; at first, by the plan that
        # leaves most room.
        stays = budget - fastest.plan.min_feasible_bytes
        for _ in range(_ATTEMPTS):
            # JAX orders the operations of one step differently from trace to trace.
            price = price_for(fastest.program, allowed["its own rate"] + stays, SPREAD)
            filled = planned(step, tuple(shapes), budget=budget, flops_per_byte=price)
            if max(filled.far_bytes) <= allowed["its own rate"]:
                break
            stays = amounts(fastest.program, price, SPREAD).stored - max(filled.far_bytes)
        claims += rows("the link filled", filled, machine, model, bounds=True)
    return report(
        f"AlphaFold, initial training, {machine.name}: {model.flops:.3g} FLOPs, predicted "
        f"{model.compute_seconds:.2f} s, products at {machine.flops_per_second / 1e12:.0f} TFLOP/s",
        claims,
        options.json,
    )


if __name__ == "__main__":
    sys.exit(main())
