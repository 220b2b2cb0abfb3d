"""Reads protein text files, plain or gzip, told apart by content and not by name.

Data sets in the field mix `x.a3m` and `x.a3m.gz`, and the suffix is sometimes wrong; the first two
bytes are not. A truncated gzip member is reported as a `DataError`, not as an `EOFError` from the
middle of a parser.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from models.alphafold.data.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"


def decompress(data: bytes, *, source: str) -> bytes:
    """Return `data`, unpacked if it is gzip.

    Raises:
        DataError: the gzip stream is truncated or corrupt.
    """
    if not data.startswith(_GZIP_MAGIC):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(
            f"gzip stream is truncated or corrupt ({error}); fetch the file again",
            source=source,
            kind="corrupt-gzip",
        ) from error


def read_bytes(path: str | Path) -> bytes:
    """Read a whole file, unpacking gzip.

    Raises:
        DataError: the file is missing, unreadable, or a broken gzip stream.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DataError(
            f"cannot be read: {error.strerror or error}", source=str(path), kind="unreadable"
        ) from error
    return decompress(data, source=str(path))


def find_plain_or_gzip(path: str | Path) -> Path | None:
    """Return `path` or `path.gz`, whichever exists, or None."""
    plain = Path(path)
    for candidate in (plain, plain.with_name(plain.name + ".gz")):
        if candidate.is_file():
            return candidate
    return None
