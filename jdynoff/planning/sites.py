"""Finds the residuals that pass through control flow, and how each gets to its consumer.

Every value that a scan (or a branch) makes and a later scan (or branch) takes apart again is a
candidate. Pairs of regions are then freed of what need not be moved (`planning.recompute`); what
is left becomes a `Site`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from jdynoff import jax_compat
from jdynoff.planning import recompute
from jdynoff.planning.decisions import Decisions, Own, Rebuild, Replay, Site, Stored
from jdynoff.program.graph import Constant, Operation, Program, Region, Value
from jdynoff.program.structure import (
    CondNode,
    Leaf,
    Node,
    ScanNode,
    Use,
    is_scanned,
    is_stacked,
    leaves,
    match,
)

# Moving an array costs a call of a few microseconds; below this it is cheaper to keep it.
DEFAULT_MIN_BYTES = 16 * 1024


def find_sites(program: Program, min_bytes: int = DEFAULT_MIN_BYTES) -> Decisions:
    """Returns the sites, replays and rebuilt residuals of a program's control flow.

    Args:
      program: the step.
      min_bytes: arrays smaller than this are never moved.

    Returns:
      Decisions without straight-line spills.
    """
    decisions = Decisions(min_bytes=min_bytes)
    for region in program.regions:
        _find_in(region, program.top, decisions)
    return decisions


def _find_in(region: Region, top: Region, decisions: Decisions) -> None:
    candidates: list[Site] = []
    for operation in region.operations:
        if operation.kind not in ("scan", "cond"):
            continue
        for value in operation.results:
            if value.nbytes == 0 or not value.uses or value.output_positions:
                continue  # an output of the region is alive to its end in any case
            site = _candidate(value, decisions.min_bytes)
            if site is not None:
                candidates.append(site)
    groups: dict[tuple[Region, Region], tuple[list[tuple[Region, Region]], list[Site]]] = {}
    for site in candidates:
        chain = _chain(site)
        if chain is None:
            decisions.sites.append(site)
        else:
            groups.setdefault(chain[-1], (chain, []))[1].append(site)
    # Outermost first: an inner pair reads what the pair around it can get at.
    ordered = sorted(groups.values(), key=lambda group: len(group[0]))
    replays: dict[Region, tuple[Replay, Replay | None]] = {}
    for chain, sites in ordered:
        _reduce(chain, sites, top, replays, decisions)
    for replay, around in reversed(replays.values()):
        recompute.prune(replay, around)
        if replay.rebuilds or replay.origins:
            decisions.replays[replay.consumer] = replay


def _candidate(value: Value, min_bytes: int) -> Site | None:
    uses = tuple(use for use in value.uses if _is_structural(value, use))
    if not uses:
        return None
    first = min(operation.position for operation, _ in uses)
    if any(use not in uses and use[0].position >= first for use in value.uses):
        return None  # something else needs all of it while it would be away
    node = match(value, uses)
    if node is None:
        return None
    found = leaves(node)
    largest = max(found, key=lambda leaf: _leaf_bytes(leaf))
    if len({_signature(leaf) for leaf in found}) != 1:
        return None
    return _site(value, largest, node, value.region, _entries(node), min_bytes)


def _site(
    value: Value | None, leaf: Leaf, node: Node, region: Region, entries: int, min_bytes: int
) -> Site:
    produced = leaf.produced
    entry_bytes = _leaf_bytes(leaf)
    source = ""
    if isinstance(produced, Value):
        maker = produced.producer or produced.region.owner
        source = maker.source if maker is not None else ""
    site = Site(
        value=value,
        leaf=produced,
        node=node,
        region=region,
        aval=produced.aval,
        entry_bytes=entry_bytes,
        entries=entries,
        source=source,
        reason="made by the forward pass, read by the backward pass",
        readers=max(1, len(leaf.consumed)),
    )
    if entry_bytes < min_bytes:
        site.kept = True
        site.reason = f"smaller than min_bytes={min_bytes}"
    return site


def _is_structural(value: Value, use: Use) -> bool:
    operation, number = use
    producer = value.producer
    if producer is None:
        return False
    if producer.kind == "scan":
        return is_stacked(value) and is_scanned(operation, number)
    return operation.kind == "cond" and number > 0


def _leaf_bytes(leaf: Leaf) -> int:
    return jax_compat.saveable_bytes(leaf.produced.aval)


def _signature(leaf: Leaf) -> tuple[object, ...]:
    return (leaf.produced.aval.shape, leaf.produced.aval.dtype, len(leaf.consumed))


def _entries(node: Node) -> int:
    if isinstance(node, Leaf):
        return 1
    if isinstance(node, ScanNode):
        return node.producer.spec.length * _entries(node.inner)
    return max(_entries(branch) for branch in node.branches if branch is not None)


def _chain(site: Site) -> list[tuple[Region, Region]] | None:
    """The (producing, consuming) bodies of a site with one leaf and one consumer, outermost first."""
    chain: list[tuple[Region, Region]] = []
    node: Node | None = site.node
    while not isinstance(node, Leaf):
        assert node is not None
        if len(node.consumers) != 1:
            return None
        consumer = node.consumers[0][0]
        if isinstance(node, ScanNode):
            branch, inner = 0, node.inner
        else:
            taken = [number for number, body in enumerate(node.branches) if body is not None]
            if len(taken) != 1:
                return None
            branch, inner = taken[0], node.branches[taken[0]]
        chain.append((node.producer.bodies[branch], consumer.bodies[branch]))
        node = inner
    return chain if len(node.consumed) == 1 else None


def _leaf_of(site: Site) -> Leaf:
    (leaf,) = leaves(site.node)
    return leaf


def _replay(
    chain: list[tuple[Region, Region]],
    top: Region,
    replays: dict[Region, tuple[Replay, Replay | None]],
) -> Replay | None:
    """The replay of the innermost pair of a chain; made, with those around it, if new."""
    producer, consumer = chain[-1]
    if consumer not in replays:
        around = _replay(chain[:-1], top, replays) if len(chain) > 1 else None
        if len(chain) > 1 and around is None:
            return None
        replay = Replay(producer, consumer)
        replay.origins.update(recompute.reachable_inputs(producer, consumer, around, top))
        replays[consumer] = (replay, around)
    replay, _ = replays[consumer]
    # A consumer of two producers rebuilds from the first only.
    return replay if replay.producer is producer else None


def _reduce(
    chain: list[tuple[Region, Region]],
    sites: list[Site],
    top: Region,
    replays: dict[Region, tuple[Replay, Replay | None]],
    decisions: Decisions,
) -> None:
    producer, consumer = chain[-1]
    replay = None if consumer in decisions.replays else _replay(chain, top, replays)
    if replay is None:
        decisions.sites.extend(sites)
        return
    # Several results may be one and the same array of the body; it is moved once.
    first: dict[Value, Site] = {}
    residuals: dict[Value, int] = {}
    for site in sites:
        produced = _leaf_of(site).produced
        if isinstance(produced, Constant):
            decisions.sites.append(site)
            continue
        if produced in first:
            replay.rebuilds[_leaf_of(site).consumed[0]] = produced
            _record(decisions, site, "the same array is moved for another site")
            continue
        first[produced] = site
        residuals[produced] = site.entry_bytes
    kept, rebuilt, bases = recompute.choose(producer, residuals, set(replay.origins))
    for produced in (value for value in residuals if value in rebuilt or value in replay.origins):
        site = first[produced]
        replay.rebuilds[_leaf_of(site).consumed[0]] = produced
        _record(decisions, site, "computed again from values that are there anyway")
    for produced in (value for value in residuals if value in kept):
        site = first[produced]
        replay.origins[produced] = Own(_leaf_of(site).consumed[0])
        decisions.sites.append(site)
    template = sites[0].node
    assert template is not None
    for product in bases:
        leaf = Leaf(product, ())
        site = _site(None, leaf, _around(template, leaf), sites[0].region, sites[0].entries, 0)
        site.reason = "several residuals are computed from it"
        replay.origins[product] = Stored(site)
        decisions.sites.append(site)


def _record(decisions: Decisions, site: Site, reason: str) -> None:
    consumed = _leaf_of(site).consumed[0]
    produced = _leaf_of(site).produced
    assert isinstance(produced, Value)
    assert site.node is not None
    decisions.rebuilt.append(
        Rebuild(consumed, produced, site.node, site.entry_bytes, site.entries, site.source, reason)
    )


def _around(template: Node, leaf: Leaf) -> Node:
    """The same descent as `template`, ending at another leaf."""
    if isinstance(template, Leaf):
        return leaf
    if isinstance(template, ScanNode):
        return ScanNode(template.producer, -1, template.consumers, _around(template.inner, leaf))
    return CondNode(
        template.producer,
        -1,
        template.consumers,
        tuple(None if branch is None else _around(branch, leaf) for branch in template.branches),
    )


def number_sites(sites: Iterable[Site]) -> None:
    """Gives every site an id that is the same in every process: a hash of what it is.

    Ids are part of the compiled program, and JAX's persistent compilation cache must find the
    program again in the next process.
    """
    seen: dict[str, int] = {}
    for site in sites:
        path: list[str] = []
        region: Region | None = site.region
        while region is not None:
            owner: Operation | None = region.owner
            path.append(region.role if owner is None else f"{owner.position}:{region.role}")
            region = owner.region if owner is not None else None
        text = f"{'/'.join(reversed(path))}|{site.aval}|{site.entries}"
        occurrence = seen.get(text, 0)
        seen[text] = occurrence + 1
        digest = hashlib.sha256(f"{text}|{occurrence}".encode()).digest()
        site.identifier = int.from_bytes(digest[:8], "little") & 0x7FFF_FFFF_FFFF_FFFF
