"""Trains the network that looks at noisy digits until they have settled, plain or managed.

python -m models.frames.train [--budget min] [--steps 300] [--seed 0] [--size small]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from models.digits.data import baseline
from models.frames import data
from models.frames.network import Network, Settings, initial_parameters, loss, score
from models.training import main
from models.workload import Size, Workload, chosen_size

SIZES = {
    "small": Size(Settings(32, 2, most=8), batch=48, steps=200, learning_rate=4e-3),
    "full": Size(Settings(256, 4, most=24), batch=64, steps=300, learning_rate=2e-3),
}


def make(size: str = "small", seed: int = 0) -> Workload:
    """The workload.

    Args:
      size: "small" for tests, "full" for measurements.
      seed: of the parameters.
    """
    chosen: Size[Settings] = chosen_size(size, SIZES)
    settings = chosen.settings
    network = Network(settings)
    parameters = initial_parameters(network, jax.random.key(seed))
    return chosen.workload(
        parameters,
        partial(loss, network),
        name="frames",
        batches=lambda split, seed: data.batches(split, chosen.batch, settings.most, seed),
        score=partial(score, network),
        sliceable=False,
        baseline=baseline(),
    )


def report(workload: Workload, parameters: Any, console: Console) -> None:
    """Prints how many frames each test batch took, from clear to noisy."""
    table = Table(title="test batches, from clear to noisy", title_justify="left")
    for column in ("frames looked at", "accuracy"):
        table.add_column(column, justify="right")
    run = jax.jit(workload.score)
    for batch in workload.batches("test", 0):
        metrics = run(parameters, batch)
        accuracy = metrics["correct"] / metrics["count"]
        table.add_row(f"{metrics['path'].sum()}", f"{accuracy:.3f}")
    console.print(table)


if __name__ == "__main__":
    main(make, __doc__, report)
