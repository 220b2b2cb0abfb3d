"""Template structures in the query's coordinates.

A template is a known structure of a related chain, seen through an alignment: for each query
residue the template's residue type and atoms, or a gap. It comes from an HHsearch hit and a folder
of mmCIF files, or straight from a chain. The traps: a hit's positions count the template's full
sequence, unseen residues included, and the database's sequence is sometimes not the file's; and
during training neither the target's own structure nor one that became known with it must be among
its templates.

References:
    Jumper et al. 2021, supplement 1.2.3 (choice of templates).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.alphafold.data.chains import Chain, read_chain
from models.alphafold.data.errors import DataError, FaultHandler, parsing
from models.alphafold.data.hhr import TemplateHit
from models.alphafold.data.labels import pseudo_beta
from models.alphafold.data.pairwise import match_sequences
from models.alphafold.data.residues import CA, GAP, NUM_ATOMS
from models.alphafold.data.text_source import find_plain_or_gzip, read_bytes

Floats = NDArray[np.float32]
_MIN_ALIGNED_FRACTION = 0.1
_MIN_ALIGNED_RESIDUES = 10
_MAX_COPIED_FRACTION = 0.95
_MIN_REALIGNED_IDENTITY = 0.9
_CACHED_CHAINS = 64
# Structures of one work are released together or nearly so.
_DAYS_OLDER_THAN_TARGET = 60


@dataclasses.dataclass(frozen=True, eq=False)
class Template:
    """One template in the query's coordinates.

    Attributes:
        name: "pdbid_chain".
        aatype: the template's residue types, 21 where it has none. # (residues,), int32
        all_atom_positions: Angstrom. # (residues, 37, 3), float32
        all_atom_mask: # (residues, 37), float32
        sum_probs: the hit's score, 0 where it comes from no search.
    """

    name: str
    aatype: NDArray[np.int32]
    all_atom_positions: Floats
    all_atom_mask: Floats
    sum_probs: float


def template_from_pairs(
    chain: Chain,
    query_positions: NDArray[np.int64],
    chain_positions: NDArray[np.int64],
    num_residues: int,
    *,
    sum_probs: float = 0.0,
) -> Template:
    """See a chain through matched positions.

    Raises:
        DataError: no matched residue has a C-alpha atom.
    """
    aatype = np.full(num_residues, GAP, dtype=np.int32)
    positions = np.zeros((num_residues, NUM_ATOMS, 3), dtype=np.float32)
    mask = np.zeros((num_residues, NUM_ATOMS), dtype=np.float32)
    aatype[query_positions] = chain.aatype[chain_positions]
    positions[query_positions] = chain.all_atom_positions[chain_positions]
    mask[query_positions] = chain.all_atom_mask[chain_positions]
    if not mask[:, CA].any():
        raise DataError(
            f"template {chain.name}: none of the {len(query_positions)} aligned residues was seen",
            source=chain.source,
            kind="template-empty",
        )
    return Template(chain.name, aatype, positions, mask, sum_probs)


def template_from_chain(chain: Chain, query_sequence: str) -> Template:
    """Align a chain of nearly the same protein to the query and use it as a template."""
    match = match_sequences(query_sequence, chain.sequence)
    return template_from_pairs(chain, match.first, match.second, len(query_sequence))


def template_from_hit(hit: TemplateHit, chain: Chain, num_residues: int) -> Template:
    """See a hit's chain through the hit's alignment, re-aligned where the sequences differ.

    Raises:
        DataError: the file's chain does not contain the sequence that was hit.
    """
    inside = hit.hit_positions - hit.hit_start
    start = hit.hit_start
    if chain.sequence[start : start + len(hit.hit_sequence)] != hit.hit_sequence:
        start = chain.sequence.find(hit.hit_sequence)
    if start >= 0:
        query_positions, chain_positions = hit.query_positions, inside + start
    else:
        match = match_sequences(hit.hit_sequence, chain.sequence)
        if match.identity < _MIN_REALIGNED_IDENTITY:
            raise DataError(
                f"template {hit.name}: the sequence in the search database agrees with the file's "
                f"chain in only {match.identity:.0%}; the two are of different versions",
                source=chain.source,
                kind="template-sequence",
            )
        partner = np.full(len(hit.hit_sequence), -1, dtype=np.int64)
        partner[match.first] = match.second
        chain_positions = partner[inside]
        matched = chain_positions >= 0
        query_positions, chain_positions = hit.query_positions[matched], chain_positions[matched]
    if len(query_positions) and query_positions.max() >= num_residues:
        raise DataError(
            f"template {hit.name} reaches query residue {query_positions.max() + 1} of a query "
            f"with {num_residues}: the hits belong to another query",
            source=chain.source,
            kind="wrong-query",
        )
    return template_from_pairs(
        chain, query_positions, chain_positions, num_residues, sum_probs=hit.sum_probs
    )


def usable_hits(
    hits: Iterable[TemplateHit], query_sequence: str, *, exclude_pdb_ids: Sequence[str] = ()
) -> list[TemplateHit]:
    """Leave out hits that teach nothing or give the answer away, best first.

    Left out are hits of the excluded entries, short ones (under 10 residues or 10 % of the
    query), and copies: hits whose sequence is a stretch of the query covering over 95 % of it.
    """
    excluded = {name.lower() for name in exclude_pdb_ids}
    kept = []
    for hit in hits:
        length = len(hit.hit_sequence)
        is_copy = hit.hit_sequence in query_sequence and length > _MAX_COPIED_FRACTION * len(
            query_sequence
        )
        too_short = (
            length < _MIN_ALIGNED_RESIDUES
            or hit.aligned_columns <= _MIN_ALIGNED_FRACTION * len(query_sequence)
        )
        if hit.pdb_id not in excluded and not is_copy and not too_short:
            kept.append(hit)
    return sorted(kept, key=lambda hit: -hit.sum_probs)


def latest_template_date(max_date: str | None, target_date: str) -> str | None:
    """The last release date that a template of a target may have.

    Args:
        max_date: of the run, "YYYY-MM-DD", or None for no limit.
        target_date: release of the target, or "" where it is not known.

    Returns:
        60 days before the target's release, or `max_date` where that is earlier; None for no limit.
    """
    try:
        released = datetime.date.fromisoformat(target_date)
    except ValueError:
        return max_date
    latest = (released - datetime.timedelta(days=_DAYS_OLDER_THAN_TARGET)).isoformat()
    return latest if max_date is None else min(latest, max_date)


def read_release_dates(path: str | Path) -> dict[str, str]:
    """Read a template release dates cache: a JSON object of entry name to "YYYY-MM-DD".

    In place of the date there may be an object with a `release_date`, as in the caches of mmCIF
    folders that OpenFold users have.

    Raises:
        DataError: it cannot be read or is not of that form.
    """
    with parsing(str(path)):
        dates = {
            name.lower(): record["release_date"] if isinstance(record, dict) else record
            for name, record in json.loads(read_bytes(path)).items()
        }
        for date in dates.values():
            datetime.date.fromisoformat(date)
    return dates


def read_obsolete_entries(path: str | Path) -> dict[str, str]:
    """Read the PDB's list of obsolete entries (`obsolete.dat`).

    Returns:
        Lower-case name of each replaced entry to that of the entry that stands for it today.

    Raises:
        DataError: it cannot be read, or holds no such line.
    """
    rows = [
        line.lower().split() for line in read_bytes(path).decode("utf-8", "replace").split("\n")
    ]
    # OBSLTE, date, entry, and its successors, if it has any.
    replaced = {row[2]: row[3] for row in rows if len(row) > 3 and row[0] == "obslte"}
    if not replaced:
        raise DataError(
            "has no line 'OBSLTE <date> <entry> <successor>'", source=str(path), kind="malformed"
        )
    for name in replaced:
        seen = {name}
        while (successor := replaced[name]) in replaced and successor not in seen:
            seen.add(successor)
            replaced[name] = replaced[successor]
    return replaced


def load_templates(
    hits: Sequence[TemplateHit],
    mmcif_dir: str | Path,
    query_sequence: str,
    *,
    max_hits: int,
    counter: FaultHandler,
    exclude_pdb_ids: Sequence[str] = (),
    max_date: str | None = None,
    release_dates: Mapping[str, str] | None = None,
    obsolete: Mapping[str, str] | None = None,
) -> tuple[Template, ...]:
    """Turn the best usable hits into templates.

    Args:
        hits: as parsed.
        mmcif_dir: folder of `<pdb id>.cif` or `.cif.gz`.
        query_sequence: full sequence of the target.
        max_hits: stop after this many templates.
        counter: what to do with hits whose file is missing or unusable.
        exclude_pdb_ids: entries that must not serve, the target's own above all.
        max_date: leave out entries released after this "YYYY-MM-DD"; None keeps all.
        release_dates: of entries, for which no file is opened to find them out.
        obsolete: entries that others have replaced; the others are read, and left out where they
            are excluded.
    """
    folder = Path(mmcif_dir)
    hits = [_of_today(hit, obsolete or {}) for hit in hits]
    templates: list[Template] = []
    usable = usable_hits(hits, query_sequence, exclude_pdb_ids=exclude_pdb_ids)
    missing: list[str] = []
    for hit in usable:
        if len(templates) >= max_hits:
            break
        if max_date is not None and (release_dates or {}).get(hit.pdb_id, "") > max_date:
            continue
        path = find_plain_or_gzip(folder / f"{hit.pdb_id}.cif")
        if path is None:
            missing.append(hit.name)
            continue
        try:
            chain = _cached_chain(str(path), hit.chain_id)
            if max_date is not None and chain.release_date > max_date:
                continue
            templates.append(template_from_hit(hit, chain, len(query_sequence)))
        except DataError as error:
            counter.handle(error)
    if missing:
        counter.handle(
            DataError(
                f"{len(missing)} of {len(usable)} usable template hits have no mmCIF (first: "
                f"{missing[0]}); add <pdb id>.cif or .cif.gz files, or go on with fewer templates",
                source=str(folder),
                kind="template-missing",
            )
        )
    return tuple(templates)


def _of_today(hit: TemplateHit, obsolete: Mapping[str, str]) -> TemplateHit:
    if hit.pdb_id not in obsolete:
        return hit
    return dataclasses.replace(hit, name=f"{obsolete[hit.pdb_id]}_{hit.chain_id}")


@functools.lru_cache(maxsize=_CACHED_CHAINS)
def _cached_chain(path: str, chain_id: str) -> Chain:
    return read_chain(path, chain_id)


def choose_templates(
    num_available: int,
    max_templates: int,
    *,
    top_k: int,
    subsample: bool,
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Choose which templates an example uses.

    In training a uniform number between 0 and all of the best `top_k`, at most `max_templates`,
    drawn without replacement; otherwise the best ones.
    """
    available = min(num_available, top_k)
    if not subsample:
        return np.arange(min(available, max_templates))
    wanted = min(int(rng.integers(0, available + 1)), max_templates)
    return np.sort(rng.choice(available, size=wanted, replace=False)).astype(np.int64)


def template_features(
    templates: Sequence[Template], num_residues: int, max_templates: int
) -> dict[str, NDArray[np.generic]]:
    """Stack templates into features, padded with zeros up to `max_templates`.

    Returns:
        template_aatype (T, N), template_all_atom_positions (T, N, 37, 3),
        template_all_atom_masks (T, N, 37), template_pseudo_beta (T, N, 3),
        template_pseudo_beta_mask (T, N), template_mask (T,), template_sum_probs (T,).
    """
    aatype = np.zeros((max_templates, num_residues), dtype=np.int32)
    positions = np.zeros((max_templates, num_residues, NUM_ATOMS, 3), dtype=np.float32)
    masks = np.zeros((max_templates, num_residues, NUM_ATOMS), dtype=np.float32)
    present = np.zeros(max_templates, dtype=np.float32)
    scores = np.zeros(max_templates, dtype=np.float32)
    for slot, template in enumerate(templates[:max_templates]):
        aatype[slot] = template.aatype
        positions[slot] = template.all_atom_positions
        masks[slot] = template.all_atom_mask
        present[slot] = 1.0
        scores[slot] = template.sum_probs
    beta, beta_mask = pseudo_beta(aatype, positions, masks)
    return {
        "template_aatype": aatype,
        "template_all_atom_positions": positions,
        "template_all_atom_masks": masks,
        "template_pseudo_beta": beta,
        "template_pseudo_beta_mask": beta_mask,
        "template_mask": present,
        "template_sum_probs": scores,
    }
