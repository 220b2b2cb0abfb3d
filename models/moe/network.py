"""A language model of characters whose layers send each sequence to one expert.

As in Switch Transformer (Fedus, Zoph and Shazeer, 2021), a router chooses one expert, whose result
is multiplied by the probability that the router gave it, and a loss keeps the load balanced. What
is chosen here is one expert for a sequence: the sequences of a batch pass through a scan, and a
`lax.switch` in it runs the chosen expert, so the others neither compute nor leave residuals.
Experts have different widths. The trap: a router that reads the whole sequence would tell the
network about characters yet to be predicted. It reads the first `context` characters, and only
what follows them is scored.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

from models.moe.data import CHARACTERS, Batch
from models.workload import Metrics, correct_and_count


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the network.

    Attributes:
      layers: of attention and experts.
      channels: of a character between layers.
      heads: of the attention.
      experts: their hidden widths.
      length: characters of a sequence.
      context: characters that the router reads; they are not scored.
      balance: weight of the loss that keeps the load balanced.
    """

    layers: int
    channels: int
    heads: int
    experts: tuple[int, ...]
    length: int
    context: int
    balance: float = 0.01


class Layer(nn.Module):
    """The parts of a layer; `forward` says in which order they run."""

    settings: Settings

    def setup(self) -> None:
        """Makes the parts."""
        self.attention_norm, self.expert_norm = nn.LayerNorm(), nn.LayerNorm()
        self.attention = nn.MultiHeadDotProductAttention(self.settings.heads)
        self.router = nn.Dense(len(self.settings.experts), use_bias=False)
        self.enter = [nn.Dense(width) for width in self.settings.experts]
        self.leave = [nn.Dense(self.settings.channels) for _ in self.settings.experts]

    def attend(self, x: jax.Array) -> jax.Array:
        """float32[sequences, length, channels] -> the same shape."""
        mask = nn.make_causal_mask(x[..., 0])
        return x + self.attention(self.attention_norm(x), mask=mask)

    def route(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What experts are given, and each sequence's probabilities over them.

        float32[sequences, length, channels] -> the same shape, float32[sequences, experts].
        """
        x = self.expert_norm(x)
        start = jnp.mean(x[:, : self.settings.context], axis=1)
        return x, nn.softmax(self.router(start))

    def expert(self, x: jax.Array, number: int) -> jax.Array:
        """One expert's result for one sequence, float32[length, channels]."""
        return self.leave[number](nn.gelu(self.enter[number](x)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """All parts once; for initialisation."""
        x, _ = self.route(self.attend(x))
        return sum(self.expert(x, number) for number in range(len(self.settings.experts)))


class Ends(nn.Module):
    """What is before and behind the layers."""

    settings: Settings

    def setup(self) -> None:
        """Makes the parts."""
        self.characters = nn.Embed(CHARACTERS, self.settings.channels)
        self.places = nn.Embed(self.settings.length, self.settings.channels)
        self.norm, self.readout = nn.LayerNorm(), nn.Dense(CHARACTERS)

    def embed(self, characters: jax.Array) -> jax.Array:
        """int32[sequences, length] -> float32[sequences, length, channels]."""
        return self.characters(characters) + self.places(jnp.arange(characters.shape[1]))

    def read(self, x: jax.Array) -> jax.Array:
        """float32[..., channels] -> logits of the next character, float32[..., 128]."""
        return self.readout(self.norm(x))

    def __call__(self, characters: jax.Array) -> jax.Array:
        """All parts once; for initialisation."""
        return self.read(self.embed(characters))


class Parameters(NamedTuple):
    """Parameters of the network."""

    ends: Any
    layers: Any  # stacked: [layers, ...]


def initial_parameters(settings: Settings, key: jax.Array) -> Parameters:
    """Random parameters."""
    ends_key, layers_key = jax.random.split(key)
    characters = jnp.zeros((1, settings.length), jnp.int32)
    x = jnp.zeros((1, settings.length, settings.channels))
    return Parameters(
        Ends(settings).init(ends_key, characters),
        jax.vmap(lambda key: Layer(settings).init(key, x))(
            jax.random.split(layers_key, settings.layers)
        ),
    )


def balance_loss(probabilities: jax.Array, chosen: jax.Array) -> jax.Array:
    """The number of experts times the sum over them of share sent there times mean probability.

    It is 1, its least, where both are uniform (equation 4 of the Switch Transformer).

    Args:
      probabilities: float32[sequences, experts].
      chosen: int32[sequences].

    Returns:
      float32[].
    """
    experts = probabilities.shape[1]
    share = jnp.mean(nn.one_hot(chosen, experts), axis=0)
    return experts * jnp.sum(share * jnp.mean(probabilities, axis=0))


def forward(
    settings: Settings, parameters: Parameters, characters: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs sequences through the layers.

    Args:
      settings: of the network.
      parameters: its parameters.
      characters: int32[sequences, length].

    Returns:
      Logits of the character after each, float32[sequences, length, 128]; the experts chosen,
      int32[layers, sequences]; and the mean balance loss, float32[].
    """
    ends, part = Ends(settings), Layer(settings)

    def layer(x: jax.Array, own: Any) -> Any:
        x = part.apply(own, x, method="attend")
        given, probabilities = part.apply(own, x, method="route")
        chosen = jnp.argmax(probabilities, axis=1)
        experts = [
            partial(lambda number, x: part.apply(own, x, number, method="expert"), number)
            for number in range(len(settings.experts))
        ]

        def sequence(_: None, one: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
            return None, lax.switch(one[0], experts, one[1])

        _, result = lax.scan(sequence, None, (chosen, given))
        x = x + result * jnp.max(probabilities, axis=1)[:, None, None]
        return x, (chosen, balance_loss(probabilities, chosen))

    x = ends.apply(parameters.ends, characters, method="embed")
    x, (path, balance) = lax.scan(layer, x, parameters.layers)
    return ends.apply(parameters.ends, x, method="read"), path, jnp.mean(balance)


def loss(settings: Settings, parameters: Parameters, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy of the scored characters plus the balance loss, and metrics."""
    logits, path, balance = forward(settings, parameters, batch.characters[:, :-1])
    logits, following = _scored(settings, logits, batch)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, following)
    metrics = {"path": path, "balance": balance, "entropy": jnp.mean(entropy)}
    return jnp.mean(entropy) + settings.balance * balance, metrics


def score(settings: Settings, parameters: Parameters, batch: Batch) -> Metrics:
    """How many of the scored characters are found."""
    logits, path, _ = forward(settings, parameters, batch.characters[:, :-1])
    logits, following = _scored(settings, logits, batch)
    return {"path": path, **correct_and_count(logits, following, jnp.ones(following.shape))}


def _scored(settings: Settings, logits: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Logits and characters behind what the router has read."""
    first = settings.context
    return logits[:, first - 1 :], batch.characters[:, first:]
