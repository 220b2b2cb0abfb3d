"""What one step moved, and how long it waited for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from jdynoff.planning.budget import format_bytes


@dataclasses.dataclass(frozen=True)
class StepStats:
    """Statistics of one completed step.

    Attributes:
        bytes_offloaded: Taken away from XLA, wherever they went.
        bytes_reloaded: Given back to XLA.
        bytes_written: Written to the disk, in whole pages.
        bytes_read: Read from the disk, in whole pages.
        entries_offloaded: Tensors taken away.
        entries_reloaded: Reloads; a tensor may be read several times.
        entries_unread: Tensors that nobody asked for again.
        stall_seconds: How long the step's operations waited, for room or for bytes. XLA may have
            computed something else meanwhile.
        pool_peak_bytes: The most that the pool held at once, staging included.
        read_ahead_hits: Reloads whose bytes were back from the disk in time.
        read_ahead_misses: Reloads that had to wait for the disk.
        site_counts: How often each site was passed, by site id.
        path: How often each block ran, by block; empty where nothing was counted.
        predicted: What was predicted, by block; only blocks whose count neither the program nor
            another block tells.
        blocks_predicted: Blocks whose count was predicted.
        blocks_predicted_right: Of these, the ones whose prediction was right.
    """

    bytes_offloaded: int = 0
    bytes_reloaded: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    entries_offloaded: int = 0
    entries_reloaded: int = 0
    entries_unread: int = 0
    stall_seconds: float = 0.0
    pool_peak_bytes: int = 0
    read_ahead_hits: int = 0
    read_ahead_misses: int = 0
    site_counts: Mapping[int, int] = dataclasses.field(default_factory=dict)
    path: Mapping[str, int] = dataclasses.field(default_factory=dict)
    predicted: Mapping[str, int] = dataclasses.field(default_factory=dict)
    blocks_predicted: int = 0
    blocks_predicted_right: int = 0

    @classmethod
    def from_manager(cls, record: Mapping[str, Any], **observed: Any) -> StepStats:
        """Build it from a ticket's record.

        Args:
            record: What the manager returns for a ticket.
            **observed: Fields that the manager does not know, such as ``path``.

        Returns:
            The statistics; keys of the record that are no fields here are left out.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in record.items() if key in names}, **observed)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return dataclasses.asdict(self)

    def __rich__(self) -> Table:
        table = Table(title="Last step", show_header=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        reads = self.read_ahead_hits + self.read_ahead_misses
        for name, value in (
            ("offloaded", f"{format_bytes(self.bytes_offloaded)} in {self.entries_offloaded}"),
            ("reloaded", f"{format_bytes(self.bytes_reloaded)} in {self.entries_reloaded}"),
            ("written to disk", format_bytes(self.bytes_written)),
            ("read from disk", format_bytes(self.bytes_read)),
            ("read ahead in time", f"{self.read_ahead_hits} of {reads}"),
            ("waited", f"{self.stall_seconds * 1e3:.1f} ms"),
            ("pool peak", format_bytes(self.pool_peak_bytes)),
            ("never read", str(self.entries_unread)),
        ):
            table.add_row(name, value)
        if self.blocks_predicted:
            right = f"{self.blocks_predicted_right} of {self.blocks_predicted}"
            table.add_row("blocks predicted", right)
        return table

    def __str__(self) -> str:
        console = Console(width=80, color_system=None)
        with console.capture() as captured:
            console.print(self)
        return captured.get()
