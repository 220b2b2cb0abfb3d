"""Part 1: what plain JAX reserves for all paths, and what the path that is taken needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdynoff
from benchmarks import steps
from benchmarks.harness import Claim, megabytes
from benchmarks.pilot.recording import Recording
from jdynoff.planning.plan import MemoryUse

_SHARE_OF_PLAIN = 0.1
_SWITCH_LENGTH = 16
_PATHS = 12


def plain_bytes(step: Any, *arguments: Any) -> int:
    """XLA's arguments + outputs - aliases + temporaries of the step as it is."""
    return MemoryUse.of(jax.jit(step).lower(*arguments).compile().memory_analysis()).total_bytes


def workload_claims(recording: Recording, budget: int, plain: int) -> list[Claim]:
    """Plain JAX's plan, the least-memory one, and what a budget's pool really holds."""
    workload = recording.workload
    least = recording.managed.plan(recording.state, recording.batches[-1])
    managed = jdynoff.managed(jax.jit(workload.step), budget=budget, **recording.options)
    used = []
    for batch in recording.batches[:_PATHS]:
        jax.block_until_ready(managed(recording.state, batch))
        used.append(managed.stats().pool_peak_bytes)
    plan = managed.plan(recording.state, recording.batches[-1])
    static = plan.device_peak_bytes - plan.pool_bytes
    mean = float(np.mean(used))
    return [
        Claim(
            f"{workload.name}: least memory",
            f"{megabytes(plain):.3g} MB",
            megabytes(least.device_peak_bytes),
            "MB",
            None,
            note="the static rewrite: XLA and pool together, every path",
        ),
        Claim(
            f"{workload.name}: XLA and what the pool held",
            f"{megabytes(plain):.3g} MB",
            megabytes(static + mean),
            "MB",
            None,
            note=f"budget {megabytes(budget):.3g} MB; pool {megabytes(min(used)):.3g} to "
            f"{megabytes(max(used)):.3g} MB over {len(used)} paths",
            series={
                "plain JAX, MB": megabytes(plain),
                "static rewrite": megabytes(least.device_peak_bytes),
                "dynamic plan": megabytes(static + mean),
            },
        ),
    ]


def switch_claims() -> list[Claim]:
    """A tenth of plain JAX's memory, nothing of it on disk."""
    step = steps.sgd(steps.switch_loss)
    shapes = steps.branch_weights(), steps.activations(steps.SWITCH_BATCH, steps.SWITCH_WIDTH)
    weights, x = steps.random_like(shapes)
    path = jnp.arange(_SWITCH_LENGTH) % len(steps.BRANCH_WIDTHS)
    plain = plain_bytes(step, weights, x, path)
    budget = int(_SHARE_OF_PLAIN * plain)
    managed = jdynoff.managed(jax.jit(step), budget=budget)
    jax.block_until_ready(managed(weights, x, path))
    stats, plan = managed.stats(), managed.plan(weights, x, path)
    return [
        Claim(
            "switch over 8 widths in a scan",
            f"{megabytes(plain):.4g} MB",
            100 * plan.device_peak_bytes / plain,
            "% of plain",
            100 * _SHARE_OF_PLAIN,
            note=f"XLA and pool; the path stored {megabytes(stats.bytes_offloaded):.4g} MB",
        ),
        Claim(
            "switch over 8 widths in a scan: to the disk",
            "",
            megabytes(stats.bytes_written),
            "MB",
            0.0,
        ),
    ]
