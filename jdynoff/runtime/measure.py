"""Measures the rates of this machine for the cost model: `python -m jdynoff doctor --measure`.

Each rate is the median of a few rounds of a small program of the kind that it stands for. The trap:
a product that is too small measures how long JAX takes to call it; these take milliseconds.
"""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdynoff._native import PAGE_BYTES, Manager
from jdynoff.planning.machine import Machine, write_machine
from jdynoff.primitives.transfer import register_handlers
from jdynoff.runtime.bandwidth import PlainCopy, moving_step, vector_of
from jdynoff.runtime.tiers import check_disk, default_tiers

_ROUNDS = 5
_WIDTH = 1024
_STREAM_BYTES = 256 << 20
# What comes back has left the processor's caches long ago, so what is copied must not fit them.
_ENTRY_BYTES = 32 << 20
_ENTRIES = 6
_SMALL_BYTES = 4096
_CALLS = 256


def _median_seconds(run: Callable[[], Any], rounds: int = _ROUNDS) -> float:
    jax.block_until_ready(run())  # compiles
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - started)
    return float(np.median(times))


def _flops_rate() -> float:
    x = jnp.ones((_WIDTH, _WIDTH), jnp.float32)

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 4, lambda _, y: (y @ x) * (1 / _WIDTH), x)

    return 4 * 2 * _WIDTH**3 / _median_seconds(lambda: products(x))


def _memory_rate() -> float:
    x = jnp.ones(_STREAM_BYTES // 4, jnp.float32)
    add = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        x = jax.block_until_ready(add(x))
        times.append(time.perf_counter() - started)
    return 2 * _STREAM_BYTES / float(np.median(times[1:]))


def _fresh_rate() -> float:
    """Bytes a second of memory that the kernel has to clear first, without filling them."""
    fill = jax.jit(lambda: jnp.ones(_STREAM_BYTES // 4, jnp.float32))
    fresh = _median_seconds(fill)
    x = jnp.ones(_STREAM_BYTES // 4, jnp.float32)
    # Kept although unused, or its memory could not be donated and the result would be fresh too.
    again = jax.jit(lambda x: jnp.full_like(x, 2.0), donate_argnums=0, keep_unused=True)
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        x = jax.block_until_ready(again(x))
        times.append(time.perf_counter() - started)
    # Clearing is a part of filling, a tenth at least where the kernel has huge pages.
    return _STREAM_BYTES / max(fresh - float(np.median(times[1:])), 0.1 * fresh)


def _pool_rates() -> tuple[float, float]:
    """(bytes a second into or out of the pool, seconds of one call)."""
    register_handlers("cpu")
    manager = Manager(None)

    def seconds(entry_bytes: int, entries: int) -> float:
        step, x = moving_step(entries), vector_of(entry_bytes)
        total = entries * max(entry_bytes, PAGE_BYTES)

        def run() -> Any:
            ticket = manager.open(total, 0, expected_bytes=total)
            try:
                return jax.block_until_ready(step(np.uint32(ticket), x))
            finally:
                manager.close(ticket)

        return _median_seconds(run)

    call = seconds(_SMALL_BYTES, _CALLS) / (2 * _CALLS)
    taken = seconds(_ENTRY_BYTES, _ENTRIES) - 2 * _ENTRIES * call
    manager.shutdown()
    return 2 * _ENTRIES * _ENTRY_BYTES / max(taken, 1e-9), call


def measure(size: int) -> Machine:
    """Measures this machine's CPU and the disk that steps spill to.

    Args:
      size: bytes to write and read on the disk.

    Raises:
      SpillSpaceError: if there is no disk, or no room on it.
    """
    (disk,) = default_tiers()
    check_disk(disk)
    copy = PlainCopy(str(disk.directory), size)
    try:
        rates = [copy.run() for _ in range(_ROUNDS)][1:]
    finally:
        copy.close()
    copy_rate, call = _pool_rates()
    return Machine(
        name=f"{platform.processor() or platform.machine()} CPU",
        flops_per_second=_flops_rate(),
        memory_bytes_per_second=_memory_rate(),
        fresh_bytes_per_second=_fresh_rate(),
        copy_bytes_per_second=copy_rate,
        out_bytes_per_second=float(np.median([r.write_bytes_per_second for r in rates])),
        back_bytes_per_second=float(np.median([r.read_bytes_per_second for r in rates])),
        call_seconds=call,
        origin=f"measured on {datetime.date.today().isoformat()}",
    )


def measure_and_keep(size: int) -> Machine:
    """Measures, and writes the figures to where plans look for them."""
    machine = measure(size)
    write_machine(machine)
    return machine
