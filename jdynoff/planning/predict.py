"""What a set of decisions costs in time, by the machine's rates.

The model: an operation takes the longer of its arithmetic and its memory traffic; what is computed
again is added; copies into and out of the pool are added where they take the processor's time; and
the link to the far tier works beside the computation, so that only what it takes beyond the forward
pass (out) and beyond the backward pass (back) is added.

The trap: XLA fuses elementwise operations, whose traffic counted one by one is several times the
real one. They count with their results only, and half of that.
"""

from __future__ import annotations

import dataclasses

from jdynoff.planning.cost import flops
from jdynoff.planning.decisions import Decisions
from jdynoff.planning.live_ranges import executions
from jdynoff.planning.machine import Machine
from jdynoff.program.graph import Operation, Program, Region, Value
from jdynoff.program.structure import cone

_FUSED_SHARE = 0.5
# Below this malloc keeps a freed block for the next step; above it the memory is the kernel's
# again, and comes back cleared (glibc's largest threshold for `mmap`).
_LARGEST_KEPT_BLOCK = 32 << 20
# Of a step's operations: one pass forwards costs half of one backwards.
_FORWARD_SHARE = 1 / 3
_UNFUSED = frozenset(
    [
        "concatenate",
        "conv_general_dilated",
        "cumsum",
        "dot_general",
        "dynamic_update_slice",
        "gather",
        "scatter",
        "scatter-add",
        "scatter_add",
        "sort",
    ]
)


@dataclasses.dataclass(frozen=True)
class Load:
    """What a plan asks of the machine beside the computation, in one step.

    Attributes:
      offloaded_bytes: handed to the manager.
      reloaded_bytes: taken back.
      calls: offloads and reloads.
      held_bytes: the most that is in the manager's hands at once.
      pool_bytes: what need not leave the pool.
      temporary_bytes: of XLA.
    """

    offloaded_bytes: int = 0
    reloaded_bytes: int = 0
    calls: int = 0
    held_bytes: int = 0
    pool_bytes: int = 0
    temporary_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted seconds of one step and their parts.

    Attributes:
      compute_seconds: with everything kept, in memory that costs nothing.
      extra_seconds: what computing again takes.
      memory_seconds: getting XLA's temporaries, which are one block.
      copy_seconds: of the processor, for copies into and out of the pool, and for the calls.
      stall_seconds: waiting for the far tier.
      flops: with everything kept; 0 where nobody asked.
      extra_flops: computed again; 0 where nobody asked.
    """

    compute_seconds: float
    extra_seconds: float
    memory_seconds: float
    copy_seconds: float
    stall_seconds: float
    flops: float = 0.0
    extra_flops: float = 0.0

    @property
    def step_seconds(self) -> float:
        """The sum of the parts."""
        return (
            self.compute_seconds
            + self.extra_seconds
            + self.memory_seconds
            + self.copy_seconds
            + self.stall_seconds
        )


class Model:
    """The cost of one program on one machine; what does not depend on decisions is kept."""

    def __init__(self, program: Program, machine: Machine) -> None:
        self.machine = machine
        self.compute_seconds, self.flops = self._region(program.top)

    def predict(self, decisions: Decisions, load: Load) -> Prediction:
        """Predicts the time of a step that carries out `decisions` on its longest path."""
        extra = extra_flops = 0.0
        for operation, region in replayed(decisions):
            runs = executions(region)
            extra += runs * self.seconds(operation)
            extra_flops += runs * flops(operation)
        found = predicted(self.machine, self.compute_seconds, extra, load)
        return dataclasses.replace(found, flops=self.flops, extra_flops=extra_flops)

    def weight(self, region: Region | None) -> float:
        """Seconds of one execution of a region with everything kept, its longest path."""
        return 0.0 if region is None else self._region(region)[0]

    def seconds(self, operation: Operation) -> float:
        """Time of one execution of an operation without bodies."""
        traffic = float(sum(result.nbytes for result in operation.results))
        if operation.name in _UNFUSED:
            traffic += sum(
                operand.nbytes for operand in operation.operands if isinstance(operand, Value)
            )
        else:
            traffic *= _FUSED_SHARE
        return max(
            flops(operation) / self.machine.flops_per_second,
            traffic / self.machine.memory_bytes_per_second,
        )

    def _region(self, region: Region) -> tuple[float, float]:
        """(seconds, FLOPs) of one execution of a region with everything kept."""
        seconds = work = 0.0
        for operation in region.operations:
            if not operation.bodies:
                seconds += self.seconds(operation)
                work += flops(operation)
                continue
            costs = [self._region(body) for body in operation.bodies]
            runs = operation.spec.length if operation.kind == "scan" else 1
            seconds += runs * max(cost[0] for cost in costs)
            work += runs * max(cost[1] for cost in costs)
        return seconds, work


def predicted(machine: Machine, compute: float, extra: float, load: Load) -> Prediction:
    """Puts the parts of a step's time together.

    Args:
      machine: its rates.
      compute: seconds of the step with everything kept.
      extra: seconds of what is computed again.
      load: what is moved.
    """
    far_share = max(load.held_bytes - load.pool_bytes, 0) / max(load.held_bytes, 1)
    out = far_share * load.offloaded_bytes / machine.out_bytes_per_second
    back = far_share * load.reloaded_bytes / machine.back_bytes_per_second
    forward = _FORWARD_SHARE * compute
    backward = compute - forward + extra
    moved = load.offloaded_bytes + load.reloaded_bytes
    fresh = load.temporary_bytes if load.temporary_bytes >= _LARGEST_KEPT_BLOCK else 0
    return Prediction(
        compute_seconds=compute,
        extra_seconds=extra,
        memory_seconds=fresh / machine.fresh_bytes_per_second,
        copy_seconds=moved / machine.copy_bytes_per_second + load.calls * machine.call_seconds,
        stall_seconds=max(out - forward, 0.0) + max(back - backward, 0.0),
    )


def replayed(decisions: Decisions) -> list[tuple[Operation, Region]]:
    """Every operation that is computed again, with the region that does it."""
    asked = decisions.asked()
    found: list[tuple[Operation, Region]] = []
    for consumer, replay in decisions.replays.items():
        targets = [value for value in replay.rebuilds.values() if isinstance(value, Value)]
        targets.extend(value for _, value in asked.get(consumer, ()))
        again = cone(targets, replay.origins.__contains__)
        found.extend((operation, consumer) for operation in again)
    for spill in decisions.spills:
        if spill.site is None and not spill.fused:
            again = cone([spill.value], spill.anchors.__contains__)
            found.extend((operation, spill.value.region) for operation in again)
    return found
