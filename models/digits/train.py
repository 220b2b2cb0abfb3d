"""Trains the network of data-dependent depth on handwritten digits, plain or managed.

python -m models.digits.train [--budget min] [--steps 400] [--seed 0] [--size small] [--form noisy]
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from models.digits import data
from models.digits.network import Network, Settings, initial_parameters, loss, score
from models.training import main
from models.workload import Size, Workload, chosen_size

SIZES = {
    "small": Size(
        Settings(4, 16, (16, 64), sure=0.7, nearly_sure=0.5),
        batch=48,
        steps=200,
        learning_rate=1e-2,
    ),
    "full": Size(Settings(8, 64, (64, 256)), batch=120, steps=160, learning_rate=2e-3),
}
# With noise there is more to do, and never as much certainty.
NOISY_SIZES = {
    "small": Size(
        Settings(6, 16, (16, 64), sure=0.6, nearly_sure=0.4),
        batch=48,
        steps=200,
        learning_rate=1e-2,
    ),
    "full": Size(
        Settings(16, 32, (32, 128), sure=0.8, nearly_sure=0.65),
        batch=120,
        steps=300,
        learning_rate=4e-3,
    ),
}


def make(size: str = "small", seed: int = 0, form: str = "sorted") -> Workload:
    """The workload.

    Args:
      size: "small" for tests, "full" for measurements.
      seed: of the parameters.
      form: "sorted" for batches of easy or hard digits; "noisy" for a network of twice as many
        blocks, and batches that differ in how much noise was added to them.

    Raises:
      ValueError: there is no such size or form.
    """
    if form not in data.FORMS:
        raise ValueError(f"form is {form!r}; it must be one of {', '.join(map(repr, data.FORMS))}.")
    chosen: Size[Settings] = chosen_size(size, NOISY_SIZES if form == "noisy" else SIZES)
    network = Network(chosen.settings)
    parameters = initial_parameters(network, jax.random.key(seed))
    return chosen.workload(
        parameters,
        partial(loss, network),
        name="digits" if form == "sorted" else "noisy digits",
        batches=lambda split, seed: data.batches(split, chosen.batch, seed, form),
        score=partial(score, network),
        sliceable=False,
        baseline=data.baseline(),
    )


def report(workload: Workload, parameters: Any, console: Console) -> None:
    """Prints what the blocks did for each test batch, from easy to hard."""
    table = Table(title="test batches, from easy to hard", title_justify="left")
    for column in ("blocks run", "wide", "accuracy"):
        table.add_column(column, justify="right")
    run = jax.jit(workload.score)
    for batch in workload.batches("test", 0):
        metrics = run(parameters, batch)
        path = metrics["path"]
        accuracy = metrics["correct"] / metrics["count"]
        table.add_row(f"{(path > 0).sum()}", f"{(path == 2).sum()}", f"{accuracy:.3f}")
    console.print(table)


if __name__ == "__main__":
    main(make, __doc__, report, forms=data.FORMS)
