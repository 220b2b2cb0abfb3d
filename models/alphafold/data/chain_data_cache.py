"""How often each chain should be seen, from the chain data cache that OpenFold users have.

The cache is a JSON file of one record per chain, "1abc_A": {"release_date", "seq", "resolution",
"cluster_size"}, made once for a whole PDB mirror. It lets a run filter and weight chains without
opening their files. The trap: chains of one sequence cluster must share the weight of one, or the
few hundred lysozymes of the PDB make up the training.

References:
    Jumper et al. 2021, supplement 1.2.5 (filtering of training data).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from models.alphafold.data.datasets import ProteinDataset
from models.alphafold.data.errors import DataError
from models.alphafold.data.text_source import read_bytes

_MIN_WEIGHED_LENGTH, _MAX_WEIGHED_LENGTH = 256, 512


@dataclasses.dataclass(frozen=True)
class ChainRecord:
    """One record of the cache.

    Attributes:
        sequence: one-letter codes.
        resolution: Angstrom, 0 where there is none.
        cluster_size: chains in its sequence cluster, itself included; at least 1.
        release_date: "YYYY-MM-DD", "" where unknown.
    """

    sequence: str
    resolution: float = 0.0
    cluster_size: int = 1
    release_date: str = ""


def read_chain_data_cache(path: str | Path) -> dict[str, ChainRecord]:
    """Read a chain data cache, plain or gzip.

    Raises:
        DataError: no JSON object, or a record without a sequence.
    """
    try:
        records = json.loads(read_bytes(path))
    except ValueError as error:
        raise DataError(
            f"is no JSON: {error}",
            source=str(path),
            line=getattr(error, "lineno", None),
            kind="malformed",
        ) from error
    if not isinstance(records, dict):
        raise DataError("is no JSON object of chains", source=str(path), kind="malformed")
    cache = {}
    for name, record in records.items():
        if not isinstance(record, dict) or not record.get("seq"):
            raise DataError(f"record {name!r} has no 'seq'", source=str(path), kind="malformed")
        cache[name] = ChainRecord(
            sequence=record["seq"],
            resolution=float(record.get("resolution") or 0.0),
            # Caches made without clustering carry -1.
            cluster_size=max(1, int(record.get("cluster_size") or 1)),
            release_date=record.get("release_date") or "",
        )
    return cache


def training_weights(
    dataset: ProteinDataset,
    cache: Mapping[str, ChainRecord],
    *,
    max_resolution: float = 9.0,
    max_one_residue_fraction: float = 0.8,
) -> list[float]:
    """Weights for the loader, zero for chains that the paper's filters leave out.

    Args:
        dataset: the proteins.
        cache: records by name.
        max_resolution: Angstrom; worse chains are left out.
        max_one_residue_fraction: chains with more of one residue type are left out.

    Raises:
        DataError: a protein is not in the cache, or nothing is left.
    """
    names = [dataset.name(index) for index in range(len(dataset))]
    missing = [name for name in names if name not in cache]
    if missing:
        raise DataError(
            f"has no record of {len(missing)} of {len(names)} chains (first: {missing[0]}); make "
            "it anew for this data set",
            source="chain data cache",
            kind="no-chain",
        )
    weights = []
    for record in (cache[name] for name in names):
        most = max(record.sequence.count(letter) for letter in set(record.sequence))
        usable = record.resolution <= max_resolution and most <= max_one_residue_fraction * len(
            record.sequence
        )
        (weight,) = sampling_weights([len(record.sequence)], [record.cluster_size])
        weights.append(weight if usable else 0.0)
    if not any(weights):
        raise DataError(
            f"the filters leave none of {len(names)} chains",
            source="chain data cache",
            kind="empty",
        )
    return weights


def sampling_weights(lengths: Sequence[int], cluster_sizes: Sequence[int]) -> list[float]:
    """Relative frequencies with which chains should be seen.

    Proportional to the length between 256 and 512 residues, divided by the number of chains in
    the sequence cluster.
    """
    return [
        min(max(length, _MIN_WEIGHED_LENGTH), _MAX_WEIGHED_LENGTH) / _MAX_WEIGHED_LENGTH / size
        for length, size in zip(lengths, cluster_sizes, strict=True)
    ]
