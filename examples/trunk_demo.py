"""The demonstration behind `make demo`: the Evoformer trunk on real proteins in 1/8 of the memory.

It compiles the step once as plain JAX, only to ask XLA what that would need, and never runs it;
then it trains the managed step and prints the plan, the falling loss, and what really happened. A
step that took more than its share is a failure. The trap: XLA's figure for the plain step does not
depend on how well its machine code is optimised, so that compile leaves the optimisation out and
takes half the time.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping

import jax
import ml_collections
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

import jdynoff
from examples.protein_sources import Source
from jdynoff.planning.budget import format_bytes
from jdynoff.planning.plan import MemoryUse
from models.alphafold.config import trunk_config
from models.alphafold.data import FeatureConfig, SkipCounter
from models.alphafold.data.loader import ExampleLoader, LoaderConfig
from models.alphafold.training import process_memory
from models.alphafold.trunk import make_trunk_step

#: As a budget: this share of what plain JAX needs.
SHARE_BUDGET = "share"
SHARE = 8
# Only for compiling the plain step, which never runs: leaves buffers as they are.
UNOPTIMISED: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
# Steps between lines where no progress bar can be shown, as in a log file.
_LINE_EVERY = 5
_LOSSES = ("loss", "masked_msa", "distogram")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the demonstration; the defaults end within five minutes on two cores."""

    steps: int = 40
    num_blocks: int = 8
    num_extra_blocks: int = 1
    num_residues: int = 64
    num_msa: int = 32
    num_extra_msa: int = 64
    msa_channel: int = 64
    pair_channel: int = 32
    extra_msa_channel: int = 32

    def config(self) -> ml_collections.ConfigDict:
        """The configuration of the trunk and of its training."""
        sizes = dataclasses.asdict(self)
        del sizes["steps"]
        config = trunk_config(**sizes)
        config.train.update({"learning_rate": 2e-3, "warmup_steps": 5})
        return config


class ShareExceededError(Exception):
    """The managed step took more than its share of what plain JAX needs."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the demonstration measured.

    Attributes:
        plain_bytes: what plain JAX needs for the step, by XLA's figures.
        budget_bytes: what the managed step was allowed; None for the least possible.
        device_peak_bytes: what the managed step was planned to need, the manager's pool included.
        real_peak_bytes: what the program that ran needs by XLA's figures, and the most that the
            manager's pool held.
        resident_bytes: what the process occupied before the first step: libraries, compiler.
        process_peak_bytes: the most that it occupied while it trained.
        losses: of every step, by name.
        bytes_moved: out of XLA and back, all steps together.
        stall_seconds: all steps together.
        seconds: of the training steps together.
    """

    plain_bytes: int
    budget_bytes: int | None
    device_peak_bytes: int
    real_peak_bytes: int
    resident_bytes: int
    process_peak_bytes: int
    losses: Mapping[str, list[float]]
    bytes_moved: int
    stall_seconds: float
    seconds: float

    @property
    def share_bytes(self) -> int:
        """What the managed step may take."""
        return self.plain_bytes // SHARE

    def check_share(self) -> None:
        """Holds the run against its promise.

        Raises:
            ShareExceededError: the step took more than `share_bytes`.
        """
        for name, peak in (("planned", self.device_peak_bytes), ("real", self.real_peak_bytes)):
            if peak > self.share_bytes:
                raise ShareExceededError(
                    f"the {name} device peak of the step is {in_bytes(peak)}, more than 1/{SHARE} "
                    f"of plain JAX's {in_bytes(self.plain_bytes)}, which is "
                    f"{in_bytes(self.share_bytes)}."
                )


def run(
    source: Source,
    *,
    sizes: Sizes,
    budget: int | str,
    seed: int,
    console: Console,
    compiler_options: Mapping[str, bool | int | str] | None = None,
) -> Outcome:
    """Train the trunk within a budget and print what happens.

    Args:
        source: the proteins.
        sizes: of the network, the crops and the run.
        budget: as in `jdynoff.managed`; "share" for 1/8 of what plain JAX needs, in bytes.
        seed: of parameters, dropout and data.
        console: where to print.
        compiler_options: of XLA for the step; None for the usual ones.

    Returns:
        The figures that were printed.

    Raises:
        BudgetError: the step does not fit the budget.
        ShareExceededError: the budget was the share, and the step took more.
    """
    config = sizes.config()
    train_step, init, spec = make_trunk_step(config)
    options = None if compiler_options is None else dict(compiler_options)
    jitted = jax.jit(train_step, donate_argnums=0, compiler_options=options)
    console.print(f"Training on [bold]{source.description}[/]: crops of {sizes.num_residues}.")

    state = init(jax.random.key(seed))
    with console.status("asking XLA what plain JAX needs (compiled, never run)"):
        plain_bytes = plain_need(jitted, state, spec)
    console.print(f"Plain JAX needs [bold]{in_bytes(plain_bytes)}[/] for one step.")

    is_share = budget == SHARE_BUDGET
    if is_share:
        budget = plain_bytes // SHARE
        console.print(f"The budget is 1/{SHARE} of that: [bold]{in_bytes(budget)}[/].")
    step = jdynoff.managed(jitted, budget=budget)
    with console.status("planning and compiling the managed step"):
        plan = step.plan(state, spec)
    console.print(plan)

    losses: dict[str, list[float]] = {name: [] for name in _LOSSES}
    moved, stalled, seconds, pool_peak = 0, 0.0, 0.0, 0
    batches = _batches(source, config, spec, seed)
    resident = process_memory.release_unused()
    process_memory.reset_peak()
    with _progress(console) as progress:
        task = progress.add_task("training", total=sizes.steps, loss="", rate="")
        for batch in batches:
            started = time.perf_counter()
            state, metrics = step(state, batch)
            stats = step.stats()
            seconds += time.perf_counter() - started
            for name in _LOSSES:
                losses[name].append(float(metrics[name]))
            moved += stats.bytes_offloaded + stats.bytes_reloaded
            stalled += stats.stall_seconds
            pool_peak = max(pool_peak, stats.pool_peak_bytes)
            done = len(losses["loss"])
            progress.update(
                task,
                advance=1,
                loss=f"loss {losses['loss'][-1]:.3f}",
                rate=f"{done / seconds:.2f} steps/s",
            )
            if not console.is_terminal and done % _LINE_EVERY == 0:
                console.print(f"step {done}: loss {losses['loss'][-1]:.3f}")
            if done == sizes.steps:
                break
    process_peak = process_memory.peak_bytes()
    ran = MemoryUse.of(step.lower(state, spec).compile().memory_analysis())
    outcome = Outcome(
        plain_bytes=plain_bytes,
        budget_bytes=plan.budget_bytes,
        device_peak_bytes=plan.device_peak_bytes,
        real_peak_bytes=ran.total_bytes + pool_peak,
        resident_bytes=resident,
        process_peak_bytes=process_peak,
        losses=losses,
        bytes_moved=moved,
        stall_seconds=stalled,
        seconds=seconds,
    )
    _print_losses(outcome, console)
    _print_figures(outcome, console)
    if is_share:
        outcome.check_share()
    return outcome


def plain_need(jitted: object, *specs: object) -> int:
    """Bytes that the step occupies at its peak as plain JAX, from XLA; nothing is run.

    Args:
        jitted: made by `jax.jit`.
        *specs: its arguments, as trees of arrays or `jax.ShapeDtypeStruct`s.
    """
    compiled = jitted.lower(*specs).compile(compiler_options=UNOPTIMISED)  # type: ignore[attr-defined]
    return MemoryUse.of(compiled.memory_analysis()).total_bytes


def in_bytes(size: int) -> str:
    """A number of bytes, exactly and for people."""
    return f"{size:,} bytes ({format_bytes(size)})"


def _batches(
    source: Source,
    config: ml_collections.ConfigDict,
    spec: Mapping[str, jax.ShapeDtypeStruct],
    seed: int,
) -> Iterator[dict[str, np.ndarray]]:
    features = FeatureConfig.from_config(config)
    counter = SkipCounter(policy="skip")
    loader = ExampleLoader(source.dataset, features, LoaderConfig(seed=seed), counter=counter)
    try:
        for example in loader:
            yield {name: example.features[name] for name in spec}
    finally:
        loader.close()


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("[bold]{task.fields[loss]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
    )


def ends(values: list[float]) -> tuple[float, float]:
    """Mean of the first and of the last fifth of a curve, at least one value each."""
    window = max(1, len(values) // 5)
    return statistics.fmean(values[:window]), statistics.fmean(values[-window:])


_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Draw a curve in one line of text."""
    chunks = np.array_split(np.asarray(values), min(width, len(values)))
    means = np.array([chunk.mean() for chunk in chunks])
    spread = np.ptp(means)
    levels = (means - means.min()) / spread if spread > 0 else np.zeros_like(means)
    return "".join(_BARS[round(level * (len(_BARS) - 1))] for level in levels)


def _print_losses(outcome: Outcome, console: Console) -> None:
    table = Table(title="Losses", title_justify="left")
    for column in ("", "first steps", "last steps", "curve"):
        table.add_column(column, justify="left" if column in ("", "curve") else "right")
    for name, values in outcome.losses.items():
        first, last = ends(values)
        table.add_row(name, f"{first:.3f}", f"{last:.3f}", sparkline(values))
    console.print(table)


def _print_figures(outcome: Outcome, console: Console) -> None:
    steps = len(outcome.losses["loss"])
    plain, allowed = outcome.plain_bytes, outcome.budget_bytes
    budget = "the least possible" if allowed is None else in_bytes(allowed)
    table = Table(title="What it took", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    for row in (
        ("plain JAX", in_bytes(plain), "XLA's figure for the same step"),
        ("budget", budget, "" if allowed is None else f"1/{plain / allowed:.1f} of plain JAX"),
        (
            "device peak, planned",
            in_bytes(outcome.device_peak_bytes),
            f"1/{plain / outcome.device_peak_bytes:.1f} of plain JAX",
        ),
        (
            "device peak, real",
            in_bytes(outcome.real_peak_bytes),
            f"1/{plain / outcome.real_peak_bytes:.1f} of plain JAX: XLA's figure for the program "
            "that ran, and the most that the manager's pool held",
        ),
        (
            "process peak",
            format_bytes(outcome.process_peak_bytes),
            f"{format_bytes(outcome.process_peak_bytes - outcome.resident_bytes)} more than before "
            "the first step, data and the parsed proteins included",
        ),
        ("bytes moved", format_bytes(outcome.bytes_moved), f"in {steps} steps, out and back"),
        (
            "stall time",
            f"{outcome.stall_seconds:.1f} s",
            f"of {outcome.seconds:.1f} s: operations that waited for the disk; others may have run",
        ),
        ("speed", f"{steps / outcome.seconds:.2f} steps/s", ""),
    ):
        table.add_row(*row)
    console.print(table)
