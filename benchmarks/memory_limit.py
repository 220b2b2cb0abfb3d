"""A step that plain JAX is killed for: 32 layers at batch 4096 in a process limited to 800 MB.

Child processes: plain JAX within the limit (it must be killed, or the limit proves nothing), then
in turn, several times over, plain JAX without a limit (the time to beat), the managed step within
the limit, and a plain O_DIRECT copy of the bytes that it moved, on the same disk.

    python -m benchmarks.memory_limit [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax

import jdynoff
from benchmarks import steps
from benchmarks.harness import Claim, parse, report, skipped
from benchmarks.memory_cgroup import run_limited, unavailable

_LIMIT_BYTES = 800_000_000
_BUDGET_BYTES = 230_000_000  # what the interpreter, JAX and the compiler leave of the bounds
_PEAK_MB = 450.0
_LAYERS, _BATCH = 32, 4096
_TURNS = 3
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


def _result(stdout: str) -> dict[str, Any]:
    return json.loads(stdout.strip().splitlines()[-1])


def measure(rounds: int) -> list[Claim]:
    """Runs the children."""
    from jdynoff.runtime.bandwidth import PlainCopy
    from jdynoff.runtime.tiers import default_tiers

    (disk,) = default_tiers()
    killed = run_limited(_command("plain", 1), _LIMIT_BYTES, 600, _REPOSITORY)
    plain_times, managed_times, disk_times, peaks = [], [], [], []
    for _ in range(_TURNS):
        done = subprocess.run(
            _command("plain", rounds), capture_output=True, text=True, check=True, cwd=_REPOSITORY
        )
        free = _result(done.stdout)
        managed = run_limited(_command("managed", rounds), _LIMIT_BYTES, 900, _REPOSITORY)
        if managed.returncode != 0:
            raise RuntimeError(f"the managed step failed in its limit: {managed.stderr[-2000:]}")
        step = _result(managed.stdout)
        moved = max(step["written"], step["read"], 1)
        copy = PlainCopy(disk.directory, moved, _BUDGET_BYTES)
        plain_times.append(statistics.median(free["seconds"]))
        managed_times.append(statistics.median(step["seconds"]))
        disk_times.append(moved / copy.run().round_trip_bytes_per_second)
        peaks.append(managed.peak_bytes)
        copy.close()
    ratios = [
        took / max(1.25 * plain, 1.15 * copied)
        for took, plain, copied in zip(managed_times, plain_times, disk_times, strict=True)
    ]
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
            max(peaks) / 1e6,
            "MB",
            _PEAK_MB,
            note=f"memory cgroup; interpreter, JAX and compiler included; loss {step['loss']:.6g} "
            f"(plain {free['loss']:.6g})",
        ),
        Claim(
            "managed within the limit: step",
            f"{statistics.median(plain_times):.2f} s without limit",
            statistics.median(ratios),
            "x of what is allowed",
            1.0,
            note=f"{statistics.median(managed_times):.2f} s; allowed the larger of 1.25 x plain "
            f"and 1.15 x {statistics.median(disk_times):.2f} s for {moved / 1e6:.0f} MB out and "
            f"back by O_DIRECT; {min(ratios):.2f} to {max(ratios):.2f} over {_TURNS} turns of "
            f"{rounds} steps; stalled {step['stall_seconds']:.2f} s",
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
    title = f"{_LAYERS} layers, batch {_BATCH}, in {_LIMIT_BYTES // 10**6} MB"
    reason = unavailable()
    claims = [skipped(title, reason)] if reason else measure(2 if options.quick else 5)
    return report(title, claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
