"""Trains the recurrent network on JapaneseVowels, plain or managed.

python -m models.vowels.train [--budget min] [--epochs 40]
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdynoff
from models.vowels import data
from models.vowels.model import Recurrent, initial_parameters, logits, loss
from models.workload import (
    Metrics,
    State,
    Workload,
    chosen_size,
    correct_and_count,
    gradient_step,
)

BATCH = 30
LEARNING_RATE = 1e-2
# Features and series in a batch.
SIZES = {"small": (32, 30), "full": (512, 90)}
_STEPS = 360


def make(size: str = "small", seed: int = 0) -> Workload:
    """The workload; its path is the number of trips.

    Args:
      size: "small" for tests, "full" for measurements.
      seed: of the parameters.

    Raises:
      DataError: the series are not cached and cannot be fetched.
    """
    features, size_of_batch = chosen_size(size, SIZES)
    model = Recurrent(features)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))
    parameters = initial_parameters(model, jax.random.key(seed))
    splits = {"train": data.load("TRAIN"), "test": data.load("TEST")}

    def weighted(parameters: Any, batch: data.Series) -> tuple[jax.Array, Metrics]:
        return loss(model, parameters, *batch), {"path": jnp.max(batch.lengths)}

    def score(parameters: Any, batch: data.Series) -> Metrics:
        scores = logits(model, parameters, batch.values, batch.lengths)
        sums = correct_and_count(scores, batch.speakers, jnp.ones(len(batch.speakers)))
        return {"path": jnp.max(batch.lengths), **sums}

    def batches(split: str, seed: int) -> Iterator[data.Series]:
        series = splits[split]
        order = np.arange(len(series.lengths))
        if split == "train":
            order = np.random.default_rng(seed).permutation(order)
        for chosen in np.split(order, range(size_of_batch, len(order), size_of_batch)):
            yield data.Series(*(part[chosen] for part in series))

    frequent = np.bincount(splits["train"].speakers).argmax()
    return Workload(
        name="vowels",
        step=gradient_step(weighted, optimizer),
        state=State(parameters, optimizer.init(parameters)),
        batches=batches,
        score=score,
        sliceable=True,
        steps=_STEPS,
        baseline=float(np.mean(splits["test"].speakers == frequent)),
    )


def train(
    training: data.Series, *, epochs: int, budget: int | str | None = None, managed: bool = False
) -> tuple[Recurrent, Any, list[float]]:
    """Trains from scratch.

    Args:
      training: the series.
      epochs: passes over them.
      budget: of the managed step.
      managed: whether the step runs under `jdynoff.managed`.

    Returns:
      The model, its parameters, and the loss of every step.
    """
    model = Recurrent()
    parameters = initial_parameters(model, jax.random.key(0))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))

    @jax.jit
    def step(state: Any, *batch: jax.Array) -> Any:
        parameters, moments = state
        value, gradient = jax.value_and_grad(lambda p: loss(model, p, *batch))(parameters)
        updates, moments = optimizer.update(gradient, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), value

    run = jdynoff.managed(step, budget=budget) if managed else step
    state = (parameters, optimizer.init(parameters))
    random = np.random.default_rng(0)
    losses = []
    for _ in range(epochs):
        order = random.permutation(len(training.lengths))
        for chosen in np.split(order, range(BATCH, len(order), BATCH)):
            state, value = run(state, *(part[chosen] for part in training))
            losses.append(value)
    return model, state[0], [float(value) for value in losses]


def accuracy(model: Recurrent, parameters: Any, series: data.Series) -> float:
    """The share of series whose speaker is found."""
    scores = jax.jit(lambda p, *given: logits(model, p, *given))(
        parameters, series.values, series.lengths
    )
    return float(jnp.mean(jnp.argmax(scores, axis=1) == series.speakers))


def main() -> None:
    """Trains and prints the accuracy on series that were not trained on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--budget", help="train managed, within this budget")
    parser.add_argument("--epochs", type=int, default=40)
    given = parser.parse_args()
    model, parameters, losses = train(
        data.load("TRAIN"),
        epochs=given.epochs,
        budget=given.budget,
        managed=given.budget is not None,
    )
    found = accuracy(model, parameters, data.load("TEST"))
    print(f"loss {losses[-1]:.4f}, accuracy on the test series {found:.3f}")


if __name__ == "__main__":
    main()
