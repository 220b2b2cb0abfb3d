"""Pictures: memory over the program, and a budget sweep. They take matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jdynoff.errors import ConfigurationError
from jdynoff.planning.budget import format_bytes

if TYPE_CHECKING:
    from jdynoff.planning.plan import Plan
    from jdynoff.sweep import Sweep

_MEBIBYTE = 2**20
_LABELLED = 5


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigurationError(
            "a picture takes matplotlib, which is not installed: pip install matplotlib"
        ) from error
    return pyplot


def memory_figure(plan: Plan, path: str | Path) -> Path:
    """Draws the simulated memory of a step over its program, plain and planned.

    Args:
      plan: of the step.
      path: the file to write; its ending chooses the format (.png, .svg, .pdf).

    Raises:
      ConfigurationError: if matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(10, 5), layout="constrained")
    for profile, label, colour in (
        (plan.plain_profile, "plain JAX", "0.6"),
        (plan.profile, "planned", "C0"),
    ):
        share = [100 * position for position, _ in profile.points]
        size = [nbytes / _MEBIBYTE for _, nbytes in profile.points]
        axes.fill_between(share, size, step="post", alpha=0.3, color=colour, label=label)
        axes.step(share, size, where="post", color=colour, linewidth=1)
    if plan.budget_bytes is not None:
        fixed = plan.memory.total_bytes - plan.memory.temporary_bytes + plan.pool_bytes
        left = (plan.budget_bytes - fixed) / _MEBIBYTE
        axes.axhline(left, color="C3", linestyle="--", label="budget less arguments and pool")
    lines = [
        f"{format_bytes(tensor.nbytes)}  {tensor.dtype}[{','.join(map(str, tensor.shape))}]  "
        f"{Path(tensor.source).name}"
        for tensor in plan.largest[:_LABELLED]
    ]
    if lines:
        axes.text(
            0.01,
            0.98,
            "largest at plain JAX's peak:\n" + "\n".join(lines),
            transform=axes.transAxes,
            va="top",
            fontsize=8,
            family="monospace",
        )
    axes.set_xlabel("the step, in program order (%)")
    axes.set_ylabel("temporaries, simulated (MiB)")
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    return _save(figure, path)


def sweep_figure(sweep: Sweep, path: str | Path) -> Path:
    """Draws peak and predicted time of a step against its budget.

    Args:
      sweep: of the step.
      path: the file to write; its ending chooses the format.

    Raises:
      ConfigurationError: if matplotlib is not installed.
    """
    pyplot = _pyplot()
    figure, (peaks, times) = pyplot.subplots(
        2, 1, sharex=True, figsize=(8, 7), layout="constrained"
    )
    plans = [row.plan for row in sweep.rows if row.plan is not None]
    budgets = [(plan.budget_bytes or 0) / _MEBIBYTE for plan in plans]
    peaks.plot(budgets, [plan.device_peak_bytes / _MEBIBYTE for plan in plans], "o-")
    peaks.plot(budgets, budgets, "--", color="0.6", label="the budget")
    peaks.axvline(
        sweep.min_feasible_bytes / _MEBIBYTE, color="C3", linestyle=":", label="the least possible"
    )
    peaks.set_ylabel("device peak (MiB)")
    peaks.legend()
    times.plot(budgets, [plan.forecast.step_seconds for plan in plans], "o-", label="planned")
    if plans:
        times.axhline(
            plans[0].forecast.plain_seconds, color="0.6", linestyle="--", label="plain JAX"
        )
        times.axhline(
            plans[0].forecast.recompute_seconds, color="C1", linestyle="--", label="all recomputed"
        )
    times.set_ylabel("predicted step (s)")
    times.set_xlabel("budget (MiB)")
    times.set_ylim(bottom=0)
    times.legend()
    return _save(figure, path)


def _save(figure: Any, path: str | Path) -> Path:
    written = Path(path)
    figure.savefig(written, dpi=120)
    _pyplot().close(figure)
    return written
