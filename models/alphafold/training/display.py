"""What a terminal shows of a run: a progress bar with the loss, and one table a validation.

The trap: output that is no terminal gets the last state of the bar only, so `run` also prints a
table for each validation.
"""

from __future__ import annotations

from collections.abc import Mapping

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

from models.alphafold.training.validation import Validation


def progress_bar(console: Console) -> Progress:
    """A bar for `Progress.add_task(..., loss="", rate="")`."""
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


def losses_text(metrics: Mapping[str, float]) -> str:
    """The loss and its most telling parts, for the progress bar."""
    parts = [f"loss {metrics['loss']:.3f}"]
    parts += [
        f"{name} {metrics[name]:.3f}"
        for name in ("fape", "lddt_ca", "distogram")
        if name in metrics
    ]
    return "  ".join(parts)


def validation_table(step: int, validation: Validation, name: str = "validation") -> Table:
    """Scores of every validated chain and their means."""
    table = Table(title=f"{name} after step {step}", title_justify="left")
    table.add_column("chain")
    table.add_column("residues", justify="right")
    for name in validation.scores:
        table.add_column(name, justify="right")
    for prediction in validation.predictions:
        scores = prediction.scores()
        table.add_row(
            prediction.name,
            str(len(prediction.aatype)),
            *(f"{value:.3f}" for value in scores.values()),
        )
    if len(validation.predictions) > 1:
        means = (f"{value:.3f}" for value in validation.scores.values())
        table.add_section()
        table.add_row("mean", "", *means)
    return table
