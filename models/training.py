"""The command line of the workloads: train, plain or managed, and print what came of it.

    python -m models.NAME.train [--budget min] [--steps 300] [--seed 0] [--size full]

The trap: a path is a metric, so reading it waits for the step. That is done only for the lines
that are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jdynoff
from jdynoff.planning.budget import format_bytes
from models.workload import SIZES, State, Workload

_LINES = 20  # of progress, in a run


def endless(workload: Workload, seed: int) -> Iterator[Any]:
    """Batches for training, pass after pass, each in an order of its own."""
    return itertools.chain.from_iterable(
        workload.batches("train", seed + number) for number in itertools.count()
    )


def accuracy(workload: Workload, parameters: Any, split: str = "test") -> float:
    """The share of a split that is answered rightly."""
    score = jax.jit(workload.score)
    sums = [score(parameters, batch) for batch in workload.batches(split, 0)]
    correct, count = (sum(float(one[name]) for one in sums) for name in ("correct", "count"))
    return correct / count


@dataclasses.dataclass(frozen=True)
class Taken:
    """What a path costs on average, for a line of progress."""

    smallest: float
    mean: float
    largest: float

    @classmethod
    def of(cls, paths: list[Any]) -> Taken:
        """Summarises paths by the sum of their entries."""
        sums = [float(np.sum(path)) for path in paths]
        return cls(min(sums), float(np.mean(sums)), max(sums))

    def __str__(self) -> str:
        return f"{self.smallest:.0f} to {self.largest:.0f}, mean {self.mean:.1f}"


def train(
    workload: Workload, run: Callable[..., Any], steps: int, seed: int, console: Console
) -> State:
    """Trains, and prints a line now and then.

    Args:
      workload: what to train.
      run: its step, compiled in one way or another.
      steps: how many to take.
      seed: of the order of the batches.
      console: where to print.

    Returns:
      The state after the last step.
    """
    state = workload.state
    every = max(1, steps // _LINES)
    recent: list[Any] = []
    began = time.perf_counter()
    for number, batch in enumerate(itertools.islice(endless(workload, seed), steps), 1):
        state, metrics = run(state, batch)
        recent.append(metrics)
        if number % every and number != steps:
            continue
        loss = np.mean([float(one["loss"]) for one in recent])
        seconds, began = (time.perf_counter() - began) / len(recent), time.perf_counter()
        console.print(
            f"step {number:4d}  loss {loss:.4f}  {seconds:.2f} s a step  "
            f"path {Taken.of([one['path'] for one in recent])}",
            highlight=False,
        )
        recent = []
    return state


def result_table(workload: Workload, found: float, seconds: float, run: Any) -> Table:
    """What a run came to."""
    table = Table(title=workload.name, title_justify="left", show_header=False)
    table.add_row("accuracy on the test split", f"{found:.4f}")
    table.add_row("most frequent answer", f"{workload.baseline:.4f}")
    table.add_row("training", f"{seconds:.0f} s, compilation included")
    if isinstance(run, jdynoff.Managed):
        table.add_row("moved by the last step", format_bytes(run.stats().bytes_offloaded))
    return table


def main(
    make: Callable[..., Workload],
    description: str | None,
    report: Callable[[Workload, Any, Console], None] | None = None,
    forms: tuple[str, ...] = (),
) -> None:
    """Runs the command line.

    Args:
      make: `(size, seed) -> Workload`; with `form=` where there are `forms`.
      description: of the command.
      report: prints more about trained parameters.
      forms: in which the workload can be had, the default first.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--budget", help='train managed, within this budget ("min", "200MiB")')
    parser.add_argument("--steps", type=int, help="how many; default: what the accuracy takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", choices=SIZES, default="full")
    if forms:
        parser.add_argument("--form", choices=forms, default=forms[0])
    given = parser.parse_args()
    console = Console()
    workload = make(given.size, given.seed, **({"form": given.form} if forms else {}))
    run: Any = jax.jit(workload.step)
    if given.budget is not None:
        run = jdynoff.managed(run, budget=given.budget)
    steps = workload.steps if given.steps is None else given.steps
    began = time.perf_counter()
    state = jax.block_until_ready(train(workload, run, steps, given.seed, console))
    seconds = time.perf_counter() - began
    console.print(result_table(workload, accuracy(workload, state.parameters), seconds, run))
    if report is not None:
        report(workload, state.parameters, console)
