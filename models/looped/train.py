"""Trains the language model of varying depth on the standard library's source text.

python -m models.looped.train [--budget min] [--steps 200] [--seed 0] [--size small]
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import optax
from rich.console import Console

from models.looped import data
from models.looped.network import Network, Settings, initial_parameters, loss, score
from models.moe.data import baseline
from models.training import main
from models.workload import State, Workload, chosen_size, gradient_step


@dataclasses.dataclass(frozen=True)
class Size:
    """A size of the workload."""

    settings: Settings
    batch: int
    mean_depth: float
    steps: int
    learning_rate: float


SIZES = {
    "small": Size(Settings(32, 2, 48, most=8), 8, 3.0, steps=200, learning_rate=5e-3),
    "full": Size(Settings(256, 4, 128, most=24), 8, 6.0, steps=200, learning_rate=1e-3),
}
_WARM_UP = 20  # steps


def make(size: str = "small", seed: int = 0) -> Workload:
    """The workload.

    Args:
      size: "small" for tests, "full" for measurements.
      seed: of the parameters.
    """
    chosen: Size = chosen_size(size, SIZES)
    settings = chosen.settings
    network = Network(settings)
    schedule = optax.warmup_cosine_decay_schedule(
        0, chosen.learning_rate, _WARM_UP, chosen.steps, chosen.learning_rate / 10
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    parameters = initial_parameters(network, jax.random.key(seed))
    return Workload(
        name="looped",
        step=gradient_step(partial(loss, network), optimizer),
        state=State(parameters, optimizer.init(parameters)),
        batches=lambda split, seed: data.batches(
            split, chosen.batch, settings.length, chosen.mean_depth, settings.most, seed
        ),
        score=partial(score, network),
        sliceable=True,
        steps=chosen.steps,
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
