"""How far the planner's choice is from the best there is, on steps small enough to know.

Keeping a residual takes room, moving it takes time for each byte, computing it again takes its
operations and whatever they start from. HiGHS solves the integer program of that choice exactly;
the planner tries a few prices of a byte, each a minimum cut, and keeps what the room allows. Both
are measured by the same linear cost: seconds of moving (copies and link, nothing overlapped),
computing again, and memory for what is kept.

    python -m benchmarks.planner_gap [--quick] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import jax
import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from benchmarks import planner
from benchmarks.harness import Claim, parse, report
from jdynoff.planning.cost import flops
from jdynoff.planning.cut import Network
from jdynoff.planning.decisions import Decisions
from jdynoff.planning.live_ranges import executions
from jdynoff.planning.machine import ASSUMED_CPU, Machine
from jdynoff.planning.predict import replayed
from jdynoff.planning.prices import PRICES, cheapest
from jdynoff.planning.search import keep
from jdynoff.planning.sites import find_sites
from jdynoff.program.build import build
from jdynoff.program.graph import Program, Value

_MIN_BYTES = 16 * 1024
_MOST_GAP = 0.1
_SHARES = (0.0, 0.1, 0.25, 0.5)  # of the residuals' bytes, that may be kept


class Costs:
    """Seconds, by the rates of a machine."""

    def __init__(self, machine: Machine) -> None:
        """Takes the rates."""
        self.moved = 2 / machine.copy_bytes_per_second
        self.moved += 1 / machine.out_bytes_per_second + 1 / machine.back_bytes_per_second
        self.kept = 1 / machine.fresh_bytes_per_second
        self.flop = 1 / machine.flops_per_second

    def of(self, decisions: Decisions) -> float:
        """What decisions of the planner cost."""
        moved = kept = 0.0
        for site in decisions.sites:
            size = site.total_bytes * executions(site.region)
            if site.kept:
                kept += site.total_bytes
            else:
                moved += size
        again = sum(
            flops(operation) * executions(region) for operation, region in replayed(decisions)
        )
        return moved * self.moved + kept * self.kept + again * self.flop


def planned(program: Program, room: float, costs: Costs) -> float:
    """The planner's best over its prices, with what the room allows kept or not."""

    def evaluate(price: float) -> tuple[float, None]:
        best = np.inf
        for keeping in (False, True):
            decisions = find_sites(program, _MIN_BYTES, price)
            if keeping:
                keep(decisions, int(room))
            best = min(best, costs.of(decisions))
        return float(best), None

    return cheapest(evaluate, PRICES)[0]


def exact(program: Program, room: float, costs: Costs, seconds: float) -> tuple[float, bool]:
    """The least cost, by an integer program; and whether it is proved to be the least."""
    objective: list[float] = []
    rows: list[tuple[dict[int, float], float]] = []  # sum of coefficients >= bound
    kept_bytes: dict[int, float] = {}
    lower: list[float] = []

    def variable(cost: float, least: float = 0.0) -> int:
        objective.append(cost)
        lower.append(least)
        return len(objective) - 1

    networks: list[Network] = []
    find_sites(program, _MIN_BYTES, np.inf, observe=networks.append)
    for network in networks:
        needed = {node: variable(0.0, float(node in network.residuals)) for node in network.needed}
        made = {
            known: variable(flops(known[1]) * executions(known[0].producer) * costs.flop)
            for known in network.made
        }
        for node, here in needed.items():
            pair, value = node
            ways: dict[int, float] = {here: -1.0}
            times = executions(pair.producer)
            if np.isfinite(network.store_cost(node)):
                ways[variable(value.nbytes * times * costs.moved)] = 1.0
                stays = variable(value.nbytes * times * costs.kept)
                kept_bytes[stays] = value.nbytes * times
                ways[stays] = 1.0
            if value.producer is not None:
                if (pair, value.producer) in made:
                    ways[made[pair, value.producer]] = 1.0
            elif network.pairs.free_origin(pair, value) is not None:
                continue
            else:
                outer = network.pairs.around_operand(pair, value)
                if pair.around is not None and outer is not None:
                    above = needed.get((pair.around, outer))
                    if above is not None:
                        ways[above] = 1.0
            rows.append((ways, 0.0))
        for (pair, operation), computed in made.items():
            rows.extend(
                ({needed[pair, operand]: 1.0, computed: -1.0}, 0.0)
                for operand in operation.operands
                if isinstance(operand, Value)
            )
    rows.append(({number: -size for number, size in kept_bytes.items()}, -room))
    entries = [
        (row, column, value)
        for row, (terms, _) in enumerate(rows)
        for column, value in terms.items()
    ]
    where = np.array([(row, column) for row, column, _ in entries]).T
    matrix = coo_array(
        ([value for _, _, value in entries], (where[0], where[1])),
        shape=(len(rows), len(objective)),
    ).tocsr()
    scale = max(objective)
    solved = milp(
        np.array(objective) / scale,
        constraints=LinearConstraint(matrix, np.array([bound for _, bound in rows]), np.inf),
        bounds=Bounds(np.array(lower), 1.0),
        integrality=np.ones(len(objective)),
        options={"time_limit": seconds},
    )
    if solved.x is None:
        raise RuntimeError(f"HiGHS found nothing: {solved.message}")
    return float(solved.fun * scale), solved.status == 0


def claims(case: planner.Case, seconds: float) -> list[Claim]:
    """The gap at several amounts of room."""
    program = build(jax.jit(case.step).trace(*case.arguments).jaxpr)
    costs = Costs(ASSUMED_CPU)
    everything = find_sites(program, _MIN_BYTES, -1.0)
    size = sum(site.total_bytes for site in everything.moved())
    found = []
    for share in _SHARES:
        best, proved = exact(program, share * size, costs, seconds)
        ours = planned(program, share * size, costs)
        found.append(
            Claim(
                f"{case.name}, room for {100 * share:.0f}% of the residuals",
                "",
                ours / best - 1,
                "of the optimum",
                _MOST_GAP,
                note=f"planned {ours * 1e3:.1f} ms, best {best * 1e3:.1f} ms"
                + ("" if proved else f" (not proved in {seconds:.0f} s)"),
            )
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv)
    cases = [planner.scan_mlp(), planner.transformer()]
    if not options.quick:
        cases.append(planner.alphafold())
    rows = [claim for case in cases for claim in claims(case, 20 if options.quick else 60)]
    return report("The planner beside the optimum", rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
