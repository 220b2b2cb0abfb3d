"""What a search weighs up, and what it chooses."""

from __future__ import annotations

import dataclasses

from jdynoff.planning.decisions import Decisions
from jdynoff.planning.live_ranges import Simulation
from jdynoff.planning.plan import Plan
from jdynoff.planning.predict import Prediction

# Frames that are packed and in no pool yet (`xla_ext/loop_stacks.cc`), most of them.
LOOP_TOPS_BYTES = 8 << 20


@dataclasses.dataclass(eq=False, repr=False)
class Candidate:
    """Decisions at one price, and what simulation and model say of them."""

    price: float
    decisions: Decisions
    simulation: Simulation
    simulated: int  # peak of the temporaries, in bytes
    prediction: Prediction = dataclasses.field(init=False)
    allowance: int | None = None
    keeping: bool = False


@dataclasses.dataclass(frozen=True)
class Choice:
    """The decisions of one signature and what they need at run time."""

    decisions: Decisions
    plan: Plan

    @property
    def moves(self) -> bool:
        """Whether the step calls the manager at all."""
        return self.decisions.calls_manager()

    @property
    def ticket_pool_bytes(self) -> int:
        """What the manager's arena may take of the plan's pool."""
        return self.plan.pool_bytes - (LOOP_TOPS_BYTES if self.decisions.loops else 0)

    @property
    def uses_disk(self) -> bool:
        """Whether the pool may be too small for what the step moves."""
        return self.decisions.loops or self.plan.spill_bytes > 0
