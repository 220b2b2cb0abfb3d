"""Does the manager use the disk as well as a plain O_DIRECT copy does?

A compiled step offloads more than its pool holds and reads all of it back, last in first out, with
nothing to compute in between: what it takes is the manager's time. The plain copy writes and reads
the same number of bytes in the same directory, in blocks of one chunk, with as many threads as
the manager has. Both run in turn, round by round. Only the bytes that really reached the disk
count for the manager: what stayed in its pool would flatter it.

    python -m benchmarks.spill_bandwidth [--quick] [--json FILE]
"""

from __future__ import annotations

import concurrent.futures
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.harness import Claim, parse, report
from jdynoff.primitives.transfer import register_handlers
from jdynoff.runtime.manager import manager_for
from jdynoff.runtime.tiers import default_tiers

MIB = 1 << 20
CHUNK_BYTES = MIB
THREADS = 2
POOL_BYTES = 32 * MIB
MUST_REACH = 0.85

SERIAL = jax.ShapeDtypeStruct((), jnp.uint32)


def _call(name: str, results: Any, *operands: Any, **attributes: Any) -> Any:
    return jax.ffi.ffi_call(name, results, has_side_effect=True)(*operands, **attributes)


def moving_step(entries: int) -> Callable[..., Any]:
    """Builds a step that moves `entries` arrays out and back, and computes nothing.

    Args:
      entries: how many.

    Returns:
      A jitted function of a ticket and of the array to move.
    """

    @jax.jit
    def step(ticket: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def out(serial: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            token = _call(
                "jdynoff_offload", SERIAL, x, serial, site=np.int64(1), readers=np.int32(1)
            )
            return token, token

        def back(serial: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            result = jax.ShapeDtypeStruct(x.shape, x.dtype)
            value, serial = _call(
                "jdynoff_reload", (result, SERIAL), token, serial, site=np.int64(1)
            )
            return serial, value[0]

        serial, tokens = jax.lax.scan(
            out, _call("jdynoff_begin", SERIAL, ticket), None, length=entries
        )
        serial, firsts = jax.lax.scan(back, serial, tokens, reverse=True)
        return firsts, _call("jdynoff_end", SERIAL, serial)

    return step


def plain_copy(directory: str, size: int) -> Callable[[], float]:
    """Builds a plain copy of `size` bytes to a file and back.

    Args:
      directory: where the file is made, without a name.
      size: bytes, a multiple of the chunk.

    Returns:
      A function that runs it once and returns the seconds.
    """
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, size)
    buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(THREADS)]
    for buffer in buffers:
        buffer.write(os.urandom(CHUNK_BYTES))

    def transfer(thread: int, write: bool) -> None:
        move = os.pwritev if write else os.preadv
        for offset in range(thread * CHUNK_BYTES, size, THREADS * CHUNK_BYTES):
            moved = move(fd, [buffers[thread]], offset)
            if moved != CHUNK_BYTES:
                raise OSError(f"the plain copy moved {moved} of {CHUNK_BYTES} bytes at {offset}")

    def run() -> float:
        started = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            for write in (True, False):
                list(pool.map(transfer, range(THREADS), [write] * THREADS))
        return time.perf_counter() - started

    return run


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
      The exit status: 1 if the manager falls short.
    """
    options = parse(__doc__, argv)
    register_handlers()
    (disk,) = default_tiers()
    manager = manager_for([disk])
    rounds = 7 if options.quick else 15
    claims = []
    for entry_bytes, entries in ((8 * MIB, 48), (MIB, 256), (MIB // 8, 1024)):
        total = entry_bytes * entries
        x = jax.random.normal(jax.random.key(0), (entry_bytes // 4,))
        step = moving_step(entries)
        copy = plain_copy(disk.directory, total)
        ratios, plain_rates, managed_rates = [], [], []
        for number in range(rounds + 1):
            plain_seconds = copy()
            started = time.perf_counter()
            ticket = manager.open(POOL_BYTES, total, expected_bytes=total)
            jax.block_until_ready(step(np.uint32(ticket), x))
            managed_seconds = time.perf_counter() - started
            moved = manager.stats(ticket)
            manager.close(ticket)
            if number == 0:
                continue  # compilation, and the first allocation of file and pool
            plain_rates.append(2 * total / plain_seconds)
            managed_rates.append((moved["bytes_written"] + moved["bytes_read"]) / managed_seconds)
            ratios.append(managed_rates[-1] / plain_rates[-1])
        claims.append(
            Claim(
                name=f"{entries} entries of {entry_bytes // 1024} KiB",
                plain=f"{statistics.median(plain_rates) / 1e6:.0f} MB/s",
                measured=statistics.median(ratios),
                unit="x",
                bound=MUST_REACH if entry_bytes >= MIB else None,
                at_least=True,
                note=f"manager {statistics.median(managed_rates) / 1e6:.0f} MB/s out and back; "
                f"ratio {min(ratios):.2f} to {max(ratios):.2f} over {rounds} rounds; "
                f"direct I/O: {manager.direct_io}",
            )
        )
    return report("Spill bandwidth against a plain O_DIRECT copy", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
