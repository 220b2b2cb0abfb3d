"""Device memory of a whole AlphaFold train step, compiled for an H200 that need not be there.

The step is the one that `examples/train_alphafold.py` runs: batch 1, float32, all losses,
recycling, per-sample clipping, Adam and the averaged weights, its state donated. The figure is
XLA's arguments + outputs - aliases + temporaries, plus the manager's pool. Beside the first preset
stands the same step with `jax.checkpoint` around each block and each chunk of attention, as plain
JAX compiles it; for the second that takes XLA half an hour.

It takes an environment with JAX's CUDA plugin (see `jdynoff.targets`), and some minutes a preset.

    python -m benchmarks.alphafold_memory [--quick] [--target h200] [--json FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax
import ml_collections

import jdynoff
from benchmarks.harness import Claim, parse, report
from jdynoff.planning.budget import format_bytes
from jdynoff.planning.plan import MemoryUse
from jdynoff.targets import described_sharding
from models.alphafold.training.settings import training_config
from models.alphafold.training.train_step import make_training

GIB = 2**30
# XLA's Triton fusion of matrix products finds no tiling for [8448, 256] (132 rows in chunks of 64)
# where no GPU is there to try one; the products then go to cuBLAS.
_COMPILER_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
_COMPARED = "initial_training"
_MUST_REACH = {"initial_training": 3.5, "finetuning": 10.0}


def step_and_shapes(config: ml_collections.ConfigDict, sharding: Any) -> tuple[Any, Any, Any]:
    """The jitted train step, with the shapes of its state and batch on a device."""
    training = make_training(config)

    def placed(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    step = jax.jit(training.step, donate_argnums=0, compiler_options=_COMPILER_OPTIONS)
    return step, placed(training.state_shapes()), placed(training.spec)


def managed_plan(preset: str, sharding: Any) -> Any:
    """The plan of the managed step with the least memory."""
    step, state, batch = step_and_shapes(training_config(preset), sharding)
    return jdynoff.managed(step, budget="min").plan(state, batch)


def checkpointed_bytes(preset: str, sharding: Any, *, chunks: bool = True) -> int:
    """Device bytes of the step with a checkpoint around each block, without `jdynoff`.

    Args:
      preset: of the step.
      sharding: on the described device.
      chunks: whether there is one around each chunk of attention as well.
    """
    config = training_config(preset)
    config.model.global_config.update({"checkpoint_blocks": True, "checkpoint_chunks": chunks})
    step, state, batch = step_and_shapes(config, sharding)
    analysis = step.lower(state, batch).compile().memory_analysis()
    return MemoryUse.of(analysis).total_bytes


def claim(preset: str, sharding: Any) -> Claim:
    """One preset's figure."""
    plan = managed_plan(preset, sharding)
    memory = plan.memory
    plain = ""
    if preset == _COMPARED:
        plain = f"{checkpointed_bytes(preset, sharding) / GIB:.2f} GiB with jax.checkpoint"
    return Claim(
        f"{preset}: device peak of a step",
        plain,
        plan.device_peak_bytes / GIB,
        "GiB",
        _MUST_REACH[preset],
        note=f"arguments {format_bytes(memory.argument_bytes)}, temporaries "
        f"{format_bytes(memory.temporary_bytes)}, pool {format_bytes(plan.pool_bytes)}; "
        f"{len(plan.sites)} sites move {format_bytes(plan.traffic_bytes)} a step; rewriting "
        f"{plan.rewrite_seconds:.0f} s, XLA {plan.compile_seconds:.0f} s",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv, target=True)
    sharding = described_sharding(options.target or "h200")
    presets = ("initial_training",) if options.quick else tuple(_MUST_REACH)
    claims = [claim(preset, sharding) for preset in presets]
    return report("AlphaFold, whole train step, float32, batch 1", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
