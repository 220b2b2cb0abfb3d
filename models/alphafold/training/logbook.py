"""The record of a run: JSON lines to compute with, TensorBoard to look at, curves as a PNG.

Scalars are named as users of the field log them, `train/loss` or `val/lddt_ca`. A resumed run reads
the lines that are there, so that its curves are whole. The trap: lines written after the checkpoint
that is resumed from belong to steps that are done again, and are dropped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tensorboardX import SummaryWriter

from models.alphafold.plots import plot_curves

_FILE = "metrics.jsonl"
_CURVES = (
    "train/loss",
    "train/unscaled_loss",
    "train/fape",
    "train/distogram",
    "train/masked_msa",
    "train/lddt_ca",
    "val/lddt_ca",
    "val/gdt_ts",
    "val/drmsd_ca",
)


class Logbook:
    """Scalars by step of one run, in a folder; a context manager."""

    def __init__(
        self,
        folder: Path,
        *,
        resumed_step: int | None = None,
        resumed_folder: Path | None = None,
    ) -> None:
        """Open the record.

        Args:
            folder: of the run; made if needed.
            resumed_step: the run goes on after this step; None begins a new record.
            resumed_folder: of the run that goes on; None for the same folder.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / _FILE
        self._curves_path = folder / "curves.png"
        before = (folder if resumed_folder is None else resumed_folder) / _FILE
        kept = [] if resumed_step is None else _read(before, resumed_step)
        self._path.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
        self._lines = kept
        self._writer = SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=None if resumed_step is None else resumed_step + 1,
            # Files are named by the second; a quick resume must not overwrite the one before.
            filename_suffix=f".after{resumed_step or 0}",
        )

    def __enter__(self) -> Logbook:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._writer.close()

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Record scalars of one step; values that are not finite are written as null."""
        line: dict[str, float | None] = {"step": step}
        for name, value in scalars.items():
            line[name] = value if math.isfinite(value) else None
            self._writer.add_scalar(name, value, step)
        self._lines.append(line)
        with self._path.open("a") as file:
            file.write(f"{json.dumps(line)}\n")

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of one scalar."""
        found = [(line["step"], line[name]) for line in self._lines if line.get(name) is not None]
        return [int(step) for step, _ in found], [value for _, value in found]

    def draw(self, title: str) -> Path | None:
        """Draw the curves of what was recorded; None where there is nothing yet."""
        curves = {name: self.curve(name) for name in _CURVES}
        present = {name: curve for name, curve in curves.items() if curve[0]}
        return plot_curves(self._curves_path, present, title=title) if present else None


def _read(path: Path, last_step: int) -> list[dict[str, float | None]]:
    if not path.is_file():
        return []
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [line for line in lines if line["step"] <= last_step]
