"""A step that plain JAX is killed for: 32 layers at batch 4096 in a process limited to 800 MB.

Four child processes: plain JAX without a limit (the time to beat), plain JAX within the limit (it
must be killed, or the limit proves nothing), the managed step within the limit, and a plain
O_DIRECT copy of the bytes that it moved, on the same disk.

    python -m benchmarks.memory_limit [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

import jdynoff
from benchmarks import steps
from benchmarks.harness import Claim, parse, report
from benchmarks.memory_cgroup import run_limited, unavailable

_LIMIT_BYTES = 800_000_000
_BUDGET_BYTES = 230_000_000  # what the interpreter, JAX and the compiler leave of the bounds
_PEAK_MB = 450.0
_LAYERS, _BATCH = 32, 4096
_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def child(kind: str, rounds: int) -> None:
    """Runs the step and prints its seconds and statistics as JSON."""
    weights = steps.random_like(steps.stacked_weights(layers=_LAYERS))
    x = steps.random_like(steps.activations(_BATCH))
    step: Any = jax.jit(steps.sgd(steps.scan_loss), donate_argnums=0)
    if kind == "managed":
        step = jdynoff.managed(step, budget=_BUDGET_BYTES)
    seconds = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        value, weights = jax.block_until_ready(step(weights, x))
        seconds.append(time.perf_counter() - started)
    result: dict[str, Any] = {"seconds": seconds[1:], "loss": float(value)}
    if kind == "managed":
        stats = step.stats()
        result.update(written=stats.bytes_written, read=stats.bytes_read)
        result.update(stall_seconds=stats.stall_seconds)
    print(json.dumps(result))


def _command(kind: str, rounds: int) -> list[str]:
    return [sys.executable, "-m", "benchmarks.memory_limit", "--child", kind, str(rounds)]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _result(stdout: str) -> dict[str, Any]:
    return json.loads(stdout.strip().splitlines()[-1])


def measure(rounds: int) -> list[Claim]:
    """Runs the children."""
    from jdynoff.runtime.bandwidth import PlainCopy
    from jdynoff.runtime.tiers import default_tiers

    free = _result(
        subprocess.run(
            _command("plain", rounds), capture_output=True, text=True, check=True, cwd=_REPOSITORY
        ).stdout
    )
    killed = run_limited(_command("plain", 1), _LIMIT_BYTES, 600, _REPOSITORY)
    managed = run_limited(_command("managed", rounds), _LIMIT_BYTES, 900, _REPOSITORY)
    if managed.returncode != 0:
        raise RuntimeError(f"the managed step failed within the limit: {managed.stderr[-2000:]}")
    step = _result(managed.stdout)
    (disk,) = default_tiers()
    moved = max(step["written"], step["read"], 1)
    copy = PlainCopy(disk.directory, moved)
    rates = [copy.run().round_trip_bytes_per_second for _ in range(3)]
    copy.close()
    disk_seconds = moved / _median(rates)
    plain_seconds = _median(free["seconds"])
    allowed = max(1.25 * plain_seconds, 1.15 * disk_seconds)
    took = _median(step["seconds"])
    return [
        Claim(
            f"plain JAX within {_LIMIT_BYTES // 10**6} MB: ran to its end",
            "",
            float(killed.returncode == 0),
            "",
            0.0,
            note=f"exit status {killed.returncode}; killed by the kernel is -9",
        ),
        Claim(
            "managed within the limit: real peak of the process",
            "",
            managed.peak_bytes / 1e6,
            "MB",
            _PEAK_MB,
            note=f"memory cgroup; interpreter, JAX and compiler included; loss {step['loss']:.6g} "
            f"(plain {free['loss']:.6g})",
        ),
        Claim(
            "managed within the limit: step",
            f"{plain_seconds:.2f} s without limit",
            took / allowed,
            "x of what is allowed",
            1.0,
            note=f"{took:.2f} s; allowed the larger of 1.25 x plain and 1.15 x "
            f"{disk_seconds:.2f} s for {moved / 1e6:.0f} MB out and back by O_DIRECT; stalled "
            f"{step['stall_seconds']:.2f} s",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark, or one of its children."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--child"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("--child", nargs=2)
        kind, rounds = parser.parse_args(arguments).child
        child(kind, int(rounds))
        return 0
    options = parse(__doc__, arguments)
    reason = unavailable()
    if reason:
        print(f"skipped: {reason}")
        return 0
    claims = measure(3 if options.quick else 7)
    return report("32 layers, batch 4096, in 800 MB", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
