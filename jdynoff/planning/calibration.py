"""Rates of a machine, corrected by what real steps showed.

Steps of a few programs say more about a machine than the small programs of `doctor --measure`: its
products have other shapes, its disk is busy while the processor computes. What is corrected:

1. The link to the far tier, in each direction: bytes over the time during which at least one
   transfer was under way. Where no operation of the step waited for it, the link may have been
   capable of more, so that such a figure only raises the rate.
2. Copies into and out of the pool: bytes over the time of the operations that did not wait.
3. Arithmetic, memory traffic and fresh memory, all by one factor: what is left of the step's time
   over what the model predicts for them. A step cannot tell these three apart.

The trap: one slow step (a compile, a busy neighbour) must not move a plan. Every figure is the
median over steps, and what cannot be (no time at all, a few bytes, a hundred times what the machine
is known to do) counts as not observed.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from jdynoff.planning.machine import Machine
from jdynoff.planning.predict import Prediction

Event = tuple[str, int, int, int, int]
"""(operation, site, bytes, start_ns, end_ns), as in `xla_ext/manager.h`."""

# Of one step and direction: less is dominated by the time of single calls.
_LEAST_BYTES = 1 << 20
# What is left of a step's time after copies and waiting is compared only if it is this share.
_LEAST_COMPUTE = 0.2
# Waiting for less than this share of a step is no bottleneck.
_WAITED = 0.01
# Observed and known rates that differ by more are of different things.
_FARTHEST = 100.0


@dataclasses.dataclass(frozen=True)
class Observation:
    """One completed step, beside what was predicted for its path.

    Attributes:
      predicted: by the model, with the rates that are to be corrected.
      step_seconds: from dispatch to the last result.
      offload_stall_seconds: of the manager's record, waiting for room.
      reload_stall_seconds: of the manager's record, waiting for bytes.
      events: the manager's log.
    """

    predicted: Prediction
    step_seconds: float
    offload_stall_seconds: float = 0.0
    reload_stall_seconds: float = 0.0
    events: Sequence[Event] = ()


def corrected(machine: Machine, observations: Sequence[Observation]) -> Machine:
    """The machine's rates as real steps showed them.

    Args:
      machine: whose rates the predictions were made with.
      observations: one for each step.

    Returns:
      The corrected machine, its origin "calibrated from N steps"; the same one if no step showed
      anything.
    """
    slower = [found for one in observations if (found := _slowness(machine, one)) is not None]
    changes = {
        "out_bytes_per_second": _far_rate(machine.out_bytes_per_second, observations, "write"),
        "back_bytes_per_second": _far_rate(machine.back_bytes_per_second, observations, "read"),
        "copy_bytes_per_second": _copy_rate(machine, observations),
    }
    if slower:
        factor = statistics.median(slower)
        for name in ("flops_per_second", "memory_bytes_per_second", "fresh_bytes_per_second"):
            changes[name] = getattr(machine, name) / factor
    known: dict[str, Any] = {name: rate for name, rate in changes.items() if rate is not None}
    if not known:
        return machine
    origin = f"calibrated from {len(observations)} steps"
    return dataclasses.replace(machine, origin=origin, **known)


def _far_rate(known: float, observations: Iterable[Observation], operation: str) -> float | None:
    rates = []
    for one in observations:
        moved = [event for event in one.events if event[0] == operation]
        rate = _rate(sum(event[2] for event in moved), _busy_seconds(moved), known)
        stall = one.offload_stall_seconds if operation == "write" else one.reload_stall_seconds
        if rate is not None and (rate > known or stall > _WAITED * one.step_seconds):
            rates.append(rate)
    return statistics.median(rates) if rates else None


def _copy_rate(machine: Machine, observations: Iterable[Observation]) -> float | None:
    rates = []
    for one in observations:
        copied = _unwaited(one)
        seconds = sum(map(_seconds, copied)) - machine.call_seconds * len(copied)
        rate = _rate(sum(event[2] for event in copied), seconds, machine.copy_bytes_per_second)
        if rate is not None:
            rates.append(rate)
    return statistics.median(rates) if rates else None


def _slowness(machine: Machine, one: Observation) -> float | None:
    """How many times longer than predicted a step computed; None if it does not say."""
    predicted = (
        one.predicted.compute_seconds + one.predicted.extra_seconds + one.predicted.memory_seconds
    )
    copying = sum(map(_seconds, _unwaited(one)))
    left = one.step_seconds - one.offload_stall_seconds - one.reload_stall_seconds - copying
    if not predicted > 0 or not left > _LEAST_COMPUTE * one.step_seconds:
        return None
    return _plausible(left / predicted, 1.0)


def _unwaited(one: Observation) -> list[Event]:
    """The offloads and reloads that were copies and nothing else.

    The log does not mark those that waited, but the manager's record tells for how long all of them
    did: the slowest ones, byte for byte, make up that time.
    """
    moved = [event for event in one.events if event[0] in ("offload", "reload") and event[2] > 0]
    moved.sort(key=lambda event: _seconds(event) / event[2])
    waited = one.offload_stall_seconds + one.reload_stall_seconds
    while moved and waited > 0.5 * _seconds(moved[-1]):
        waited -= _seconds(moved.pop())
    return moved


def _busy_seconds(events: Iterable[Event]) -> float:
    """The time during which at least one of the events was under way."""
    busy, until = 0, 0
    for start, end in sorted((event[3], event[4]) for event in events):
        busy += max(end - max(start, until), 0)
        until = max(until, end)
    return busy * 1e-9


def _seconds(event: Event) -> float:
    return (event[4] - event[3]) * 1e-9


def _rate(nbytes: int, seconds: float, known: float) -> float | None:
    if nbytes < _LEAST_BYTES or not seconds > 0:
        return None
    return _plausible(nbytes / seconds, known)


def _plausible(found: float, known: float) -> float | None:
    """`found`, unless it has nothing to do with what is known; an infinite rate stays as it is."""
    if not math.isfinite(known) or not known / _FARTHEST < found < known * _FARTHEST:
        return None
    return found
