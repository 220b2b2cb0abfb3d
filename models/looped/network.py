"""A transformer block that the text goes through again and again.

As in Universal Transformers (Dehghani et al., 2019) and recurrent-depth language models (Geiping et
al., 2025), all layers share their parameters, and each is given the embedded text beside the state
that the one before it has left. How many there are is part of the batch. The trap: the scan is as
long as the deepest batch may be, and a `lax.cond` in it leaves out what is beyond.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from models.looped.data import CHARACTERS, Batch
from models.workload import Metrics, correct_and_count


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the network, and how often a batch goes through it.

    Attributes:
      channels: of a character.
      heads: of the attention.
      length: characters of a sequence.
      most: times that a batch may go through the block.
      mean: of these times over batches.
    """

    channels: int
    heads: int
    length: int
    most: int
    mean: float


class Network(nn.Module):
    """The parts of the network; `forward` says how often the block runs."""

    settings: Settings

    def setup(self) -> None:
        """Makes the parts."""
        channels = self.settings.channels
        self.characters = nn.Embed(CHARACTERS, channels)
        self.places = nn.Embed(self.settings.length, channels)
        self.attention_norm, self.wide_norm, self.last_norm = (nn.LayerNorm() for _ in range(3))
        self.attention = nn.MultiHeadDotProductAttention(self.settings.heads)
        self.wide, self.narrow = nn.Dense(4 * channels), nn.Dense(channels)
        self.head = nn.Dense(CHARACTERS)

    def embed(self, characters: jax.Array) -> jax.Array:
        """int32[sequences, length] -> float32[sequences, length, channels]."""
        return self.characters(characters) + self.places(jnp.arange(characters.shape[1]))

    def block(self, state: jax.Array, text: jax.Array) -> jax.Array:
        """A state and the embedded text, float32[sequences, length, channels] -> the next state."""
        state = state + text
        mask = nn.make_causal_mask(jnp.ones(state.shape[:2]))
        state = state + self.attention(self.attention_norm(state), mask=mask)
        return state + self.narrow(nn.gelu(self.wide(self.wide_norm(state))))

    def read(self, state: jax.Array) -> jax.Array:
        """float32[sequences, length, channels] -> float32[sequences, length, 128]."""
        return self.head(self.last_norm(state))

    def __call__(self, characters: jax.Array) -> jax.Array:
        """All parts once; for initialisation."""
        text = self.embed(characters)
        return self.read(self.block(jnp.zeros_like(text), text))


def initial_parameters(network: Network, key: jax.Array) -> Any:
    """Random parameters."""
    return network.init(key, jnp.zeros((1, network.settings.length), jnp.int32))


def forward(network: Network, parameters: Any, batch: Batch) -> jax.Array:
    """Logits of every next character, float32[sequences, length, 128]."""

    def run(method: str, *arguments: jax.Array) -> jax.Array:
        return network.apply(parameters, *arguments, method=method)

    text = run("embed", batch.characters[:, :-1])

    def layer(state: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        there = number < batch.depth
        return lax.cond(there, lambda: run("block", state, text), lambda: state), None

    state, _ = lax.scan(layer, jnp.zeros_like(text), jnp.arange(network.settings.most))
    return run("read", state)


def loss(network: Network, parameters: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy, and metrics."""
    logits = forward(network, parameters, batch)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, batch.characters[:, 1:])
    return jnp.mean(entropy), {"path": batch.depth}


def score(network: Network, parameters: Any, batch: Batch) -> Metrics:
    """How many characters are right."""
    labels = batch.characters[:, 1:]
    logits = forward(network, parameters, batch)
    return {"path": batch.depth, **correct_and_count(logits, labels, jnp.ones(labels.shape))}
