"""Memory of managed steps against plain JAX, as XLA plans it, and what the manager held.

    python -m benchmarks.memory [--quick] [--json FILE] [--target h200]

`--target h200` compiles for an NVIDIA H200 instead, which need not be there; that takes an
environment with JAX's CUDA plugin (see `jdynoff.targets`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jdynoff
from benchmarks import steps
from benchmarks.harness import Claim, megabytes, parse, report
from jdynoff.targets import described_sharding

_TEMPORARIES_MB = 45.0
_POOL_MB = 32.0
_SWITCH_LENGTH = 16


@dataclasses.dataclass(frozen=True)
class Case:
    """One step and its bounds."""

    name: str
    step: steps.Step
    arguments: tuple[Any, ...]
    bound_mb: float
    pool_mb: float | None = None


def _temporaries(step: Any, arguments: tuple[Any, ...]) -> int:
    compiled = jax.jit(step).lower(*arguments).compile()
    return int(compiled.memory_analysis().temp_size_in_bytes)


def static_claims(case: Case, run: bool) -> list[Claim]:
    """XLA's temporaries and the manager's pool at budget="min"."""
    plain = _temporaries(case.step, case.arguments)
    managed = jdynoff.managed(jax.jit(case.step), budget="min")
    plan = managed.plan(*case.arguments)
    bound = case.bound_mb if case.bound_mb > 0 else -case.bound_mb * megabytes(plain)
    claims = [
        Claim(
            f"{case.name}: temporaries",
            f"{megabytes(plain):.0f} MB",
            megabytes(plan.memory.temporary_bytes),
            "MB",
            round(bound, 1),
            note='XLA memory_analysis at budget="min"',
        )
    ]
    if run:
        arguments = steps.random_like(case.arguments)
        jax.block_until_ready(managed(*arguments))
        stats = managed.stats()
        claims.append(
            Claim(
                f"{case.name}: manager's pool",
                "",
                megabytes(max(plan.pool_bytes, stats.pool_peak_bytes)),
                "MB",
                case.pool_mb,
                note=f"staging included; {megabytes(stats.bytes_offloaded):.0f} MB offloaded",
            )
        )
    return claims


def switch_claims(run: bool, sharding: Any = None) -> list[Claim]:
    """The switch: static memory, and that storage follows the path."""
    path = steps.Struct((_SWITCH_LENGTH,), jnp.int32, sharding=sharding)
    x = steps.activations(steps.SWITCH_BATCH, steps.SWITCH_WIDTH, sharding=sharding)
    structs = (steps.branch_weights(sharding), x, path)
    step = steps.sgd(steps.switch_loss)
    plain = _temporaries(step, structs)
    managed = jdynoff.managed(jax.jit(step), budget="min")
    plan = managed.plan(*structs)
    claims = [
        Claim(
            f"{_SWITCH_LENGTH} x switch over 8 branches: temporaries",
            f"{megabytes(plain):.0f} MB",
            megabytes(plan.memory.temporary_bytes),
            "MB",
            _TEMPORARIES_MB if sharding is None else None,
            note='XLA memory_analysis at budget="min"',
        )
    ]
    if not run:
        return claims
    weights, x = steps.random_like(structs[:2])
    stored = {}
    for name, taken in (
        ("narrowest branch always", [0] * _SWITCH_LENGTH),
        ("each branch twice", list(range(8)) * 2),
        ("widest branch always", [7] * _SWITCH_LENGTH),
    ):
        jax.block_until_ready(managed(weights, x, jnp.array(taken, jnp.int32)))
        stats = managed.stats()
        stored[name] = stats.bytes_offloaded
        # One pre-activation of the branch's width per iteration, and the carry.
        width = sum(steps.BRANCH_WIDTHS[branch] for branch in taken)
        expected = 4 * steps.SWITCH_BATCH * (width + _SWITCH_LENGTH * steps.SWITCH_WIDTH)
        claims.append(
            Claim(
                f"switch, {name}: stored",
                "",
                megabytes(stats.bytes_offloaded),
                "MB",
                round(1.05 * megabytes(expected), 1),
                note="bound: the path's own residuals + 5%",
            )
        )
        claims.append(
            Claim(
                f"switch, {name}: manager's pool",
                "",
                megabytes(max(plan.pool_bytes, stats.pool_peak_bytes)),
                "MB",
                _POOL_MB,
                note="staging included",
            )
        )
    return claims


def accumulation_claims(sharding: Any = None) -> list[Claim]:
    """Four microbatches need little more than one and the accumulators."""
    weights = steps.stacked_weights(sharding)
    micro = steps.activations(steps.BATCH // 4, sharding=sharding)
    batches = steps.activations(steps.BATCH // 4, leading=(4,), sharding=sharding)
    plain = _temporaries(steps.accumulating_step, (weights, batches))
    one = jdynoff.managed(jax.jit(steps.sgd(steps.scan_loss)), budget="min").plan(weights, micro)
    four = jdynoff.managed(jax.jit(steps.accumulating_step), budget="min").plan(weights, batches)
    accumulators = sum(4 * leaf.size for leaf in jax.tree.leaves(weights))
    bound = 1.3 * (one.memory.temporary_bytes + accumulators)
    return [
        Claim(
            "gradient accumulation over 4 microbatches: temporaries",
            f"{megabytes(plain):.0f} MB",
            megabytes(four.memory.temporary_bytes),
            "MB",
            round(megabytes(bound), 1),
            note="bound: 1.3 x (one managed microbatch + accumulators)",
        )
    ]


def measure(run: bool, sharding: Any = None) -> list[Claim]:
    """All memory claims.

    Args:
        run: Whether to run the steps as well as to compile them.
        sharding: Where they are compiled for; None for this machine.
    """
    x = steps.activations(sharding=sharding)
    stacked, listed = steps.stacked_weights(sharding), steps.listed_weights(sharding)
    mlp = f"{steps.LAYERS}-layer MLP"
    claims: list[Claim] = []
    for case in (
        Case(f"{mlp}, scan", steps.sgd(steps.scan_loss), (stacked, x), _TEMPORARIES_MB, _POOL_MB),
        Case(
            f"{mlp}, unrolled",
            steps.sgd(steps.unrolled_loss),
            (listed, x),
            _TEMPORARIES_MB,
            _POOL_MB,
        ),
        # A negative bound is a share of plain JAX's temporaries.
        Case("jax.checkpoint around a scan", steps.checkpointed_step, (stacked, x), -1 / 3),
        Case("one forward, two backwards", steps.two_backward_step, (stacked, x), -1 / 3),
    ):
        claims.extend(static_claims(case, run))
    claims.extend(switch_claims(run, sharding))
    claims.extend(accumulation_claims(sharding))
    return claims


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv, target=True)
    if options.target:
        claims = measure(False, described_sharding(options.target))
        title = f"memory, compiled for {options.target} (which is not there)"
    else:
        claims, title = measure(True), "memory on this machine"
    return report(title, claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
