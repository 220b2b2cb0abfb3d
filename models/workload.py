"""What a benchmark needs of a workload: a step, a state, and batches that make its path vary.

Every workload has `models.NAME.train.make(size, seed) -> Workload`. The trap: a step is not jitted
here, so that whoever measures it decides how it is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

Metrics = dict[str, jax.Array]
Settings = TypeVar("Settings")

SIZES = ("small", "full")
_WARM_UP = 20  # steps


class State(NamedTuple):
    """What a step carries on."""

    parameters: Any
    moments: Any  # of the optimizer


@dataclasses.dataclass(frozen=True)
class Workload:
    """A network, its training, and its data.

    Attributes:
      name: of the workload, and of its form where it has several.
      step: `(state, batch) -> (state, metrics)`, not jitted. Metrics hold at least "loss",
        float32[], and "path": which branches were taken, or how many trips.
      state: where training begins.
      batches: `(split, seed) -> batches` of one pass, split being "train" or "test". Shapes are
        static, or one of a few.
      score: `(parameters, batch) -> metrics` with the sums "correct" and "count", and "path".
      sliceable: whether the path is decided by the batch alone, so that it is known, and could be
        computed, before the network runs.
      steps: after which the stated accuracy is reached.
      baseline: the accuracy on "test" of always answering what is most frequent in "train".
    """

    name: str
    step: Callable[[State, Any], tuple[State, Metrics]]
    state: State
    batches: Callable[[str, int], Iterator[Any]]
    score: Callable[[Any, Any], Metrics]
    sliceable: bool
    steps: int
    baseline: float


@dataclasses.dataclass(frozen=True)
class Size(Generic[Settings]):
    """A size of a workload.

    Attributes:
      settings: of the network.
      batch: examples in one.
      steps: after which the stated accuracy is reached.
      learning_rate: the highest.
    """

    settings: Settings
    batch: int
    steps: int
    learning_rate: float

    def optimizer(self) -> optax.GradientTransformation:
        """Adam with clipped gradients, a warm-up and a cosine decay to a tenth."""
        schedule = optax.warmup_cosine_decay_schedule(
            0, self.learning_rate, _WARM_UP, self.steps, self.learning_rate / 10
        )
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def workload(
        self,
        parameters: Any,
        loss: Callable[[Any, Any], tuple[jax.Array, Metrics]],
        **attributes: Any,
    ) -> Workload:
        """A workload of this size.

        Args:
          parameters: in the beginning.
          loss: `(parameters, batch) -> (loss, metrics)`.
          **attributes: the others of `Workload`.
        """
        optimizer = self.optimizer()
        return Workload(
            step=gradient_step(loss, optimizer),
            state=State(parameters, optimizer.init(parameters)),
            steps=self.steps,
            **attributes,
        )


def gradient_step(
    loss: Callable[[Any, Any], tuple[jax.Array, Metrics]], optimizer: optax.GradientTransformation
) -> Callable[[State, Any], tuple[State, Metrics]]:
    """Makes the step that follows a gradient.

    Args:
      loss: `(parameters, batch) -> (loss, metrics)`.
      optimizer: what to do with the gradient.

    Returns:
      A step of a `Workload`.
    """

    def step(state: State, batch: Any) -> tuple[State, Metrics]:
        (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(state.parameters, batch)
        updates, moments = optimizer.update(gradient, state.moments, state.parameters)
        parameters = optax.apply_updates(state.parameters, updates)
        return State(parameters, moments), {"loss": value, **metrics}

    return step


def weighted_mean(values: jax.Array, weights: jax.Array) -> jax.Array:
    """The mean over a batch, float32[batch] both, of what is no padding."""
    return jnp.sum(values * weights) / jnp.sum(weights)


def loss_at_all_depths(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean cross entropy of the readings after every depth (deep supervision).

    Where a batch had left, the reading is the last one before, so the depth at which it left counts
    the more the earlier it was.

    Args:
      logits: float32[depths, batch, classes].
      labels: int32[batch].
      weights: float32[batch], 0 for what is padding.
    """
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels[None])
    return weighted_mean(jnp.mean(entropy, axis=0), weights)


def correct_and_count(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> Metrics:
    """Sums of an accuracy.

    Args:
      logits: float32[..., classes].
      labels: int32[...].
      weights: float32[...], 0 for what is padding.

    Returns:
      "correct" and "count", float32[].
    """
    right = jnp.argmax(logits, axis=-1) == labels
    return {"correct": jnp.sum(right * weights), "count": jnp.sum(weights)}


def chosen_size(size: str, sizes: dict[str, Any]) -> Any:
    """The settings of a size.

    Raises:
      ValueError: there is no such size.
    """
    if size not in sizes:
        raise ValueError(f"size is {size!r}; it must be one of {', '.join(map(repr, sizes))}.")
    return sizes[size]
