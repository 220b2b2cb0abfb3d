"""Trains the language model of varying depth on the standard library's source text.

python -m models.looped.train [--budget min] [--steps 200] [--seed 0] [--size small]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from rich.console import Console

from models.looped import data
from models.looped.network import Network, Settings, initial_parameters, loss, score
from models.moe.data import baseline
from models.training import main
from models.workload import Size, Workload, chosen_size

SIZES = {
    "small": Size(Settings(32, 2, 48, most=8, mean=3.0), 8, steps=200, learning_rate=5e-3),
    "full": Size(Settings(256, 4, 128, most=24, mean=6.0), 8, steps=200, learning_rate=1e-3),
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
        name="looped",
        batches=lambda split, seed: data.batches(
            split, chosen.batch, settings.length, settings.mean, settings.most, seed
        ),
        score=partial(score, network),
        sliceable=True,
        baseline=baseline(),
    )


def report(workload: Workload, parameters: Any, console: Console) -> None:
    """Prints how much of the test text is right at several depths."""
    run = jax.jit(workload.score)
    batches = list(workload.batches("test", 0))
    for depth in (1, 2, 4, 8):
        found = [
            run(parameters, batch._replace(depth=batch.depth * 0 + depth)) for batch in batches
        ]
        right = sum(float(metrics["correct"]) for metrics in found)
        count = sum(float(metrics["count"]) for metrics in found)
        console.print(f"depth {depth}: {right / count:.3f} of the characters")


if __name__ == "__main__":
    main(make, __doc__, report)
