"""What every benchmark shares: claims with their bounds, interleaved timing, a table, JSON.

Absolute times on a shared machine mean nothing. Everything timed here is a ratio between programs
that ran in turn, A B A B, in one process, and the median is quoted with its spread.
"""

from __future__ import annotations

import argparse
import atexit
import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from jdynoff.planning.machine import FILE_VARIABLE
from jdynoff.runtime.measure import measure_and_keep

_MEASURED_BYTES = 256 << 20  # on the disk


@dataclasses.dataclass(frozen=True)
class Claim:
    """One measured figure and the bound that it must keep.

    Attributes:
        name: What was measured.
        plain: The figure of plain JAX, in words; "" where there is none.
        measured: The figure; None where it could not be measured, for the reason in `note`.
        unit: Of `measured` and `bound`.
        bound: What must be reached; None for a figure that is only shown.
        at_least: Whether `bound` is a lower one.
        note: How it was measured, with the spread of a time.
        series: What it is compared with, itself included, by name: for a figure.
    """

    name: str
    plain: str
    measured: float | None
    unit: str
    bound: float | None
    at_least: bool = False
    note: str = ""
    series: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the bound is kept; what was not measured breaks none."""
        if self.bound is None or self.measured is None:
            return True
        return self.measured >= self.bound if self.at_least else self.measured <= self.bound


def skipped(name: str, reason: str) -> Claim:
    """The row of a benchmark that cannot run here."""
    return Claim(name, "", None, "", None, note=reason)


def measure_rates() -> None:
    """Measures this machine, so that predictions here and in children do not go by assumed rates.

    Whoever has chosen a file of rates is asked for none; the user's own file is left alone.
    """
    if os.environ.get(FILE_VARIABLE):
        return
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ[FILE_VARIABLE] = str(pathlib.Path(directory) / "machine.json")
    machine = measure_and_keep(_MEASURED_BYTES)
    Console(width=120).print(
        f"rates: {machine.flops_per_second / 1e9:.0f} GFLOP/s, "
        f"memory {machine.memory_bytes_per_second / 1e9:.1f} GB/s, "
        f"new memory {machine.fresh_bytes_per_second / 1e9:.1f}, "
        f"pool {machine.copy_bytes_per_second / 1e9:.1f}, "
        f"disk {machine.out_bytes_per_second / 1e9:.1f} out and "
        f"{machine.back_bytes_per_second / 1e9:.1f} back"
    )


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one program over all rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The figure to quote."""
        return statistics.median(self.seconds)

    def ratio(self, other: Timing) -> tuple[float, float, float]:
        """Median, smallest and largest ratio to another program, round by round."""
        ratios = [a / b for a, b in zip(self.seconds, other.seconds, strict=True)]
        return statistics.median(ratios), min(ratios), max(ratios)


def interleave(programs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Runs the programs in turn, after one round that does not count.

    Args:
        programs: Name to a function that runs one step and returns its arrays.
        rounds: How many rounds count.

    Returns:
        Name to timing.
    """
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program())
            if number:
                seconds[name].append(time.perf_counter() - started)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def parse(
    description: str | None,
    argv: Sequence[str] | None,
    *,
    target: bool = False,
    budget: str | None = None,
) -> argparse.Namespace:
    """Reads the options that every benchmark has.

    Args:
        description: For `--help`.
        argv: The arguments; None for the process's.
        target: Whether there is `--target`, to compile for a GPU that is not there.
        budget: The default of `--budget`; None if there is no such option.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if target:
        parser.add_argument("--target", help="compile for this described GPU instead")
    if budget is not None:
        parser.add_argument("--budget", default=budget, help="of the managed step")
    parser.add_argument("--quick", action="store_true", help="fewer rounds and smaller sizes")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    return parser.parse_args(argv)


def report(title: str, claims: Sequence[Claim], file: pathlib.Path | None) -> int:
    """Prints the claims and writes them.

    Returns:
        The exit status: 1 if a bound is not kept.
    """
    show(title, claims)
    return conclude(title, claims, file)


def show(title: str, claims: Sequence[Claim]) -> None:
    """Prints claims as a table."""
    console = Console(width=150)
    table = Table(title=title, title_justify="left")
    for column, justify in (
        ("", "left"),
        ("plain JAX", "right"),
        ("measured", "right"),
        ("must reach", "right"),
        ("", "center"),
        ("how", "left"),
    ):
        table.add_column(column, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for claim in claims:
        sign = ">=" if claim.at_least else "<="
        bound = "" if claim.bound is None else f"{sign} {claim.bound:g} {claim.unit}"
        verdict = "" if claim.bound is None else ("yes" if claim.holds else "NO")
        measured = "skipped"
        if claim.measured is not None:
            measured = f"{claim.measured:.4g} {claim.unit}"
        table.add_row(claim.name, claim.plain, measured, bound, verdict, claim.note)
    console.print(table)


def conclude(title: str, claims: Sequence[Claim], file: pathlib.Path | None) -> int:
    """Writes claims that were shown.

    Returns:
        The exit status: 1 if a bound is not kept.
    """
    if file is not None:
        content = {
            "title": title,
            "jax": jax.__version__,
            "claims": [{**dataclasses.asdict(claim), "holds": claim.holds} for claim in claims],
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=1))
    return 0 if all(claim.holds for claim in claims) else 1


def megabytes(size: int | float) -> float:
    """Bytes as MB (10**6)."""
    return size / 1e6
