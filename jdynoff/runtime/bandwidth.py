"""How fast the spill directory is: by itself, and through the manager and XLA.

For `python -m jdynoff doctor` and the benchmarks. The trap: one measurement of a shared disk says
little. Compare figures of the same run only, taken in turn.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdynoff import jax_compat
from jdynoff._native import Manager
from jdynoff.primitives import transfer

CHUNK_BYTES = 1 << 20
"""Size of one transfer, the same as the manager's at most."""

THREADS = 4
"""Transfers at once, as many as the manager makes."""


@dataclasses.dataclass(frozen=True)
class Rates:
    """Measured bandwidths.

    Attributes:
        write_bytes_per_second: Out.
        read_bytes_per_second: Back.
        direct: Whether the page cache was bypassed.
    """

    write_bytes_per_second: float
    read_bytes_per_second: float
    direct: bool

    @property
    def round_trip_bytes_per_second(self) -> float:
        """Bytes out plus bytes back, over the time that both take."""
        return 2 / (1 / self.write_bytes_per_second + 1 / self.read_bytes_per_second)


def _open(path: str) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_TMPFILE if os.path.isdir(path) else 0)
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        return os.open(path, flags, 0o600), False


class PlainCopy:
    """Writes and reads a file in blocks, with nothing around it.

    The trap: a copy that uses the same few blocks of memory again and again finds them in the
    processor's cache, which no tensor of a training step ever is. On a virtual disk, where a
    transfer is a copy in memory, that alone is worth a fifth.
    """

    def __init__(
        self, path: str, size: int, memory: int = 0, block_bytes: int = CHUNK_BYTES
    ) -> None:
        """Allocates the file.

        Args:
            path: A directory, in which a file without a name is made; or a file, whose content
                is lost.
            size: Bytes; rounded down to whole blocks.
            memory: Bytes of memory that the blocks are taken from in turn; one for each thread
                at least.
            block_bytes: Size of one transfer, a multiple of the page size.

        Raises:
            OSError: If there is no room, or the path cannot be written to.
        """
        self._block_bytes = block_bytes
        self._size = max(size // block_bytes, 1) * block_bytes
        self._fd, self._direct = _open(path)
        try:
            os.posix_fallocate(self._fd, 0, self._size)
        except OSError:
            os.close(self._fd)
            raise
        per_thread = max(memory // block_bytes // THREADS, 1)
        self._blocks = [
            [mmap.mmap(-1, block_bytes) for _ in range(per_thread)] for _ in range(THREADS)
        ]
        for block in itertools.chain(*self._blocks):
            block.write(os.urandom(block_bytes))

    def close(self) -> None:
        """Closes the file, which frees one without a name."""
        os.close(self._fd)

    def _transfer(self, thread: int, write: bool) -> None:
        move = os.pwritev if write else os.preadv
        size = self._block_bytes
        offsets = range(thread * size, self._size, THREADS * size)
        for offset, block in zip(offsets, itertools.cycle(self._blocks[thread])):
            moved = move(self._fd, [block], offset)
            if moved != size:
                raise OSError(f"moved {moved} of {size} bytes at offset {offset}")

    def run(self) -> Rates:
        """Copies everything out, then back.

        Returns:
            The rates of this one copy.
        """
        rates = []
        with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
            for write in (True, False):
                started = time.perf_counter()
                list(pool.map(self._transfer, range(THREADS), [write] * THREADS))
                rates.append(self._size / (time.perf_counter() - started))
        return Rates(rates[0], rates[1], self._direct)


def moving_step(entries: int) -> Callable[[Any, jax.Array], Any]:
    """Build a step that moves an array out `entries` times and back, and computes nothing.

    Args:
        entries: How many times.

    Returns:
        A jitted function of a ticket (u32[]) and a vector; it returns the first element of every
        copy that came back, and the sentinel.
    """

    @jax.jit
    def step(ticket: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def out(serial: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
            token = transfer.offload(x, serial, site=1, readers=1)
            return token, token

        def back(serial: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            aval = jax_compat.shaped_array(x.shape, x.dtype)
            value, serial = transfer.reload(token, serial, [], site=1, aval=aval)
            return serial, value[0]

        serial, tokens = jax.lax.scan(out, transfer.begin(ticket), None, length=entries)
        serial, firsts = jax.lax.scan(back, serial, tokens, reverse=True)
        return firsts, transfer.end(serial)

    return step


def managed_rate(
    manager: Manager, step: Callable[[Any, jax.Array], Any], x: jax.Array, total: int, pool: int
) -> float:
    """Run a `moving_step` once.

    Args:
        manager: Whose tier is measured.
        step: The step, compiled already unless the compilation is meant to count.
        x: What it moves.
        total: Bytes that it moves out.
        pool: Bytes of pool memory that it gets; what stays there is not counted.

    Returns:
        Bytes per second that reached the disk and came back, over the time of the step.

    Raises:
        RuntimeError: If what came back is not what went out.
    """
    started = time.perf_counter()
    ticket = manager.open(pool, total, expected_bytes=total)
    try:
        firsts, _ = jax.block_until_ready(step(np.uint32(ticket), x))
        seconds = time.perf_counter() - started
        moved = manager.stats(ticket)
    finally:
        manager.close(ticket)
    if not bool((firsts == x[0]).all()):
        raise RuntimeError("the manager returned other values than it was given")
    return (moved["bytes_written"] + moved["bytes_read"]) / seconds


def vector_of(size: int) -> jax.Array:
    """Make a vector of `size` bytes (a multiple of 4) that does not compress."""
    return jax.random.normal(jax.random.key(0), (size // 4,), jnp.float32)
