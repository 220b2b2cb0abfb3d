"""JapaneseVowels: 640 series of 12 cepstrum coefficients, 7 to 29 long, by nine speakers.

Kudo, Toyama and Shimbo (1999), "Multidimensional curve classification using passing-through
regions". The data ship in the `aeon` wheel of the package registry, which is fetched and cached as
the proteins are (`models.alphafold.data.registry`) and only read as a zip archive. The trap: series
are padded with zeros to a common length, so whoever reads them must stop at `lengths`.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from models.alphafold.data.registry import Wheel, fetch_wheel

AEON = Wheel("aeon", "1.6.0", "d05227086706f80111ac5fee8de4d5d3115bb3bcfd1c786c8629393055816409")
SPEAKERS = 9
COEFFICIENTS = 12
_MEMBER = "aeon/datasets/data/JapaneseVowels/JapaneseVowels_{}.ts"


class Series(NamedTuple):
    """A set of series."""

    values: np.ndarray  # float32[series, longest, 12], zeros beyond each one's length
    lengths: np.ndarray  # int32[series]
    speakers: np.ndarray  # int32[series], from 0 to 8


def load(part: str, *, directory: Path | None = None) -> Series:
    """Reads one part of the data.

    Args:
      part: "TRAIN" (270 series of length 7 to 26) or "TEST" (370 of length 7 to 29).
      directory: where wheels are cached; None for the default.

    Raises:
      DataError: it is not cached and cannot be fetched.
    """
    with zipfile.ZipFile(fetch_wheel(AEON, directory=directory)) as archive:
        return parse(archive.read(_MEMBER.format(part)).decode())


def parse(text: str) -> Series:
    """Reads the `.ts` format: a series a line, dimensions between colons, the label last."""
    series, speakers = [], []
    lines = iter(text.splitlines())
    for line in lines:
        if line.strip().lower() == "@data":
            break
    for line in lines:
        if not line.strip():
            continue
        *dimensions, label = line.split(":")
        series.append(np.array([row.split(",") for row in dimensions], np.float32).T)
        speakers.append(int(label) - 1)
    lengths = np.array([len(one) for one in series], np.int32)
    values = np.zeros((len(series), int(lengths.max()), COEFFICIENTS), np.float32)
    for row, one in zip(values, series, strict=True):
        row[: len(one)] = one
    return Series(values, lengths, np.array(speakers, np.int32))
