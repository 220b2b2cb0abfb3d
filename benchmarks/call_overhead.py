"""What calling a managed step costs beyond calling the same `jax.jit` function.

Thousands of calls of a tiny step, plain and managed in turn, call by call; the median difference
is quoted. Two steps: one that has nothing to move, and, without a bound because the transfers
themselves are in it, one that is made to move three arrays although they are tiny.

    python -m benchmarks.call_overhead [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jdynoff
from benchmarks.harness import Claim, parse, report

_BOUND_MICROSECONDS = 30.0


def _loss(w: jax.Array, x: jax.Array) -> jax.Array:
    carried, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
    return jnp.sum(carried)


def overhead(plain: Callable[..., Any], managed: Callable[..., Any], args: Any, calls: int) -> Any:
    """Median seconds of both, and of their difference call by call."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(calls):
        for step, taken in zip((plain, managed), seconds, strict=True):
            started = time.perf_counter()
            outputs = step(*args)
            taken.append(time.perf_counter() - started)
            jax.block_until_ready(outputs)
    differences = [b - a for a, b in zip(*seconds, strict=True)]
    return statistics.median(seconds[0]), statistics.median(differences), differences


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv)
    calls = 2_000 if options.quick else 10_000
    w, x = jnp.ones((3, 8, 8)) * 0.1, jnp.ones((4, 8))
    claims = []
    for name, arguments, bound in (
        ("nothing to move", {}, _BOUND_MICROSECONDS),
        ("made to move 3 arrays, transfers included", {"budget": "min", "min_bytes": 1}, None),
    ):
        plain = jax.jit(jax.grad(_loss))
        managed = jdynoff.managed(plain, **arguments)
        jax.block_until_ready((plain(w, x), managed(w, x)))
        median, difference, all_of_them = overhead(plain, managed, (w, x), calls)
        low, high = statistics.quantiles(all_of_them, n=4)[::2]
        claims.append(
            Claim(
                f"overhead of a call, {name}",
                f"{median * 1e6:.1f} us a call",
                difference * 1e6,
                "us",
                bound,
                note=f"median of {calls} interleaved pairs; quartiles {low * 1e6:.1f} to "
                f"{high * 1e6:.1f} us",
            )
        )
    return report("call overhead", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
