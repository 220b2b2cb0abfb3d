"""A budget sweep: what a step needs, moves and takes under smaller and smaller budgets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jdynoff.errors import BudgetError
from jdynoff.planning.plan import Plan

SHARES = (1.0, 0.75, 0.5, 0.35, 0.25, 0.15, 0.1)
"""Of plain JAX's peak, where no budgets are named."""


@dataclasses.dataclass(frozen=True)
class SweepRow:
    """One budget.

    Attributes:
      budget_bytes: the budget.
      plan: what the step does within it; None if it cannot.
    """

    budget_bytes: int
    plan: Plan | None


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Plans of one step for several budgets, largest first.

    Attributes:
      plain_peak_bytes: what plain JAX needs, XLA's figure.
      min_feasible_bytes: the smallest budget with which the step can run.
      rows: one for each budget.
    """

    plain_peak_bytes: int
    min_feasible_bytes: int
    rows: tuple[SweepRow, ...]

    def plot(self, path: str | Path) -> Path:
        """Draws peak and predicted time against the budget into a file.

        Raises:
          ConfigurationError: if matplotlib is not installed.
        """
        from jdynoff.report.figures import sweep_figure

        return sweep_figure(self, path)

    def __rich__(self) -> Any:
        from jdynoff.report.tables import sweep_table

        return sweep_table(self)

    def __str__(self) -> str:
        from jdynoff.report.tables import as_text

        return as_text(self.__rich__())


def sweep(
    plan_within: Callable[[int], Plan], plain_peak_bytes: int, budgets: Sequence[int] | None
) -> Sweep:
    """Plans a step for several budgets.

    Args:
      plan_within: plans it for one budget; raises `BudgetError` where it does not fit.
      plain_peak_bytes: what plain JAX needs.
      budgets: in bytes; `SHARES` of plain JAX's peak if None.
    """
    if budgets is None:
        budgets = [int(share * plain_peak_bytes) for share in SHARES]
    rows: list[SweepRow] = []
    least: int | None = None
    for budget in sorted(budgets, reverse=True):
        try:
            plan = plan_within(budget)
            least = plan.min_feasible_bytes
        except BudgetError as error:
            plan = None
            least = error.min_feasible_bytes
        rows.append(SweepRow(budget, plan))
    return Sweep(plain_peak_bytes, least or plain_peak_bytes, tuple(rows))
