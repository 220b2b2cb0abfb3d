"""A train step that plain JAX cannot run on this machine, run managed.

    python -m benchmarks.beyond_memory [--quick] [--json FILE]

An Evoformer trunk is made deep enough that XLA's own figures for the plain step exceed the memory
of the machine (they are compiled for, never run). The same step then runs once, managed. `--quick`
leaves the run out: it takes minutes and writes many gigabytes to the spill directory.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import jdynoff
from benchmarks.harness import Claim, megabytes, parse, report
from models.alphafold.compiling import RUN_ONCE
from models.alphafold.config import trunk_config
from models.alphafold.training import process_memory
from models.alphafold.trunk import make_trunk_step

_RESIDUES, _CLUSTERS, _EXTRA_ROWS, _EXTRA_BLOCKS = 256, 32, 64, 1
_FEWEST_BLOCKS = 11
# How far the plain step must exceed the machine; blocks are added until it does.
_EXCESS = 1.1
_MEMORY_INFO = Path("/proc/meminfo")


def machine_bytes() -> int:
    """All memory of this machine."""
    for line in _MEMORY_INFO.read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{_MEMORY_INFO} has no MemTotal; this benchmark needs Linux.")


def trunk(num_blocks: int) -> tuple[object, object, dict[str, jax.ShapeDtypeStruct]]:
    """The step, a state and the shapes of a batch, of a trunk with so many blocks."""
    config = trunk_config(
        num_blocks=num_blocks,
        num_extra_blocks=_EXTRA_BLOCKS,
        num_residues=_RESIDUES,
        num_msa=_CLUSTERS,
        num_extra_msa=_EXTRA_ROWS,
    )
    step, init, spec = make_trunk_step(config)
    return jax.jit(step, donate_argnums=0), init, spec


def plain_bytes(step: object, state: object, spec: object) -> int:
    """What plain JAX needs for a step, by XLA's figures; nothing is run."""
    lowered = step.lower(state, spec)  # type: ignore[attr-defined]
    memory = lowered.compile(compiler_options=RUN_ONCE).memory_analysis()
    return int(
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def made_batch(spec: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Features of the right shapes; what they say does not matter for memory."""
    rng = np.random.default_rng(0)
    batch = {}
    for name, leaf in spec.items():
        if name.endswith("mask"):
            batch[name] = jnp.ones(leaf.shape, leaf.dtype)
        elif jnp.issubdtype(leaf.dtype, jnp.integer):
            batch[name] = jnp.asarray(rng.integers(0, 20, leaf.shape), leaf.dtype)
        else:
            batch[name] = jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
    return batch


def deep_enough() -> tuple[object, object, dict[str, jax.ShapeDtypeStruct], int, int]:
    """The shallowest trunk that plain JAX cannot run here, what it needs, and its depth."""
    blocks = _FEWEST_BLOCKS
    while True:
        step, init, spec = trunk(blocks)
        shapes = jax.eval_shape(init, jax.random.key(0))  # type: ignore[arg-type]
        needed = plain_bytes(step, shapes, spec)
        wanted = _EXCESS * machine_bytes()
        if needed >= wanted:
            return step, init, spec, needed, blocks
        # What is needed grows by nearly the same with each block.
        blocks = max(blocks + 1, int(np.ceil(blocks * wanted / needed)))


def measure(run: bool) -> list[Claim]:
    """The plain step's figure, the managed step's, and what running it took."""
    machine = machine_bytes()
    step, init, spec, needed, blocks = deep_enough()
    managed = jdynoff.managed(step, budget="min")
    shapes = jax.eval_shape(init, jax.random.key(0))  # type: ignore[arg-type]
    plan = managed.plan(shapes, spec)
    gigabyte = 1e3
    claims = [
        Claim(
            f"plain JAX, {blocks} blocks, {_RESIDUES} residues",
            "",
            megabytes(needed) / gigabyte,
            "GB",
            round(megabytes(machine) / gigabyte, 1),
            at_least=True,
            note="XLA memory_analysis, never run; the bound is all memory of this machine",
        ),
        Claim(
            "managed: device peak",
            f"{megabytes(needed) / gigabyte:.0f} GB",
            megabytes(plan.device_peak_bytes) / gigabyte,
            "GB",
            round(megabytes(machine) / gigabyte / 4, 1),
            note='XLA memory_analysis + pool at budget="min"; bound: a quarter of the machine',
        ),
    ]
    if not run:
        return claims
    state = init(jax.random.key(0))  # type: ignore[operator]
    batch = made_batch(spec)
    process_memory.release_unused()
    process_memory.reset_peak()
    started = time.perf_counter()
    _, metrics = jax.block_until_ready(managed(state, batch))
    seconds = time.perf_counter() - started
    stats = managed.stats()
    if not np.isfinite(float(metrics["loss"])):
        raise RuntimeError(f"the managed step gave the loss {float(metrics['loss'])}")
    peak = megabytes(process_memory.peak_bytes()) / gigabyte
    moved = megabytes(stats.bytes_offloaded) / gigabyte
    note = f"{moved:.1f} GB offloaded, stalls {stats.stall_seconds:.0f} s"
    return [
        *claims,
        Claim(
            "managed: process peak while it ran",
            "cannot run",
            peak,
            "GB",
            round(megabytes(machine) / gigabyte / 2, 1),
            note="resident memory; bound: half of the machine",
        ),
        Claim("managed: one step", "cannot run", seconds, "s", None, note=note),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv)
    return report("beyond the memory of this machine", measure(not options.quick), options.json)


if __name__ == "__main__":
    sys.exit(main())
