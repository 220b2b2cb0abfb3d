"""What must hold of every workload; each has a test file that calls this."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np

import jdynoff
from models.training import endless
from models.workload import State, Workload

STEPS = 5


def trained(workload: Workload, steps: int) -> State:
    """The state after so many plain steps."""
    step, state = jax.jit(workload.step), workload.state
    for batch in itertools.islice(endless(workload, 0), steps):
        state, _ = step(state, batch)
    return state


def assert_managed_is_plain(workload: Workload, state: State, passes_before: int = 0) -> list[Any]:
    """Takes five steps plain and managed, which must agree.

    Args:
      workload: what to train.
      state: from where.
      passes_before: over the data, so that batches are others than those of `trained`.

    Returns:
      The paths of the five steps.
    """
    plain = jax.jit(workload.step)
    # Small residuals would stay: a pool takes more. So nothing is computed again, and all is moved.
    managed = jdynoff.managed(jax.jit(workload.step), budget="min", min_bytes=1, flops_per_byte=-1)
    other, paths, moved = state, [], 0
    for batch in itertools.islice(endless(workload, passes_before), STEPS):
        state, want = plain(state, batch)
        other, got = managed(other, batch)
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-5)
        np.testing.assert_array_equal(got["path"], want["path"])
        paths.append(np.asarray(want["path"]))
        moved += managed.stats().bytes_offloaded
    assert moved > 0
    return paths


def assert_batches_are_static_and_deterministic(
    workload: Workload, shapes: int = 1, most: int | None = None
) -> None:
    """A pass twice gives the same, another one something else, all in one of so many shapes.

    Args:
      workload: whose batches.
      shapes: how many there may be.
      most: batches to look at; None for all of a pass.
    """
    for split in ("train", "test"):
        one, again, other = (
            list(itertools.islice(workload.batches(split, seed), most)) for seed in (3, 3, 4)
        )
        jax.tree.map(np.testing.assert_array_equal, one, again)
        found = {tuple(leaf.shape for leaf in jax.tree.leaves(batch)) for batch in one}
        assert len(found) <= shapes
        same = all(
            np.array_equal(left, right)
            for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=False)
        )
        assert same == (split == "test")
