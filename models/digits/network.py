"""A residual network that a batch leaves as soon as the network is sure of it.

One head reads the state after every block. From how sure it is of the whole batch follows what the
next block does: nothing, because the batch has left; a narrow transformation; or a wide one. The
head is trained at every depth (deep supervision, as in BranchyNet: Teerapittayanon, McDanel and
Kung, 2016), so sureness means something at each. A block that is not run changes nothing, so the
next one is not run either: leaving needs no flag. The trap: the choice is one for the batch, and
has no derivative; what is learned is how sure to be.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from models.digits.data import CLASSES, SIDE, Batch
from models.workload import Metrics, correct_and_count, loss_at_all_depths, weighted_mean

SKIPPED, NARROW, WIDE = 0, 1, 2  # what a block does, as in a path


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the network, and when a batch leaves it.

    Attributes:
      blocks: at most.
      channels: of a pixel between blocks.
      widths: of the narrow and the wide transformation.
      sure: mean probability of the likeliest class from which on a batch has left.
      nearly_sure: from which on a narrow transformation does.
    """

    blocks: int
    channels: int
    widths: tuple[int, int]
    sure: float = 0.97
    nearly_sure: float = 0.85


class Neighbours(nn.Module):
    """A 3 x 3 convolution of each channel by itself, written as nine shifts.

    On a CPU, XLA runs convolutions inside of control flow without its fast library.
    """

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """float32[batch, 8, 8, channels] -> the same shape."""
        kernel = self.param("kernel", nn.initializers.normal(1 / 3), (3, 3, x.shape[-1]))
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return sum(
            padded[:, row : row + SIDE, column : column + SIDE] * kernel[row, column]
            for row in range(3)
            for column in range(3)
        )


class Transformation(nn.Module):
    """What a block adds: neighbours, then an inverted bottleneck at each pixel.

    As in ConvNeXt (Liu et al., 2022).
    """

    width: int
    channels: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """float32[batch, 8, 8, channels] -> the same shape."""
        hidden = nn.Dense(self.width)(nn.LayerNorm()(Neighbours()(x)))
        return nn.Dense(self.channels, kernel_init=nn.initializers.zeros)(nn.gelu(hidden))


class Head(nn.Module):
    """Logits of a state."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """float32[batch, 8, 8, channels] -> float32[batch, 10]."""
        quarters = nn.avg_pool(nn.LayerNorm()(x), (4, 4), strides=(4, 4))
        return nn.Dense(CLASSES)(quarters.reshape(len(x), -1))


class Network(nn.Module):
    """The parts of the network; `forward` says in which order they run."""

    settings: Settings

    def setup(self) -> None:
        """Makes the parts."""
        self.stem = nn.Conv(self.settings.channels, (3, 3))
        self.head = Head()
        narrow, wide = self.settings.widths
        self.narrow = Transformation(narrow, self.settings.channels)
        self.wide = Transformation(wide, self.settings.channels)

    def enter(self, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32[batch, 8, 8] -> the first state, float32[batch, 8, 8, channels], and logits."""
        x = self.stem(images[..., None])
        return x, self.head(x)

    def add_narrow(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A state -> the next state, and its logits."""
        x = x + self.narrow(x)
        return x, self.head(x)

    def add_wide(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """A state -> the next state, and its logits."""
        x = x + self.wide(x)
        return x, self.head(x)

    def __call__(self, images: jax.Array) -> jax.Array:
        """All parts once; for initialisation."""
        x, _ = self.enter(images)
        return self.add_wide(self.add_narrow(x)[0])[1]


class Parameters(NamedTuple):
    """Parameters of the network."""

    shared: Any  # of the stem and the head
    blocks: Any  # of the transformations, stacked: [blocks, ...]


def initial_parameters(network: Network, key: jax.Array) -> Parameters:
    """Parameters with which every block does nothing yet."""
    images = jnp.zeros((1, SIDE, SIDE))
    keys = jax.random.split(key, network.settings.blocks)
    each = jax.vmap(lambda key: network.init(key, images)["params"])(keys)
    first = jax.tree.map(lambda leaf: leaf[0], each)
    return Parameters(
        {name: first[name] for name in ("stem", "head")},
        {name: each[name] for name in ("narrow", "wide")},
    )


def sureness(logits: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean probability of the likeliest class over a batch, float32[]."""
    likeliest = jnp.max(nn.softmax(logits), axis=-1)
    return weighted_mean(likeliest, weights)


def forward(network: Network, parameters: Parameters, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Runs a batch through as many blocks as it needs.

    Args:
      network: what to run.
      parameters: its parameters.
      batch: the images.

    Returns:
      Logits at the entry and after every block, float32[1 + blocks, batch, 10], and what each block
      did, int32[blocks].
    """
    settings = network.settings

    def block(carried: Any, own: Any) -> Any:
        def apply(method: str, x: jax.Array) -> Any:
            return network.apply({"params": {**parameters.shared, **own}}, x, method=method)

        def run(x: jax.Array) -> Any:
            branches = [partial(apply, "add_narrow"), partial(apply, "add_wide")]
            return lax.switch(choice - NARROW, branches, x)

        x, logits = carried
        sure = lax.stop_gradient(sureness(logits, batch.weights))
        wide = jnp.where(sure >= settings.nearly_sure, NARROW, WIDE)
        choice = jnp.where(sure >= settings.sure, SKIPPED, wide)
        x, logits = lax.cond(choice != SKIPPED, run, lambda _: (x, logits), x)
        return (x, logits), (logits, choice)

    entry = network.apply({"params": parameters.shared}, batch.images, method="enter")
    _, (after, path) = lax.scan(block, entry, parameters.blocks)
    return jnp.concatenate([entry[1][None], after]), path


def loss(network: Network, parameters: Parameters, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy over all depths, and metrics."""
    logits, path = forward(network, parameters, batch)
    value = loss_at_all_depths(logits, batch.labels, batch.weights)
    return value, {"path": path, **correct_and_count(logits[-1], batch.labels, batch.weights)}


def score(network: Network, parameters: Parameters, batch: Batch) -> Metrics:
    """How many images the last logits get right."""
    logits, path = forward(network, parameters, batch)
    return {"path": path, **correct_and_count(logits[-1], batch.labels, batch.weights)}
