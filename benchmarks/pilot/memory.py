"""Part 1: what plain JAX reserves for all paths, and what the path that is taken needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdynoff
from benchmarks.harness import Claim, megabytes
from benchmarks.pilot.recording import Recording
from jdynoff.planning.plan import MemoryUse

_SHARE_OF_PLAIN = 0.1


def plain_bytes(step: Any, *arguments: Any) -> int:
    """XLA's arguments + outputs - aliases + temporaries of the step as it is."""
    return MemoryUse.of(jax.jit(step).lower(*arguments).compile().memory_analysis()).total_bytes


def workload_claims(recording: Recording, budget: int, plain: int) -> list[Claim]:
    """Plain JAX's plan, the least-memory one, and what a budget's pool really holds."""
    workload = recording.workload
    least = recording.managed.plan(recording.state, recording.batches[-1])
    managed = jdynoff.managed(jax.jit(workload.step), budget=budget)
    used = []
    for batch in recording.batches:
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
        ),
    ]


def eight_widths(layers: int, rows: int, widths: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """A scan of a switch over branches of different widths: step, state, batch."""
    size = widths[0]
    keys = jax.random.split(jax.random.key(0), len(widths))
    state = [
        jax.random.normal(key, (2, layers, size, width)) / size**0.5
        for key, width in zip(keys, widths, strict=True)
    ]
    chosen = jax.random.randint(jax.random.key(1), (layers,), 0, len(widths))
    batch = jax.random.normal(jax.random.key(2), (rows, size)), chosen

    def step(state: Any, batch: Any) -> Any:
        x, chosen = batch

        def loss(state: Any) -> jax.Array:
            def layer(x: jax.Array, inputs: Any) -> tuple[jax.Array, None]:
                weights, index = inputs
                branches = [
                    lambda x, w=w: x + 0.1 * jnp.tanh(jnp.sin(x @ w[0]) @ w[1].T) for w in weights
                ]
                return jax.lax.switch(index, branches, x), None

            stacked = [jnp.swapaxes(weight, 0, 1) for weight in state]
            return jnp.mean(jax.lax.scan(layer, x, (stacked, chosen))[0] ** 2)

        value, gradient = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda old, change: old - 1e-3 * change, state, gradient), value

    return step, state, batch


def switch_claims(quick: bool) -> list[Claim]:
    """A tenth of plain JAX's memory, nothing of it on disk."""
    layers, rows = (16, 4096) if quick else (16, 32768)
    step, state, batch = eight_widths(layers, rows, (64, 64, 128, 192, 256, 320, 384, 512))
    plain = plain_bytes(step, state, batch)
    budget = int(_SHARE_OF_PLAIN * plain)
    managed = jdynoff.managed(jax.jit(step), budget=budget)
    jax.block_until_ready(managed(state, batch))
    stats, plan = managed.stats(), managed.plan(state, batch)
    return [
        Claim(
            "switch over 8 widths in a scan",
            f"{megabytes(plain):.4g} MB",
            megabytes(plan.device_peak_bytes),
            "MB",
            round(megabytes(budget), 1),
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
