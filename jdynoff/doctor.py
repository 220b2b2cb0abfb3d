"""Is this machine ready for managed steps, and if not, what is to be done?

Every check yields a finding: what was looked at, what was found, and advice where something is
wrong. A check that fails does not keep the others from running.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jdynoff import _native
from jdynoff.errors import JdynoffError, SpillSpaceError
from jdynoff.planning.budget import format_bytes
from jdynoff.primitives.transfer import TARGETS, register_handlers
from jdynoff.runtime.bandwidth import PlainCopy, managed_rate, moving_step, vector_of
from jdynoff.runtime.device_memory import host_memory
from jdynoff.runtime.filesystems import filesystem_of
from jdynoff.runtime.tiers import SPILL_DIR_VARIABLE, check_disk, default_tiers

State = Literal["ok", "warning", "broken"]

_PACKAGES = ("jdynoff", "jax", "jaxlib", "flax", "optax", "numpy")
_ENTRY_BYTES = 1 << 20
_POOL_BYTES = 16 << 20
_ROUNDS = 3
# A manager this much slower than the disk itself is starved of processor time.
_SLOW_RATIO = 0.5


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        name: What was looked at.
        value: What was found, for people.
        state: Whether managed steps can work with it.
        advice: What to do; empty if nothing.
    """

    name: str
    value: str
    state: State = "ok"
    advice: str = ""


def _versions() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    for package in _PACKAGES:
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            advice = f"install it: pip install {package}"
            yield Finding(package, "not installed", "broken", advice)


def _backend() -> Iterator[Finding]:
    backend = jax.default_backend()
    value = f"{backend}, {jax.local_device_count()} device(s)"
    if backend == "cpu":
        yield Finding("backend", value)
    else:
        advice = "steps are managed on the CPU only: set JAX_PLATFORMS=cpu"
        yield Finding("backend", value, "warning", advice)


def _memory() -> Iterator[Finding]:
    memory = host_memory()
    yield Finding("memory", f"{format_bytes(memory.available_bytes)} ({memory.source})")


def _handlers() -> Iterator[Finding]:
    missing = sorted(set(TARGETS) - set(_native.handlers()))
    if missing:
        advice = "the module is older than the package: reinstall jdynoff"
        yield Finding("native module", f"lacks {', '.join(missing)}", "broken", advice)
        return
    yield Finding("native module", str(_native.__file__))
    register_handlers("cpu")
    manager = _native.Manager(None)
    ticket = manager.open(1 << 20, 0)
    try:
        x = jax.numpy.arange(1024.0)
        firsts, sentinel = jax.block_until_ready(moving_step(4)(np.uint32(ticket), x))
        exact = bool((firsts == x[0]).all()) and int(sentinel) == ticket
    finally:
        manager.close(ticket)
    if exact:
        yield Finding("handlers", "registered; a step's arrays went out and came back")
    else:
        advice = "do not use this build; reinstall jdynoff for this version of JAX"
        yield Finding("handlers", "a step's arrays came back changed", "broken", advice)


def _disk(size: int) -> Iterator[Finding]:
    (disk,) = default_tiers()
    check_disk(disk)
    filesystem = filesystem_of(disk.directory)
    where = f"{disk.directory} ({filesystem.kind} on {filesystem.mount_point})"
    if filesystem.is_memory:
        advice = (
            f"this is memory, and spilling to it frees none: set {SPILL_DIR_VARIABLE} to a "
            "directory on a disk"
        )
        yield Finding("spill directory", where, "warning", advice)
    else:
        yield Finding("spill directory", where)
    few = filesystem.free_bytes < 4 * size
    advice = f"free some, or set {SPILL_DIR_VARIABLE} to a directory with more" if few else ""
    free = format_bytes(filesystem.free_bytes)
    yield Finding("free space", free, "warning" if few else "ok", advice)

    manager = _native.Manager(disk.directory)
    if manager.direct_io:
        yield Finding("direct I/O", "yes")
    else:
        advice = (
            "the filesystem refuses O_DIRECT, so that spilled bytes pass through the page cache: "
            f"slower, and more memory used for a while; set {SPILL_DIR_VARIABLE} to another disk"
        )
        yield Finding("direct I/O", "no", "warning", advice)

    copy = PlainCopy(disk.directory, size)
    step = moving_step(size // _ENTRY_BYTES)
    x = vector_of(_ENTRY_BYTES)
    plain, managed = [], []
    for _ in range(_ROUNDS + 1):
        plain.append(copy.run())
        managed.append(managed_rate(manager, step, x, size, _POOL_BYTES))
    copy.close()
    # The first round compiles, and allocates file and pool.
    write = float(np.median([rates.write_bytes_per_second for rates in plain[1:]]))
    read = float(np.median([rates.read_bytes_per_second for rates in plain[1:]]))
    both = float(np.median([rates.round_trip_bytes_per_second for rates in plain[1:]]))
    through = float(np.median(managed[1:]))
    yield Finding("disk, plain copy", f"writes {write / 1e6:.0f}, reads {read / 1e6:.0f} MB/s")
    slow = through < _SLOW_RATIO * both
    advice = "the processors are busy: measure again when the machine is idle" if slow else ""
    value = f"{through / 1e6:.0f} MB/s out and back, {through / both:.2f} of the plain copy"
    yield Finding("disk, through a step", value, "warning" if slow else "ok", advice)


def examine(size: int) -> list[Finding]:
    """Run all checks.

    Args:
        size: Bytes to write and read when the disk is measured, a multiple of 1 MiB.

    Returns:
        The findings, in the order of the checks.
    """
    checks: list[tuple[str, Callable[[], Iterator[Finding]], str]] = [
        ("versions", _versions, "reinstall jdynoff and what it depends on"),
        (
            "backend",
            _backend,
            "JAX starts no backend: set JAX_PLATFORMS=cpu, or repair the platform that "
            "JAX_PLATFORMS names",
        ),
        ("memory", _memory, "give every step a budget in bytes: what there is cannot be told"),
        (
            "handlers",
            _handlers,
            "if the backend is broken, mend that first; otherwise reinstall jdynoff for this "
            "version of JAX",
        ),
        (
            "disk",
            lambda: _disk(size),
            "if the backend is broken, mend that first; otherwise set "
            f"{SPILL_DIR_VARIABLE} to a directory on another disk",
        ),
    ]
    findings: list[Finding] = []
    for name, check, advice in checks:
        try:
            findings.extend(check())
        except SpillSpaceError as error:
            findings.append(Finding(name, "not enough room", "broken", str(error)))
        except JdynoffError as error:
            findings.append(Finding(name, type(error).__name__, "broken", str(error)))
        except Exception as error:  # of whatever kind: JAX asserts when it finds no backend
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            findings.append(Finding(name, what, "broken", advice))
    return findings


def as_table(findings: list[Finding]) -> Table:
    """Lay the findings out for people."""
    signs = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "broken": "[red]broken[/]"}
    table = Table(title="jdynoff doctor", title_justify="left")
    table.add_column("")
    table.add_column("found", overflow="fold")
    table.add_column("")
    table.add_column("what to do", overflow="fold")
    for finding in findings:
        table.add_row(finding.name, finding.value, signs[finding.state], finding.advice)
    return table


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """Lay the findings out for programs."""
    return {
        "healthy": healthy(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def healthy(findings: list[Finding]) -> bool:
    """Whether managed steps can work here; warnings do not count."""
    return all(finding.state != "broken" for finding in findings)


def show(findings: list[Finding]) -> None:
    """Print the table."""
    Console().print(as_table(findings))
