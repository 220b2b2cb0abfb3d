"""Trains a Tree-LSTM on the syntax trees of the standard library, plain or managed.

python -m models.trees.train [--budget min] [--steps 300] [--seed 0] [--size small] [--form while]
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import optax

from models.training import main
from models.trees import data
from models.trees.network import FORMS, TreeLstm, initial_parameters, loss, score
from models.workload import State, Workload, chosen_size, gradient_step


@dataclasses.dataclass(frozen=True)
class Size:
    """A size of the workload."""

    shape: data.Shape
    features: int
    steps: int
    learning_rate: float


SIZES = {
    "small": Size(
        data.Shape(files=24, nodes=64, trees=16, width=32, buckets=(20, 40)),
        features=16,
        steps=200,
        learning_rate=1e-2,
    ),
    "full": Size(
        data.Shape(files=None, nodes=256, trees=128, width=256, buckets=(32, 120)),
        features=128,
        steps=160,
        learning_rate=3e-3,
    ),
}


def make(size: str = "small", seed: int = 0, form: str = "scan") -> Workload:
    """The workload.

    Args:
      size: "small" for tests, "full" for measurements.
      seed: of the parameters.
      form: "scan" over the rows of a bucket with a branch in it, or "while" there are rows.
    """
    chosen: Size = chosen_size(size, SIZES)
    model = TreeLstm(chosen.features)
    schedule = optax.cosine_decay_schedule(chosen.learning_rate, chosen.steps, alpha=0.05)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    parameters = initial_parameters(model, jax.random.key(seed))
    return Workload(
        name=f"trees-{form}",
        step=gradient_step(partial(loss, model, form), optimizer),
        state=State(parameters, optimizer.init(parameters)),
        batches=lambda split, seed: data.batches(split, chosen.shape, seed),
        score=partial(score, model, form),
        sliceable=True,
        steps=chosen.steps,
        baseline=data.baseline(chosen.shape),
    )


if __name__ == "__main__":
    main(make, __doc__, forms=FORMS)
