"""A binary Tree-LSTM that goes up a batch of trees row by row.

Tai, Socher and Manning (2015), "Improved semantic representations from tree-structured long
short-term memory networks", section 3.2 with N = 2. All nodes' states are one array, the *memory*,
which every row reads (its children) and writes (itself). How many rows there are is data, in two
forms: a scan over all rows of the bucket, in which a `lax.cond` leaves out what is not there, and
`jdynoff.while_loop`, which ends. The trap: the branch must not take the memory in and out, or a
copy of it is made in every row; so it takes the children's states and gives the row's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax import lax

import jdynoff
from models.trees.data import Batch
from models.trees.syntax import LABELS
from models.workload import Metrics, correct_and_count

FORMS = ("scan", "while")


class TreeLstm(nn.Module):
    """A cell, and a readout of the root."""

    features: int

    def setup(self) -> None:
        """Makes the parts."""
        self.embedding = nn.Embed(LABELS, self.features)
        self.gates = nn.Dense(5 * self.features)
        self.readout = nn.Dense(1)

    def node(self, labels: jax.Array, below: jax.Array) -> jax.Array:
        """States of nodes from those of their children.

        Args:
          labels: int32[nodes].
          below: float32[nodes, 2, 2, features]: of each child the cell and the output; zeros where
            there is no child.

        Returns:
          float32[nodes, 2, features].
        """
        cells, outputs = below[:, :, 0], below[:, :, 1]
        given = jnp.concatenate([self.embedding(labels), outputs[:, 0], outputs[:, 1]], axis=-1)
        enter, leave, update, *keep = jnp.split(self.gates(given), 5, axis=-1)
        kept = sum(nn.sigmoid(keep[child] + 1) * cells[:, child] for child in range(2))
        cell = nn.sigmoid(enter) * jnp.tanh(update) + kept
        return jnp.stack([cell, nn.sigmoid(leave) * jnp.tanh(cell)], axis=1)

    def read(self, outputs: jax.Array) -> jax.Array:
        """float32[trees, features] -> log odds of the answer 1, float32[trees]."""
        return self.readout(outputs)[:, 0]

    def __call__(self, labels: jax.Array, below: jax.Array) -> jax.Array:
        """All parts once; for initialisation."""
        return self.read(self.node(labels, below)[:, 1])


def initial_parameters(model: TreeLstm, key: jax.Array) -> Any:
    """Random parameters."""
    return model.init(key, jnp.zeros(1, jnp.int32), jnp.zeros((1, 2, 2, model.features)))


def log_odds(
    model: TreeLstm, parameters: Any, batch: Batch, form: str
) -> tuple[jax.Array, jax.Array]:
    """Goes up all trees.

    Args:
      model: the network.
      parameters: its parameters.
      batch: the trees.
      form: "scan" or "while".

    Returns:
      float32[trees], and what was run: bool[bucket] by row ("scan"), or the number of rows,
      int32[] ("while").

    Raises:
      ValueError: there is no such form.
    """
    if form not in FORMS:
        raise ValueError(f"form is {form!r}; it must be one of {', '.join(map(repr, FORMS))}.")
    bucket, width = batch.labels.shape
    memory = jnp.zeros((bucket * width + 1, 2, model.features))

    def run(labels: jax.Array, below: jax.Array) -> jax.Array:
        return model.apply(parameters, labels, below, method="node")

    def scanned(memory: jax.Array, row: Any) -> Any:
        number, labels, children = row
        there = number < batch.rows
        states = lax.cond(
            there,
            lambda: run(labels, memory[children]),
            lambda: jnp.zeros((width, 2, model.features)),
        )
        return lax.dynamic_update_slice_in_dim(memory, states, number * width, axis=0), there

    def looped(carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        memory, number = carried
        labels, children = (
            lax.dynamic_index_in_dim(part, number, keepdims=False)
            for part in (batch.labels, batch.children)
        )
        states = run(labels, memory[children])
        memory = lax.dynamic_update_slice_in_dim(memory, states, number * width, axis=0)
        return memory, number + 1

    if form == "scan":
        numbers = jnp.arange(bucket)
        memory, path = lax.scan(scanned, memory, (numbers, batch.labels, batch.children))
    else:
        memory, path = jdynoff.while_loop(
            lambda carried: carried[1] < batch.rows, looped, (memory, jnp.int32(0))
        )
    return model.apply(parameters, memory[batch.roots, 1], method="read"), path


def loss(model: TreeLstm, form: str, parameters: Any, batch: Batch) -> tuple[jax.Array, Metrics]:
    """Mean cross entropy, and metrics."""
    odds, path = log_odds(model, parameters, batch, form)
    entropy = optax.sigmoid_binary_cross_entropy(odds, batch.answers.astype(odds.dtype))
    value = jnp.sum(entropy * batch.weights) / jnp.sum(batch.weights)
    return value, {"path": path}


def score(model: TreeLstm, form: str, parameters: Any, batch: Batch) -> Metrics:
    """How many answers are right."""
    odds, path = log_odds(model, parameters, batch, form)
    both = jnp.stack([jnp.zeros_like(odds), odds], axis=-1)
    return {"path": path, **correct_and_count(both, batch.answers, batch.weights)}
