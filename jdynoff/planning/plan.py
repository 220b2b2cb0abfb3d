"""The plan of one step: what leaves the device, and what that costs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from jdynoff.planning.live_ranges import LiveTensor
from jdynoff.planning.profile import Profile


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """What XLA says a compiled program needs, in bytes.

    Its own `peak_memory_in_bytes` is not used: on the CPU it is wrong (71 MB for a program with
    573 MB of temporaries); the sum below is what a process really uses.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int  # outputs that reuse donated arguments
    temporary_bytes: int

    @classmethod
    def of(cls, analysis: Any) -> MemoryUse:
        """Reads what a compiled program's `memory_analysis()` returns."""
        return cls(
            argument_bytes=int(analysis.argument_size_in_bytes),
            output_bytes=int(analysis.output_size_in_bytes),
            alias_bytes=int(analysis.alias_size_in_bytes),
            temporary_bytes=int(analysis.temp_size_in_bytes),
        )

    @property
    def total_bytes(self) -> int:
        """What the program occupies at its peak."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What emitting and compiling one candidate took and gave.

    Attributes:
      memory: XLA's figures.
      emit_seconds: to evaluate the rewritten step into a new jaxpr.
      compile_seconds: in XLA.
    """

    memory: MemoryUse
    emit_seconds: float
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class PlannedSite:
    """One residual and what happens to it.

    Attributes:
      source: file:line of the user's code that made it.
      shape: of one entry.
      dtype: of one entry.
      entry_bytes: of one entry.
      entries: how many the step holds at once at most; 0 if only a run tells.
      bytes: `entry_bytes * entries`.
      action: "offload", "recompute" or "keep".
      tier: where its bytes go: "pool", "pool, then disk" or "xla".
      reason: why.
    """

    source: str
    shape: tuple[int, ...]
    dtype: str
    entry_bytes: int
    entries: int
    bytes: int
    action: str
    tier: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Predicted times of one step, in seconds. They rank plans; nothing depends on them.

    Attributes:
      machine: what the rates are of.
      origin: whether they are assumed, described or measured.
      flops_per_byte: the price at which values are computed again rather than moved; below 0 none
        are.
      step_seconds: of the planned step.
      stall_seconds: of these, waiting for the far tier.
      plain_seconds: of plain JAX, did it fit.
      recompute_seconds: with everything computed again that can be.
      flops: of the plain step.
      extra_flops: computed again.
    """

    machine: str
    origin: str
    flops_per_byte: float
    step_seconds: float
    stall_seconds: float
    plain_seconds: float
    recompute_seconds: float
    flops: float
    extra_flops: float


@dataclasses.dataclass(frozen=True)
class PlannedBlock:
    """One body of control flow whose count the program does not fix.

    Attributes:
      name: as in `StepStats.path`.
      source: file:line.
      most: how often it can run in one step; None if nothing bounds it.
      known: how its count is known before the step runs: "sliced", computed exactly at the step's
        start; "learned", predicted by the pilot; "follows", the same as another block's; "counted",
        not at all, only afterwards.
      cost: of a slice, as a share of the step's predicted time; else 0.
    """

    name: str
    source: str
    most: int | None
    known: str
    cost: float = 0.0


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a managed step will do; made without running it.

    Attributes:
      budget_bytes: the budget that it keeps; None for the least that is possible.
      device_peak_bytes: XLA's arguments + outputs - aliases + temporaries, plus the pool.
      min_feasible_bytes: the smallest budget with which the step can run.
      plain_peak_bytes: the same sum for plain JAX where it was compiled, else its simulation.
      plain_is_simulated: whether `plain_peak_bytes` is a simulation.
      memory: XLA's figures for the managed program.
      simulated_bytes: what the simulation says of its temporaries.
      pool_bytes: the manager's arena, staging included.
      held_bytes: what the manager holds at once on the worst path.
      spill_bytes: disk space that the step reserves.
      offloaded_bytes: handed to the manager in one step, at most.
      reloaded_bytes: taken back in one step, at most.
      disk_written_bytes: of these, written to disk at most; disks wear.
      forecast: predicted times.
      sites: every residual that was considered, largest first.
      blocks: bodies of control flow that run as often as the data says.
      variants: programs compiled for this step: this one, and others for some of its paths.
      note: why the step runs unchanged, if it does.
      warnings: constructs that make managing pointless, with their source lines.
      profile: simulated memory over the program, as planned.
      plain_profile: the same of plain JAX.
      largest: the largest arrays alive at plain JAX's simulated peak.
      compiles: how often XLA compiled the step to find the plan.
      rewrite_seconds: to index the traced step, choose, and emit the chosen program.
      compile_seconds: in XLA, for the chosen program.
    """

    budget_bytes: int | None
    device_peak_bytes: int
    min_feasible_bytes: int
    plain_peak_bytes: int
    plain_is_simulated: bool
    memory: MemoryUse
    simulated_bytes: int
    pool_bytes: int
    held_bytes: int
    spill_bytes: int
    offloaded_bytes: int
    reloaded_bytes: int
    disk_written_bytes: int
    forecast: Forecast
    sites: tuple[PlannedSite, ...]
    note: str
    warnings: tuple[str, ...]
    profile: Profile
    plain_profile: Profile
    largest: tuple[LiveTensor, ...]
    compiles: int
    rewrite_seconds: float
    compile_seconds: float
    blocks: tuple[PlannedBlock, ...] = ()
    variants: int = 1

    @property
    def traffic_bytes(self) -> int:
        """Bytes that cross the boundary between XLA and the manager in one step, both ways."""
        return self.offloaded_bytes + self.reloaded_bytes

    def plot(self, path: str | Path) -> Path:
        """Draws memory over the program, plain and planned, with the largest arrays, into a file.

        Raises:
          ConfigurationError: if matplotlib is not installed.
        """
        from jdynoff.report.figures import memory_figure

        return memory_figure(self, path)

    def to_json(self) -> str:
        """The plan as a JSON object with the attributes above and `traffic_bytes`."""
        content: dict[str, Any] = dataclasses.asdict(self)
        content["traffic_bytes"] = self.traffic_bytes
        return json.dumps(content)

    def __rich__(self) -> Any:
        from jdynoff.report.tables import plan_table

        return plan_table(self)

    def __str__(self) -> str:
        from jdynoff.report.tables import as_text

        return as_text(self.__rich__())
