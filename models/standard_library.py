"""The source files of this Python's standard library: a data set that is always there.

Modules are split into training and test by a hash of their path, so that no module is on both sides
and every machine with the same Python has the same split. The trap: another Python has other
modules, so figures hold for one version of it.
"""

from __future__ import annotations

import dataclasses
import functools
import sysconfig
import zlib
from pathlib import Path

# Installed packages, tests and what tests are made of, and generated grammar tables.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
_TEST_SHARE = 5  # one module in so many is for testing
_FEWEST_FILES = 50


@dataclasses.dataclass(frozen=True)
class Source:
    """A source file.

    Attributes:
      path: below the standard library, with "/".
      text: of the file.
    """

    path: str
    text: str


@functools.cache
def sources(split: str) -> tuple[Source, ...]:
    """Reads the files of a split, "train" or "test", in the order of their paths.

    Raises:
      ValueError: there is no such split.
      FileNotFoundError: this Python has come without the sources of its standard library.
    """
    if split not in ("train", "test"):
        raise ValueError(f'split is {split!r}; it must be "train" or "test".')
    root = Path(sysconfig.get_path("stdlib"))
    found, count = [], 0
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if _LEFT_OUT.intersection(path.parts):
            continue
        count += 1
        for_test = zlib.crc32(path.as_posix().encode()) % _TEST_SHARE == 0
        if for_test == (split == "test"):
            # A few files are in other encodings; one letter more or less is no matter here.
            found.append(Source(path.as_posix(), file.read_text("utf-8", errors="replace")))
    if count < _FEWEST_FILES:
        raise FileNotFoundError(
            f"{root} holds {count} source files, and at least {_FEWEST_FILES} are needed: this "
            "Python has come without its standard library's sources. Use one that has them."
        )
    return tuple(found)
