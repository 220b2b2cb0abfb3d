"""Trains the mixture of experts on the standard library's source text, plain or managed.

python -m models.moe.train [--budget min] [--steps 300] [--seed 0] [--size small]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from models.moe import data
from models.moe.network import Settings, initial_parameters, loss, score
from models.training import main
from models.workload import Size, Workload, chosen_size

SIZES = {
    "small": Size(
        Settings(2, 32, 2, (32, 64, 128), length=48, context=16), 8, steps=200, learning_rate=5e-3
    ),
    "full": Size(
        Settings(3, 128, 4, (128, 256, 256, 512, 512, 1024), length=256, context=64),
        batch=24,
        steps=200,
        learning_rate=2e-3,
    ),
}


def make(size: str = "small", seed: int = 0) -> Workload:
    """The workload.

    Args:
      size: "small" for tests, "full" for measurements.
      seed: of the parameters.
    """
    chosen: Size[Settings] = chosen_size(size, SIZES)
    settings = chosen.settings
    parameters = initial_parameters(settings, jax.random.key(seed))
    return chosen.workload(
        parameters,
        partial(loss, settings),
        name="moe",
        batches=lambda split, seed: data.batches(split, chosen.batch, settings.length, seed),
        score=partial(score, settings),
        sliceable=False,
        baseline=data.baseline(),
    )


def report(workload: Workload, parameters: Any, console: Console) -> None:
    """Prints where each kind of text was sent by the last layer."""
    run = jax.jit(workload.score)
    batches = list(workload.batches("test", 0))
    chosen = np.concatenate([np.asarray(run(parameters, batch)["path"])[-1] for batch in batches])
    kinds = np.concatenate([batch.kinds for batch in batches])
    experts = range(int(chosen.max()) + 1)
    table = Table(title="where the last layer sends test sequences", title_justify="left")
    table.add_column("kind")
    table.add_column("sequences", justify="right")
    for number in experts:
        table.add_column(f"expert {number}", justify="right")
    for kind, name in enumerate(data.KINDS):
        sent = chosen[kinds == kind]
        shares = (f"{np.mean(sent == number):.2f}" if len(sent) else "" for number in experts)
        table.add_row(name, str(len(sent)), *shares)
    console.print(table)


if __name__ == "__main__":
    main(make, __doc__, report)
