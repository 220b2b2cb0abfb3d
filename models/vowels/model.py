"""A gated recurrent unit that reads each series to its end, with `jdynoff.while_loop`.

A batch takes as many trips as its longest series has values, whatever the arrays are padded to.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import jdynoff
from models.vowels.data import COEFFICIENTS, SPEAKERS


class Recurrent(nn.Module):
    """One gated recurrent unit and a linear readout of its last state."""

    features: int = 32

    def setup(self) -> None:
        """Makes the two layers."""
        self.cell = nn.GRUCell(self.features)
        self.readout = nn.Dense(SPEAKERS)

    def step(self, state: jax.Array, value: jax.Array) -> jax.Array:
        """float32[batch, features], float32[batch, 12] -> float32[batch, features]."""
        return self.cell(state, value)[0]

    def classify(self, state: jax.Array) -> jax.Array:
        """float32[batch, features] -> logits, float32[batch, 9]."""
        return self.readout(state)

    def __call__(self, state: jax.Array, value: jax.Array) -> jax.Array:
        """A step and its readout; for initialisation."""
        return self.classify(self.step(state, value))


def initial_parameters(model: Recurrent, key: jax.Array) -> Any:
    """Parameters of the model."""
    return model.init(key, jnp.zeros((1, model.features)), jnp.zeros((1, COEFFICIENTS)))


def logits(model: Recurrent, parameters: Any, values: jax.Array, lengths: jax.Array) -> jax.Array:
    """Reads every series of a batch to its end.

    Args:
      model: the network.
      parameters: its parameters.
      values: float32[batch, longest, 12].
      lengths: int32[batch].

    Returns:
      float32[batch, 9].
    """
    last = jnp.max(lengths)

    def trip(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        state, time = carried
        value = jax.lax.dynamic_index_in_dim(values, time, axis=1, keepdims=False)
        following = model.apply(parameters, state, value, method="step")
        return jnp.where((time < lengths)[:, None], following, state), time + 1

    start = jnp.zeros((values.shape[0], model.features))
    state, _ = jdynoff.while_loop(lambda carried: carried[1] < last, trip, (start, jnp.int32(0)))
    return model.apply(parameters, state, method="classify")


def loss(
    model: Recurrent, parameters: Any, values: jax.Array, lengths: jax.Array, speakers: jax.Array
) -> jax.Array:
    """Mean cross entropy, float32[]."""
    scores = logits(model, parameters, values, lengths)
    return optax.softmax_cross_entropy_with_integer_labels(scores, speakers).mean()
