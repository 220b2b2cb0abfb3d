"""All figures that the README quotes, in one table.

Each benchmark runs in a process of its own, so that none inherits another's memory or caches. What
cannot run here is a row that says why.

    python -m benchmarks.table [--quick] [--json FILE]
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks.harness import Claim, parse, report, skipped

_DESCRIBED = "h200"
# Arguments of `python -m benchmarks.`; with a described GPU it takes JAX's CUDA plugin.
_COMMANDS = (
    ("memory",),
    ("memory", "--target", _DESCRIBED),
    ("alphafold_trunk",),
    ("memory_limit",),
    ("call_overhead",),
    ("spill_bandwidth",),
)
_CUDA_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def has_cuda_plugin() -> bool:
    """Whether JAX can compile for a described GPU here, which need not be there."""
    # Looking for a module inside a package that is missing is an error.
    return importlib.util.find_spec("jax_plugins") is not None and any(
        importlib.util.find_spec(name) is not None for name in _CUDA_PLUGINS
    )


def claims_of(command: Sequence[str], quick: bool, directory: pathlib.Path) -> list[Claim]:
    """Runs one benchmark and reads its claims.

    Raises:
        RuntimeError: If it ended without writing any.
    """
    name = " ".join(command)
    described = "--target" in command
    if described and not has_cuda_plugin():
        return [skipped(name, f"none of {', '.join(_CUDA_PLUGINS)} is here; see jdynoff.targets")]
    file = directory / f"{'-'.join(command)}.json"
    module, *arguments = command
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json", str(file)]
        + (["--quick"] if quick else []),
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    if not file.exists():
        raise RuntimeError(f"benchmarks.{name} failed: {done.stderr[-2000:]}")
    found = []
    for claim in json.loads(file.read_text())["claims"]:
        del claim["holds"]
        if described:
            claim["name"] += f", compiled for {_DESCRIBED}"
        found.append(Claim(**claim))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmarks."""
    options = parse(__doc__, argv)
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory() as directory:
        for command in _COMMANDS:
            claims.extend(claims_of(command, options.quick, pathlib.Path(directory)))
    return report("jdynoff against plain JAX", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
