"""All figures that the README quotes, in one table.

Each benchmark runs in a process of its own, so that none inherits another's memory or caches.

    python -m benchmarks.table [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.harness import Claim, parse, report

_BENCHMARKS = (
    "memory",
    "alphafold_trunk",
    "memory_limit",
    "call_overhead",
    "spill_bandwidth",
)
_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def claims_of(name: str, quick: bool, directory: pathlib.Path) -> list[Claim]:
    """Runs one benchmark and reads its claims.

    Raises:
        RuntimeError: If it ended without writing any.
    """
    file = directory / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file)]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if not file.exists():
        if done.returncode == 0:  # it says why it cannot run here
            print(f"{name}: {done.stdout.strip()}")
            return []
        raise RuntimeError(f"benchmarks.{name} failed: {done.stderr[-2000:]}")
    return [
        Claim(**{key: value for key, value in claim.items() if key != "holds"})
        for claim in json.loads(file.read_text())["claims"]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks."""
    options = parse(__doc__, argv)
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as directory:
        for name in _BENCHMARKS:
            claims.extend(claims_of(name, options.quick, pathlib.Path(directory)))
    return report("jdynoff against plain JAX", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
