"""What calling a managed step costs beyond calling the same `jax.jit` function.

Thousands of calls of a tiny step, plain and managed in turn, call by call; the median difference
is quoted. Two steps: one that has nothing to move, and, without a bound because the transfers
themselves are in it, one that is made to move its residuals although they are tiny. What the host
does for a step that moves something is also timed by itself, without any program.

    python -m benchmarks.call_overhead [--quick] [--json FILE]
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import jdynoff
from benchmarks.harness import Claim, parse, report
from jdynoff.flights import Flight, ledger
from jdynoff.runtime.manager import manager_for

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


def host_seconds(plan: jdynoff.Plan, calls: int) -> list[float]:
    """Seconds of what `jdynoff.managed` does around the program of a step that moves something.

    That is: finding the runs that are over, closing the last one's ticket and keeping its
    statistics, opening a ticket (pool and capacity), and noting the sentinel.
    """
    book, manager, sentinel = ledger(jax.devices()[0]), manager_for(()), jnp.uint32(0)
    open_ticket = functools.partial(
        manager.open, plan.pool_bytes, 0, expected_bytes=plan.held_bytes
    )
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        flight = Flight(book, plan.device_peak_bytes, manager)
        book.depart(flight, plan.device_peak_bytes, open_ticket)
        book.dispatched(flight, sentinel)
        seconds.append(time.perf_counter() - started)
    book.wait()
    return seconds


def _quartiles(seconds: list[float]) -> str:
    low, high = statistics.quantiles(seconds, n=4)[::2]
    return f"quartiles {low * 1e6:.1f} to {high * 1e6:.1f} us"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv)
    calls = 2_000 if options.quick else 10_000
    w, x = jnp.ones((3, 8, 8)) * 0.1, jnp.ones((4, 8))
    claims = []
    for name, arguments, bound in (
        ("nothing to move", {}, _BOUND_MICROSECONDS),
        ("made to move arrays, transfers included", {"budget": "min", "min_bytes": 1}, None),
    ):
        plain = jax.jit(jax.grad(_loss))
        managed = jdynoff.managed(plain, **arguments)
        jax.block_until_ready((plain(w, x), managed(w, x)))
        moved = managed.stats()
        contained = (
            "; contains the host's part below and a longer program: "
            f"{moved.entries_offloaded} offloads, {moved.entries_reloaded} reloads, and the begin "
            "and end of the run, each a custom call"
        )
        median, difference, all_of_them = overhead(plain, managed, (w, x), calls)
        claims.append(
            Claim(
                f"overhead of a call, {name}",
                f"{median * 1e6:.1f} us a call",
                difference * 1e6,
                "us",
                bound,
                note=f"median of {calls} interleaved pairs; {_quartiles(all_of_them)}"
                + (contained if moved.entries_offloaded else ""),
            )
        )
    seconds = host_seconds(managed.plan(w, x), calls)
    claims.append(
        Claim(
            "of this, the host's part",
            "",
            statistics.median(seconds) * 1e6,
            "us",
            _BOUND_MICROSECONDS,
            note=f"ticket, capacity and statistics, without a program; {_quartiles(seconds)}",
        )
    )
    return report("call overhead", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
