"""What a managed step offers besides being called: plans, methods of a class, AOT stages.

They mirror JAX's own stages (`jit(f).lower(...).compile()`), and all of them come back to the one
`Managed` step that made them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jdynoff import jax_compat
from jdynoff.planning.budget import parse_bytes
from jdynoff.planning.plan import Plan
from jdynoff.runtime.stats import StepStats
from jdynoff.signatures import signature
from jdynoff.sweep import Sweep

if TYPE_CHECKING:
    from jdynoff.calibrate import Calibration
    from jdynoff.managed import Managed, Traced


class OtherSignature(Exception):
    """A trace found that the program it was called for has other argument types."""


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans of a managed step; nothing is run."""

    step: Managed
    leading: tuple[Any, ...] = ()  # arguments in front of those that are given

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        """Plans the step for these arguments.

        Args:
          *args: arrays or `jax.ShapeDtypeStruct`s (static arguments as in a call). Structs with a
            sharding on a described GPU plan for that GPU.
          **kwargs: the same.

        Returns:
          The plan; it prints as a table.

        Raises:
          BudgetError: if the step cannot fit the budget.
        """
        ready = self.step._traced((*self.leading, *args), kwargs, with_minimum=True).ready
        assert ready is not None
        return ready.choice.plan

    def sweep(self, *args: Any, budgets: Sequence[int | str] | None = None, **kwargs: Any) -> Sweep:
        """Plans the step for several budgets, whatever its own is.

        Args:
          *args: as in a call.
          budgets: bytes or text such as "8GiB"; None for 100, 75, 50, 35, 25, 15 and 10% of what
            plain JAX needs.
          **kwargs: as in a call.

        Returns:
          The plans; they print as a table, and `.plot(path)` draws them.
        """
        given = None if budgets is None else [parse_bytes(budget) for budget in budgets]
        return self.step._sweep((*self.leading, *args), kwargs, given)


@dataclasses.dataclass(frozen=True)
class Pilot:
    """The pilot of a managed step: what it predicts, and what it keeps from run to run."""

    step: Managed
    leading: tuple[Any, ...] = ()  # arguments in front of those that are given

    def predict(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        """Predicts the path of a step, without running it; for the next batch, or any other.

        Args:
          *args: as in a call. Nothing is donated.
          **kwargs: the same.

        Returns:
          By block, how often it will run: those of `stats().predicted`, sliced ones included.

        Raises:
          BudgetError: as a call.
          ConfigurationError: if the step has no pilot.
        """
        return self.step._predicted((*self.leading, *args), kwargs)

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Saves it, once the steps in flight are over; replaces an earlier save.

        Args:
          directory: of this pilot alone; made if need be.

        Raises:
          ConfigurationError: if the step has no pilot (yet).
        """
        from jdynoff.pilot.store import save

        learner, state = self.step._pilot_state()
        save(directory, learner, state)

    def restore(self, directory: str | os.PathLike[str]) -> None:
        """Goes on with what an earlier run has saved; before the first step or at any time.

        Args:
          directory: given to `save`.

        Raises:
          ConfigurationError: if there is no save, or one of another program, which the message
            tells apart. Before the first plan or call of the step they raise it.
        """
        self.step._restore_pilot(directory)


@dataclasses.dataclass(frozen=True)
class Bound:
    """The managed step of a class, bound to one of its objects."""

    step: Managed
    instance: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        return self.step(self.instance, *args, **kwargs)

    @property
    def plan(self) -> Planner:
        """Plans the step without running it."""
        return Planner(self.step, (self.instance,))

    def lower(self, *args: Any, **kwargs: Any) -> ManagedLowered:
        """Lowers the managed step."""
        return self.step.lower(self.instance, *args, **kwargs)

    @property
    def pilot(self) -> Pilot:
        """What the pilot has learned."""
        return Pilot(self.step, (self.instance,))

    def calibrate(self) -> Calibration:
        """Corrects this machine's rates by steps of whichever object."""
        return self.step.calibrate()

    def stats(self) -> StepStats:
        """What the last completed step moved, of whichever object."""
        return self.step.stats()


@dataclasses.dataclass(frozen=True)
class ManagedLowered:
    """A lowered managed step; `compile()` gives its executable."""

    step: Managed
    traced: Traced
    lowered: Any

    def compile(self) -> ManagedCompiled:
        """Compiles it, or finds the program that planning has compiled."""
        return ManagedCompiled(self.step, self.traced, self.lowered.compile())

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        """The program in MLIR, as `jax.stages.Lowered.as_text`."""
        return self.lowered.as_text(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class ManagedCompiled:
    """A compiled managed step, like `jax.stages.Compiled`; calling it runs it."""

    step: Managed
    traced: Traced
    compiled: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step.

        Raises:
          TypeError: for arguments of other types than it was lowered for.
        """
        if not jax_compat.is_top_level():
            return self.step(*args, **kwargs)  # which says what to do instead
        try:
            return self.step._run(self.traced, args, kwargs)
        except OtherSignature:
            given, expected = signature(self.step._options, args, kwargs), self.traced.signature
            raise TypeError(
                "this compiled step was lowered for arguments of other types or structure: "
                f"{expected.types} with static {expected.static}; it was called with {given.types} "
                f"and static {given.static}. Call the step itself, or lower it for these."
            ) from None

    def memory_analysis(self) -> Any:
        """XLA's figures for the managed program, without the manager's pool."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        """XLA's estimates of the managed program; loops count once."""
        return self.compiled.cost_analysis()

    def as_text(self) -> str:
        """The scheduled HLO of the managed program."""
        return self.compiled.as_text()
