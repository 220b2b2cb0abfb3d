"""Memory over the program, for a picture: what is alive at each operation, bodies included.

A loop's body is shown once, though it runs many times, and of branches the largest: program order
is the axis, not time.
"""

from __future__ import annotations

import dataclasses

from jdynoff.planning.live_ranges import Simulation
from jdynoff.program.graph import Region

_MOST_POINTS = 400


@dataclasses.dataclass(frozen=True)
class Profile:
    """Simulated memory of a step's temporaries.

    Attributes:
      points: (share of the program behind it, bytes alive from there to the next point).
    """

    points: tuple[tuple[float, int], ...]


def profile(simulation: Simulation, region: Region) -> Profile:
    """The profile of a region under the simulation's decisions; each point is a local maximum."""
    alive: list[int] = []
    _walk(simulation, region, 0, alive)
    step = -(-len(alive) // _MOST_POINTS) or 1
    return Profile(
        tuple(
            (start / max(len(alive), 1), max(alive[start : start + step]))
            for start in range(0, len(alive), step)
        )
    )


def _walk(simulation: Simulation, region: Region, base: int, alive: list[int]) -> None:
    totals = simulation.totals(region)
    for operation, total in zip(region.operations, totals, strict=True):
        alive.append(base + total)
        if operation.bodies:
            largest = max(
                operation.bodies, key=lambda body: max(simulation.totals(body), default=0)
            )
            _walk(simulation, largest, base + total, alive)
