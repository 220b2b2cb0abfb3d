"""The AlphaFold trunk: memory and step time against plain JAX and per-block checkpoints.

6 Evoformer and 4 extra-MSA blocks, 96 residues, 32/64 MSA rows, c_m 64, c_z 32, with losses and
Adam. The managed step has the least memory that is possible, moves what the planner chooses through
the disk, and computes the rest again; `--budget` chooses another. The last line takes the 48-block
trunk and compares the time to rewrite it with the time that XLA takes to compile it.

    python -m benchmarks.alphafold_trunk [--quick] [--budget BYTES] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdynoff
from benchmarks.harness import Claim, interleave, parse, report
from models.alphafold.config import trunk_config
from models.alphafold.trunk import make_trunk_step

_TEMPORARIES_MIB = 210.0
_TO_PLAIN, _TO_CHECKPOINT = 1.0, 1.0
_OF_CHECKPOINT_MEMORY = 0.5
_REWRITE_SHARE = 0.1
_BLOCKS = 48


def random_batch(spec: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Features of the right types: the arithmetic does not depend on their values."""
    generator = np.random.default_rng(0)
    batch = {}
    for name, leaf in spec.items():
        if leaf.dtype == jnp.int32:
            values = generator.integers(0, 20, leaf.shape)
        elif "mask" in name:
            values = generator.random(leaf.shape) > 0.2
        else:
            values = generator.normal(size=leaf.shape)
        batch[name] = jnp.asarray(values, leaf.dtype)
    return batch


def _mebibytes(memory: Any) -> float:
    return memory.temp_size_in_bytes / 2**20


def trunk_claims(budget: int | str, rounds: int) -> list[Claim]:
    """Temporaries and interleaved step times."""
    step, init, spec = make_trunk_step(trunk_config())
    checkpointed, _, _ = make_trunk_step(trunk_config(checkpoint_blocks=True))
    state, batch = init(jax.random.key(0)), random_batch(spec)
    plain_step, checkpoint_step = jax.jit(step), jax.jit(checkpointed)
    managed = jdynoff.managed(jax.jit(step), budget=budget)
    plan = managed.plan(state, batch)
    plain_mib = _mebibytes(plain_step.lower(state, batch).compile().memory_analysis())
    checkpoint_mib = _mebibytes(checkpoint_step.lower(state, batch).compile().memory_analysis())
    times = interleave(
        {
            "plain": lambda: plain_step(state, batch),
            "checkpoint": lambda: checkpoint_step(state, batch),
            "managed": lambda: managed(state, batch),
        },
        rounds,
    )
    claims = [
        Claim(
            "trunk, 6 blocks: temporaries",
            f"{plain_mib:.0f} MiB",
            plan.memory.temporary_bytes / 2**20,
            "MiB",
            _TEMPORARIES_MIB,
            note=f"per-block jax.checkpoint {checkpoint_mib:.0f} MiB; pool "
            f"{plan.pool_bytes / 2**20:.0f} MiB, disk {plan.spill_bytes / 2**20:.0f} MiB",
        )
    ]
    claims.append(
        Claim(
            "of per-block jax.checkpoint's",
            f"{checkpoint_mib:.0f} MiB",
            plan.memory.temporary_bytes / 2**20 / checkpoint_mib,
            "",
            _OF_CHECKPOINT_MEMORY,
            note=f"{plan.offloaded_bytes / 2**20:.0f} MiB leave XLA; "
            f"{100 * plan.forecast.extra_flops / plan.forecast.flops:.0f}% of the FLOPs again",
        )
    )
    for other, bound in (("plain", _TO_PLAIN), ("checkpoint", _TO_CHECKPOINT)):
        ratio, low, high = times["managed"].ratio(times[other])
        claims.append(
            Claim(
                f"trunk, 6 blocks: step against {other}",
                f"{times[other].median:.2f} s",
                ratio,
                "x",
                bound,
                note=f"median of {rounds} interleaved rounds, {low:.2f} to {high:.2f}; managed "
                f"{times['managed'].median:.2f} s, stalled {managed.stats().stall_seconds:.2f} s",
            )
        )
    return claims


def rewrite_claim() -> Claim:
    """Rewriting the 48-block trunk, as a share of compiling the result."""
    step, init, spec = make_trunk_step(trunk_config(num_blocks=_BLOCKS))
    state = jax.eval_shape(init, jax.random.key(0))
    plan = jdynoff.managed(jax.jit(step), budget="min").plan(state, spec)
    return Claim(
        f"trunk, {_BLOCKS} blocks: rewriting / XLA's compilation",
        "",
        plan.rewrite_seconds / plan.compile_seconds,
        "",
        _REWRITE_SHARE,
        note=f"{plan.rewrite_seconds:.2f} s to index, decide and emit; "
        f"{plan.compile_seconds:.1f} s in XLA; {len(plan.sites)} residuals",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv, budget="min")
    claims = trunk_claims(options.budget, 3 if options.quick else 7)
    claims.append(rewrite_claim())
    return report("AlphaFold trunk", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
