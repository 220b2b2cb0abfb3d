"""Tables for people: the plan of a step."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from jdynoff.planning.budget import format_bytes

if TYPE_CHECKING:
    from jdynoff.planning.plan import Plan
    from jdynoff.sweep import Sweep

_MOST_ROWS = 12


def plan_table(plan: Plan) -> Group:
    """The totals of a plan and its largest sites."""
    totals = Table(show_header=False, box=None, pad_edge=False)
    totals.add_column(justify="left")
    totals.add_column(justify="right")
    totals.add_column(justify="left")
    budget = "the least possible" if plan.budget_bytes is None else format_bytes(plan.budget_bytes)
    rows = [
        ("budget", budget, ""),
        (
            "device peak",
            format_bytes(plan.device_peak_bytes),
            f"XLA {format_bytes(plan.memory.total_bytes)} + pool {format_bytes(plan.pool_bytes)}",
        ),
        (
            "plain JAX",
            format_bytes(plan.plain_peak_bytes),
            "simulated" if plan.plain_is_simulated else "XLA's figure",
        ),
        ("smallest budget", format_bytes(plan.min_feasible_bytes), ""),
        (
            "moved per step",
            format_bytes(plan.traffic_bytes),
            f"{format_bytes(plan.offloaded_bytes)} out, {format_bytes(plan.reloaded_bytes)} back",
        ),
        ("written to disk", format_bytes(plan.disk_written_bytes), "at most, per step"),
        *_forecast_rows(plan),
    ]
    for row in rows:
        totals.add_row(*row)
    parts: list[Any] = [totals]
    if plan.note:
        parts.append(Text(plan.note))
    parts.extend(Text(f"warning: {warning}", style="yellow") for warning in plan.warnings)
    if plan.sites:
        parts.append(_sites_table(plan))
    if plan.blocks:
        parts.append(_blocks_table(plan))
    return Group(*parts)


def sweep_table(sweep: Sweep) -> Table:
    """One row for each budget."""
    table = Table(
        title=f"plain JAX needs {format_bytes(sweep.plain_peak_bytes)}, "
        f"the least is {format_bytes(sweep.min_feasible_bytes)}",
        title_justify="left",
    )
    for name in ("budget", "of plain", "device peak", "moved", "computed again", "predicted step"):
        table.add_column(name, justify="right")
    for row in sweep.rows:
        share = f"{100 * row.budget_bytes / sweep.plain_peak_bytes:.0f}%"
        if row.plan is None:
            table.add_row(format_bytes(row.budget_bytes), share, "does not fit", "", "", "")
            continue
        forecast = row.plan.forecast
        table.add_row(
            format_bytes(row.budget_bytes),
            share,
            format_bytes(row.plan.device_peak_bytes),
            format_bytes(row.plan.traffic_bytes),
            f"{100 * forecast.extra_flops / max(forecast.flops, 1.0):.1f}%",
            f"{forecast.step_seconds / max(forecast.plain_seconds, 1e-12):.2f}x plain",
        )
    return table


def _forecast_rows(plan: Plan) -> list[tuple[str, str, str]]:
    forecast = plan.forecast
    plain, full = forecast.plain_seconds, forecast.recompute_seconds
    again = 100 * forecast.extra_flops / max(forecast.flops, 1.0)
    stall = f", {_seconds(forecast.stall_seconds)} of it waiting" if forecast.stall_seconds else ""
    return [
        (
            "predicted step",
            _seconds(forecast.step_seconds),
            f"plain {_seconds(plain)}, all computed again {_seconds(full)}{stall}",
        ),
        ("computed again", f"{again:.1f}%", "of the step's FLOPs"),
        ("rates", forecast.origin, forecast.machine),
    ]


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _sites_table(plan: Plan) -> Table:
    table = Table(title="residuals, largest first", title_justify="left")
    for name, justify in (
        ("source", "left"),
        ("array", "left"),
        ("entries", "right"),
        ("bytes", "right"),
        ("action", "left"),
        ("tier", "left"),
        ("why", "left"),
    ):
        table.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for site in plan.sites[:_MOST_ROWS]:
        table.add_row(
            _short(site.source),
            f"{site.dtype}[{','.join(map(str, site.shape))}]",
            str(site.entries),
            format_bytes(site.bytes),
            site.action,
            site.tier,
            site.reason,
        )
    if len(plan.sites) > _MOST_ROWS:
        rest = plan.sites[_MOST_ROWS:]
        table.add_row(
            f"{len(rest)} more", "", "", format_bytes(sum(site.bytes for site in rest)), "", "", ""
        )
    return table


def _blocks_table(plan: Plan) -> Table:
    programs = f"; {plan.variants} programs, chosen by path" if plan.variants > 1 else ""
    table = Table(title=f"blocks that depend on data{programs}", title_justify="left")
    for name in ("block", "known beforehand"):
        table.add_column(name, overflow="fold")
    table.add_column("most runs", justify="right")
    for block in plan.blocks[:_MOST_ROWS]:
        cost = f", {100 * block.cost:.2g}% of the step" if block.known == "sliced" else ""
        most = "no bound" if block.most is None else str(block.most)
        table.add_row(block.name, block.known + cost, most)
    if len(plan.blocks) > _MOST_ROWS:
        table.add_row(f"{len(plan.blocks) - _MOST_ROWS} more", "", "")
    return table


def _short(source: str) -> str:
    """`file:line` with the path relative to the working directory where that is shorter."""
    path, _, line = source.rpartition(":")
    if not path:
        return source
    relative = os.path.relpath(path)
    return f"{min(relative, path, key=len)}:{line}"


def as_text(renderable: Any, width: int = 120) -> str:
    """What `print` shows for a rich renderable."""
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get().rstrip()
