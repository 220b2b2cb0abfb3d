"""Trains a workload and writes down every step: what the pilot saw, said, and what happened.

The other parts replay what is recorded here, so each workload is trained once. The trap: paths
depend on parameters, which change while the network learns; a part that runs steps again therefore
starts from the recorded state and takes batches that nobody has seen, without updating it.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import numpy as np

import jdynoff
from models.training import endless
from models.workload import Workload


@dataclasses.dataclass(frozen=True, eq=False)
class Recording:
    """A number of steps of one workload.

    Attributes:
      workload: what was trained.
      options: of all managed steps, beside the budget.
      managed: the step that was trained with, and its pilot.
      state: after the last step.
      batches: those that would have come next.
      features: f32[steps, F], what the pilot saw.
      counters: i32[steps, n], of the learned blocks.
      predicted: i32[steps, n], what the pilot had said before each step.
      learned: whether the pilot predicts a block, by block; the others are sliced.
      names: of the blocks.
    """

    workload: Workload
    options: dict[str, Any]
    managed: Any
    state: Any
    batches: list[Any]
    features: np.ndarray
    counters: np.ndarray
    predicted: np.ndarray
    learned: np.ndarray
    names: list[str]

    @property
    def guide(self) -> Any:
        """The pilot of the step, with what it was built from."""
        return self.managed._last.guide


def record(
    workload: Workload, options: dict[str, Any], steps: int, keep: int, seed: int = 0
) -> Recording:
    """Trains with the least memory and the usual pilot.

    Args:
      workload: what to train.
      options: of `jdynoff.managed`, beside the budget.
      steps: how many.
      keep: how many of the batches that come next to keep.
      seed: of the order of the batches.
    """
    managed = jdynoff.managed(jax.jit(workload.step), budget="min", **options)
    state, batches = workload.state, endless(workload, seed)
    features, counters, predicted = [], [], []
    see: Any = None
    for batch in itertools.islice(batches, steps):
        state, _ = jax.block_until_ready(managed(state, batch))
        stats = managed.stats()
        guide = managed._last.guide
        see = see or jax.jit(guide.features)
        features.append(np.asarray(see(jax.tree.leaves(((state, batch), {})))))
        names = list(stats.predicted)
        counters.append([stats.path[name] for name in names])
        predicted.append(list(stats.predicted.values()))
    learned = [block.name for block in guide.learned]
    return Recording(
        workload,
        options,
        managed,
        state,
        list(itertools.islice(batches, keep)),
        np.stack(features),
        np.asarray(counters, np.int32),
        np.asarray(predicted, np.int32),
        np.asarray([name in learned for name in names]),
        names,
    )
