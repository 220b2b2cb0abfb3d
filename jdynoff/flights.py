"""Runs in flight: capacity before dispatch, and what happens to a run that never ends.

A managed step holds capacity (XLA's peak and its pool) from before dispatch until its sentinel
output is ready. Reservations of one device are taken in turn, in Python, so a custom call never
waits for another run. A sentinel that carries an error means that the run stopped half way; its
ticket is closed, which frees everything that the manager holds for it.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
import threading
from collections.abc import Callable
from typing import Any

import jax

from jdynoff import errors


@dataclasses.dataclass(eq=False, slots=True)
class Flight:
    """One dispatched run of a managed step."""

    owner: object
    claim_bytes: int
    manager: Any
    traced: Any = None  # the step that it is a run of
    # At most one ticket. A list, because `extend` opens and keeps it in one step that Ctrl-C
    # cannot come between.
    tickets: list[int] = dataclasses.field(default_factory=list)
    sentinel: Any = None  # u32[], None before dispatch
    counted: Any = None  # i32[n], what the step has counted
    pilot_state: Any = None  # f32[m]
    stats: dict[str, Any] | None = None
    failure: BaseException | None = None


class Ledger:
    """The runs in flight on one device, oldest first."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._flights: collections.deque[Flight] = collections.deque()  # guarded by _lock

    def depart(self, flight: Flight, limit_bytes: int, open_ticket: Callable[[], int]) -> int:
        """Takes capacity for a run, after earlier runs have given back enough of theirs.

        Whatever interrupts this or what follows, `cancel` gives everything back.

        Args:
          flight: the run, new.
          limit_bytes: what all runs in flight may need together at their peaks.
          open_ticket: reserves pool and spill space.

        Returns:
          The ticket.

        Raises:
          SpillSpaceError: if there is no spill space, and no run in flight that holds some.
        """
        wanting = False  # spill space that a run in flight may hold
        while True:
            self.sweep()
            with self._lock:
                taken = sum(other.claim_bytes for other in self._flights)
                room = taken + flight.claim_bytes <= limit_bytes
                if not self._flights or (room and not wanting):
                    self._flights.append(flight)
                    oldest = None
                else:
                    oldest = next(
                        (other for other in self._flights if other.sentinel is not None), None
                    )
                    if oldest is None:  # another thread has not dispatched its run yet
                        self._lock.wait()
                        continue
            if oldest is not None:
                self._land(oldest)
                wanting = False
                continue
            try:
                # Not under the lock: a file may have to grow.
                flight.tickets.extend(map(operator.call, (open_ticket,)))
                return flight.tickets[0]
            except errors.SpillSpaceError:
                with self._lock:
                    self._flights.remove(flight)
                    self._lock.notify_all()
                    wanting = bool(self._flights)
                if not wanting:
                    raise

    def dispatched(self, flight: Flight, sentinel: jax.Array) -> None:
        """Notes the output that tells when the run is over."""
        with self._lock:
            flight.sentinel = sentinel
            self._lock.notify_all()

    def cancel(self, flight: Flight) -> None:
        """Gives back the capacity of a run that was not dispatched, or failed at once."""
        self._close(flight)
        for ticket in flight.tickets:  # closing is idempotent
            flight.manager.close(ticket)

    def sweep(self) -> None:
        """Closes the tickets of all runs that are over."""
        with self._lock:
            ready = [
                flight
                for flight in self._flights
                if flight.sentinel is not None and flight.sentinel.is_ready()
            ]
        for flight in ready:
            self._land(flight)

    def wait(self, owner: object | None = None) -> None:
        """Waits for the runs of one managed function, or of all."""
        with self._lock:
            mine = [
                flight
                for flight in self._flights
                if (owner is None or flight.owner is owner) and flight.sentinel is not None
            ]
        for flight in mine:
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        try:
            assert flight.sentinel is not None
            flight.sentinel.block_until_ready()
        except (jax.errors.JaxRuntimeError, RuntimeError) as failure:
            flight.failure = errors.from_xla(failure) or failure
        self._close(flight)

    def _close(self, flight: Flight) -> None:
        with self._lock:
            if flight not in self._flights:
                return
            self._flights.remove(flight)
            self._lock.notify_all()
        for ticket in flight.tickets:
            flight.manager.close(ticket)
            flight.stats = flight.manager.stats(ticket)
        landed = getattr(flight.owner, "_landed", None)
        if landed is not None:
            landed(flight)


_ledgers: dict[Any, Ledger] = {}
_ledgers_lock = threading.Lock()  # guards _ledgers


def ledger(device: Any) -> Ledger:
    """The ledger of one device."""
    with _ledgers_lock:
        return _ledgers.setdefault(device, Ledger())
