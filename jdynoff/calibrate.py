"""`with step.calibrate():` corrects the cost model's rates by what real steps show.

Explicit, and never in the middle of training: plans that were made stay as they are. Later plans,
of this process or another, go by the corrected rates.
"""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jdynoff.errors import ConfigurationError
from jdynoff.planning.calibration import Observation, corrected
from jdynoff.planning.machine import Machine, read_machine, write_machine

if TYPE_CHECKING:
    from jdynoff.flights import Flight
    from jdynoff.managed import Managed
    from jdynoff.planning.by_path import Outlook


class Calibration:
    """Steps that were observed, and the machine that they show.

    Attributes:
      machine: the corrected rates; None until the `with` block has ended, or if nothing was
        observed.
      observations: of the steps so far.
    """

    def __init__(self, step: Managed) -> None:
        """Observes nothing yet."""
        self.machine: Machine | None = None
        self.observations: list[Observation] = []
        self._step = step
        self._before: Machine | None = None
        self._seen: set[Outlook] = set()
        self._managers: set[Any] = set()

    def __enter__(self) -> Calibration:
        """Starts to observe the step.

        Raises:
          ConfigurationError: if the step's device is no CPU, or it is observed already.
        """
        platform = jax.local_devices()[0].platform
        if platform != "cpu":
            raise ConfigurationError(
                f"calibrate() corrects the rates of a CPU, which are kept in a file; plans for "
                f"{platform} go by its description. Leave it out."
            )
        if self._step._calibration is not None:
            raise ConfigurationError("this step is being calibrated already; do it once at a time.")
        self._step._ledger.wait(self._step)
        self._step._calibration = self
        return self

    def __exit__(self, *failure: object) -> None:
        """Stops, and keeps the corrected rates unless an exception is on its way."""
        self._step._calibration = None
        for manager in self._managers:
            manager.enable_log(False)
        if self._before is None or failure[0] is not None:
            return
        self.machine = corrected(self._before, self.observations)
        if self._step.disk_rate is not None:
            # How fast a disk may be used says nothing of how fast the machine's is.
            known = read_machine()
            self.machine = dataclasses.replace(
                self.machine,
                out_bytes_per_second=known.out_bytes_per_second,
                back_bytes_per_second=known.back_bytes_per_second,
            )
        if self.machine != self._before:
            write_machine(self.machine)

    def landed(self, outlook: Outlook, flight: Flight | None, outputs: Any, started: float) -> None:
        """Notes a dispatched step, after waiting for it.

        Args:
          outlook: the program's predicted time.
          flight: the run; None for a step that moves nothing.
          outputs: the step's results.
          started: `time.perf_counter()` before dispatch.
        """
        jax.block_until_ready(outputs)
        seconds = time.perf_counter() - started
        counters = np.zeros(outlook.paths)
        record: dict[str, Any] = {}
        events: list[Any] = []
        if flight is not None:
            self._step._ledger.wait(self._step)
            if flight.failure is not None:
                return
            if flight.counted is not None:
                counters = np.asarray(flight.counted)[: outlook.paths]
            record = flight.stats or {}
            events = flight.manager.log(flight.tickets[0])
            if flight.manager not in self._managers:
                self._managers.add(flight.manager)
                flight.manager.enable_log(True)
        # The first step of a program compiles, fills arenas, and has no log yet.
        first, self._before = outlook not in self._seen, self._before or outlook.machine
        self._seen.add(outlook)
        if first or outlook.machine != self._before:
            return
        self.observations.append(
            Observation(
                outlook.predict(counters),
                seconds,
                record.get("offload_stall_seconds", 0.0),
                record.get("reload_stall_seconds", 0.0),
                events,
            )
        )


__all__ = ["Calibration"]
