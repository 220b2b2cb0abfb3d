"""Does the manager use the disk as well as a plain O_DIRECT copy does?

A compiled step offloads more than its pool holds and reads all of it back, last in first out, with
nothing to compute in between: what it takes is the manager's time. The plain copy writes and reads
the same number of bytes in the same directory, in blocks of one entry, 1 MiB at most, with as many
threads as the manager makes transfers and as much memory as its pool. Both run in turn, round by
round. Only the bytes that really reached the disk count for the manager: what stayed in its pool
would flatter it.

The trap: on a virtual disk a file's speed depends on where it lies, by a factor of four. The plain
copy therefore runs on the manager's own file, between steps, when nothing in it is needed.

    python -m benchmarks.spill_bandwidth [--quick] [--json FILE]
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence

from benchmarks.harness import Claim, parse, report
from jdynoff._native import Manager
from jdynoff.primitives.transfer import register_handlers
from jdynoff.runtime.bandwidth import (
    CHUNK_BYTES,
    PlainCopy,
    managed_rate,
    moving_step,
    vector_of,
)
from jdynoff.runtime.tiers import default_tiers

MIB = 1 << 20
POOL_BYTES = 32 * MIB
MUST_REACH = 0.85
# Bytes of an entry, and how many of them are moved.
SIZES = ((8 * MIB, 48), (MIB, 256), (MIB // 8, 1024))


def open_files() -> dict[str, str]:
    """This process's descriptors, as paths, and what they are open on."""
    paths = (f"/proc/self/fd/{entry}" for entry in os.listdir("/proc/self/fd"))
    return {path: os.readlink(path) for path in paths if os.path.islink(path)}


def make_manager(directory: str) -> tuple[Manager, str]:
    """Makes a manager.

    Args:
      directory: its spill directory.

    Returns:
      The manager, and a path to its file, which has no name.
    """
    before = open_files().values()
    manager = Manager(directory)
    for path, target in open_files().items():
        if target not in before and target.startswith(os.path.realpath(directory)):
            return manager, path
    raise RuntimeError(f"cannot find the manager's file in {directory} among the open files")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
      The exit status: 1 if the manager falls short.
    """
    options = parse(__doc__, argv)
    register_handlers()
    (disk,) = default_tiers()
    rounds = 9 if options.quick else 25
    claims = []
    for entry_bytes, entries in SIZES:
        total = entry_bytes * entries
        x = vector_of(entry_bytes)
        step = moving_step(entries)
        plain_rates, managed_rates, ratios = [], [], []
        manager, file = make_manager(disk.directory)
        managed_rate(manager, step, x, total, POOL_BYTES)  # compiles, makes the file and the pool
        copy = PlainCopy(file, total, POOL_BYTES, min(entry_bytes, CHUNK_BYTES))
        for _ in range(rounds):
            plain_rates.append(copy.run().round_trip_bytes_per_second)
            managed_rates.append(managed_rate(manager, step, x, total, POOL_BYTES))
            ratios.append(managed_rates[-1] / plain_rates[-1])
        copy.close()
        claims.append(
            Claim(
                name=f"{entries} entries of {entry_bytes // 1024} KiB",
                plain=f"{statistics.median(plain_rates) / 1e6:.0f} MB/s",
                measured=statistics.median(ratios),
                unit="x",
                bound=MUST_REACH,
                at_least=True,
                note=f"manager {statistics.median(managed_rates) / 1e6:.0f} MB/s out and back; "
                f"ratio {min(ratios):.2f} to {max(ratios):.2f} over {rounds} rounds; "
                f"direct I/O: {manager.direct_io}",
            )
        )
    return report("Spill bandwidth against a plain O_DIRECT copy", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
