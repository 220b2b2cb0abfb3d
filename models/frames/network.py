"""A transformer block that looks at frame after frame until what it sees has settled.

The state is given the next frame, goes through one block with the same parameters at every look,
and is read. When a look has changed the readings of the batch by little, no further frame is looked
at: the exit by convergence of recurrent-depth models (Geiping et al., 2025). The readings of all
looks are trained (as in BranchyNet: Teerapittayanon, McDanel and Kung, 2016), so each is an answer.
The traps: a look that does not take place leaves everything as it was, so none follows it and
leaving needs no flag; when to leave has no derivative; and a network that has learned nothing yet
has settled at once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from models.digits.data import CLASSES, SIDE
from models.frames.data import Batch
from models.workload import Metrics, correct_and_count, loss_at_all_depths, weighted_mean

_PATCH = 2  # pixels, each way
_ACROSS = SIDE // _PATCH
_PATCHES = _ACROSS**2


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the network, and when a batch leaves it.

    Attributes:
      channels: of a patch.
      heads: of the attention between patches.
      most: frames that there are to look at.
      settled: mean change of the probabilities, from 0 to 1, below which a batch has left.
    """

    channels: int
    heads: int
    most: int
    settled: float = 0.03


class Network(nn.Module):
    """What a look does; `forward` says how many there are."""

    settings: Settings

    @nn.compact
    def __call__(self, state: jax.Array, frame: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Looks at a frame.

        Args:
          state: float32[batch, 16, channels].
          frame: float32[batch, 8, 8].

        Returns:
          The next state, and its reading, float32[batch, 10].
        """
        channels = self.settings.channels
        zeros = nn.initializers.zeros
        places = self.param("places", nn.initializers.normal(0.1), (_PATCHES, channels))
        state = state + nn.Dense(channels)(_in_patches(frame))
        attention = nn.MultiHeadDotProductAttention(self.settings.heads, out_kernel_init=zeros)
        state = state + attention(nn.LayerNorm()(state) + places)
        wide = nn.gelu(nn.Dense(4 * channels)(nn.LayerNorm()(state)))
        state = state + nn.Dense(channels, kernel_init=zeros)(wide)
        seen = nn.LayerNorm()(state).reshape(len(state), -1)
        return state, nn.Dense(CLASSES, kernel_init=zeros)(seen)


def _in_patches(frame: jax.Array) -> jax.Array:
    """float32[batch, 8, 8] -> float32[batch, 16, 4]."""
    split = frame.reshape(len(frame), _ACROSS, _PATCH, _ACROSS, _PATCH)
    return split.transpose(0, 1, 3, 2, 4).reshape(len(frame), _PATCHES, _PATCH**2)


def initial_parameters(network: Network, key: jax.Array) -> Any:
    """Parameters with which a look changes no reading yet."""
    state = jnp.zeros((1, _PATCHES, network.settings.channels))
    return network.init(key, state, jnp.zeros((1, SIDE, SIDE)))


def change(before: jax.Array, after: jax.Array, weights: jax.Array) -> jax.Array:
    """How far two readings are from each other.

    Args:
      before: float32[batch, 10], logits.
      after: float32[batch, 10].
      weights: float32[batch].

    Returns:
      float32[], from 0 to 1: the weighted mean of the total variation of the probabilities.
    """
    apart = jnp.sum(jnp.abs(nn.softmax(after) - nn.softmax(before)), axis=-1) / 2
    return weighted_mean(apart, weights)


def forward(network: Network, parameters: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Looks at as many frames as a batch needs, one at least.

    Args:
      network: what to run.
      parameters: its parameters.
      batch: the frames.

    Returns:
      The reading after each frame, float32[most, batch, 10], which stays as it is where there was
      no look; and whether there was one, bool[most].
    """

    def step(carried: Any, frame: jax.Array) -> Any:
        def look(carried: Any) -> Any:
            state, before, _ = carried
            state, reading = network.apply(parameters, state, frame)
            return state, reading, lax.stop_gradient(change(before, reading, batch.weights))

        goes_on = carried[2] >= network.settings.settled
        carried = lax.cond(goes_on, look, lambda carried: carried, carried)
        return carried, (carried[1], goes_on)

    size = batch.labels.shape[0]
    state = jnp.zeros((size, _PATCHES, network.settings.channels))
    entry = state, jnp.zeros((size, CLASSES)), jnp.ones(())
    _, (readings, path) = lax.scan(step, entry, batch.frames)
    return readings, path


def loss(network: Network, parameters: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy over all frames, and metrics."""
    readings, path = forward(network, parameters, batch)
    value = loss_at_all_depths(readings, batch.labels, batch.weights)
    return value, {"path": path, **correct_and_count(readings[-1], batch.labels, batch.weights)}


def score(network: Network, parameters: Any, batch: Batch) -> Metrics:
    """How many digits the last reading gets right."""
    readings, path = forward(network, parameters, batch)
    return {"path": path, **correct_and_count(readings[-1], batch.labels, batch.weights)}
