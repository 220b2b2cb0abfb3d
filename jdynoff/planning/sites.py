"""Finds the residuals that pass through control flow, and how each gets to its consumer.

Every value that a scan (or a branch) makes and a later scan (or branch) takes apart again is a
candidate. What need not be moved, since the consumer can compute it again, is chosen by
`planning.cut`; what is left becomes a `Site`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable

from jdynoff import jax_compat
from jdynoff.planning.cut import Cut, Needed, Network
from jdynoff.planning.decisions import Decisions, Own, Rebuild, Site, Stored
from jdynoff.planning.pairs import Chain, Pair, Pairs, Path
from jdynoff.planning.pins import Pins
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
# A value beside both bodies of a pair may live on for what is computed from it, if it is no larger
# than this share of the largest residual.
_SMALL_SHARE = 1 / 16


def find_sites(
    program: Program,
    min_bytes: int = DEFAULT_MIN_BYTES,
    price: float = 0.0,
    pins: Pins | None = None,
    observe: Callable[[Network], None] | None = None,
    spread: float = 0.0,
) -> Decisions:
    """Returns the sites, replays and rebuilt residuals of a program's control flow.

    Args:
      program: the step.
      min_bytes: arrays smaller than this are never moved.
      price: FLOPs that are paid for computing again rather than move one byte.
      pins: the user's actions.
      observe: is shown the network of each region before it is cut.
      spread: by which share the price falls over a body, so that arrays that cost the same a byte
        do not all change sides at one price.

    Returns:
      Decisions without straight-line spills.
    """
    decisions = Decisions(min_bytes=min_bytes, price=price, pins=pins or {})
    hidden: set[Value] = set()
    for region in program.regions:
        if not region.in_predicate:
            _find_in(region, program.top, hidden, decisions, observe, spread)
    for site in decisions.sites:
        if decisions.pinned(site.leaf) == "keep":
            site.kept = True
            site.reason = "actions= says keep"
    return decisions


def _find_in(
    region: Region,
    top: Region,
    hidden: set[Value],
    decisions: Decisions,
    observe: Callable[[Network], None] | None,
    spread: float,
) -> None:
    candidates: list[Site] = []
    for operation in region.operations:
        if operation.kind not in ("scan", "cond"):
            continue
        for values in _forwarded(operation):
            site = _candidate(values, decisions.min_bytes)
            if site is not None:
                candidates.append(site)
    largest = max((site.total_bytes for site in candidates), default=0)
    for site in candidates:
        _hide(site.node, hidden)
    pairs = Pairs(top, int(_SMALL_SHARE * largest), decisions.replays, hidden)
    # Of several readings of one and the same array of a body, the first one's site moves it.
    first: dict[Needed, _Reading] = {}
    again: list[tuple[Needed, _Reading]] = []
    for site in candidates:
        for reading in _readings(site):
            pair = pairs.find(reading.chain, reading.path)
            produced = reading.leaf.produced
            if pair is None or isinstance(produced, Constant):
                continue
            if (pair, produced) in first:
                again.append(((pair, produced), reading))
            else:
                first[pair, produced] = reading
    network = Network(list(first), pairs, decisions.price, decisions.pins, spread)
    if observe is not None:
        observe(network)
    choice = network.solve()
    rebuilt: dict[tuple[Leaf, Value], str] = {}
    for node, reading in first.items():
        if node in choice.computed:
            node[0].replay.rebuilds[reading.consumed] = node[1]
            rebuilt[reading.leaf, reading.consumed] = "follows cheaply from what is there"
    for node, reading in again:
        node[0].replay.rebuilds[reading.consumed] = node[1]
        rebuilt[reading.leaf, reading.consumed] = "the same array is moved for another site"
    _reach(choice, first, pairs, region, decisions)
    reasons = {leaf: reason for (leaf, _), reason in rebuilt.items()}
    for site in candidates:
        _settle(site, rebuilt, reasons, decisions)


def _reach(
    choice: Cut,
    first: dict[Needed, _Reading],
    pairs: Pairs,
    region: Region,
    decisions: Decisions,
) -> None:
    """Gives every pair the origins of what its consumer computes from, outermost pair first."""
    members: dict[Pair, list[Value]] = {pair: [] for pair in pairs.by_consumer.values()}
    for pair, value in (*choice.stored, *choice.computed):
        members[pair].append(value)
    for pair, values in members.items():
        replay = pair.replay
        for value in sorted(values, key=_made_at):
            if (pair, value) in choice.stored:
                reading = first.get((pair, value))
                if reading is not None:
                    replay.origins[value] = Own(reading.consumed)
                    continue
                node = pair.along(Leaf(value, ()))
                site = _site(
                    None, Leaf(value, ()), node, region, _entries(node), decisions.min_bytes
                )
                if not site.kept:
                    site.reason = "residuals are computed from it"
                replay.origins[value] = Stored(site)
                decisions.sites.append(site)
            elif value.producer is None:
                replay.origins[value] = pairs.free_origin(pair, value) or pairs.outer_origin(
                    pair, value
                )
        pair.twins = {produced: consumed for consumed, produced in replay.rebuilds.items()}
        pair.twins.update(
            (value, origin.value)
            for value, origin in replay.origins.items()
            if isinstance(origin, Own)
        )
        if values:  # what inner bodies ask for may follow from nothing, such as an iota
            decisions.replays[pair.consumer] = replay


def _forwarded(operation: Operation) -> list[list[Value]]:
    """The results that may be moved; those that are one array inside are together."""
    groups: dict[tuple[int, ...], list[Value]] = {}
    for value in operation.results:
        if value.nbytes == 0 or not value.uses or value.output_positions:
            continue  # an output of the region is alive to its end in any case
        carried = operation.kind == "scan" and value.index < operation.spec.num_carry
        inside = tuple(id(body.outputs[value.index]) for body in operation.bodies)
        groups.setdefault((value.index,) if carried else inside, []).append(value)
    return list(groups.values())


def _hide(node: Node | None, hidden: set[Value]) -> None:
    """Adds the inputs of bodies through which a node descends further: they become tokens."""
    if node is None or isinstance(node, Leaf):
        return
    children = (node.inner,) if isinstance(node, ScanNode) else node.branches
    first = 0 if isinstance(node, ScanNode) else 1
    for branch, child in enumerate(children):
        if not isinstance(child, Leaf):
            hidden.update(
                operation.bodies[branch].inputs[number - first]
                for operation, number in node.consumers
            )
        _hide(child, hidden)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class _Reading:
    """One consumer of one leaf, and the pairs of bodies on the way to it, outermost first."""

    site: Site
    leaf: Leaf
    consumed: Value
    path: Path
    chain: Chain


def _readings(site: Site) -> list[_Reading]:
    found: list[_Reading] = []

    def visit(node: Node | None, path: Path) -> None:
        if node is None:
            return
        if isinstance(node, ScanNode):
            visit(node.inner, (*path, (node, 0)))
        elif isinstance(node, CondNode):
            for branch, child in enumerate(node.branches):
                visit(child, (*path, (node, branch)))
        else:
            for consumed in node.consumed:
                bodies = [consumed.region]
                while len(bodies) < len(path):
                    owner = bodies[0].owner
                    assert owner is not None
                    bodies.insert(0, owner.region)
                chain = tuple(
                    (step.producer.bodies[branch], body)
                    for (step, branch), body in zip(path, bodies, strict=True)
                )
                found.append(_Reading(site, node, consumed, path, chain))

    visit(site.node, ())
    return found


def _settle(
    site: Site,
    rebuilt: dict[tuple[Leaf, Value], str],
    reasons: dict[Leaf, str],
    decisions: Decisions,
) -> None:
    """Takes the rebuilt readings out of a site; without any left it is rebuilt as a whole."""
    assert site.node is not None
    node = _without(site.node, rebuilt)
    if node is not None:
        site.node = node
        site.leaf = leaves(node)[0].produced
        site.readers = {leaf.produced: len(leaf.consumed) for leaf in leaves(node)}
        decisions.sites.append(site)
        return
    reason = next(reasons[leaf] for leaf in leaves(site.node) if leaf in reasons)
    decisions.rebuilt.append(
        Rebuild(site.leaf, site.node, site.entry_bytes, site.entries, site.source, reason)
    )


def _without(node: Node | None, rebuilt: dict[tuple[Leaf, Value], str]) -> Node | None:
    if node is None:
        return None
    if isinstance(node, ScanNode):
        inner = _without(node.inner, rebuilt)
        return None if inner is None else dataclasses.replace(node, inner=inner)
    if isinstance(node, CondNode):
        branches = tuple(_without(branch, rebuilt) for branch in node.branches)
        moved = any(branch is not None for branch in branches)
        return dataclasses.replace(node, branches=branches) if moved else None
    left = tuple(value for value in node.consumed if (node, value) not in rebuilt)
    if len(left) == len(node.consumed):
        return node
    return Leaf(node.produced, left) if left else None


def _candidate(values: list[Value], min_bytes: int) -> Site | None:
    """The site of results that are one array inside."""
    value = values[0]
    structural = {
        (operation.position, number): (operation, number)
        for one in values
        for operation, number in one.uses
        if _is_structural(one, (operation, number))
    }
    uses = tuple(structural[place] for place in sorted(structural))
    if not uses:
        return None
    first = uses[0][0].position
    if any(
        operation.position >= first and (operation.position, number) not in structural
        for one in values
        for operation, number in one.uses
    ):
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
        reach=node,
        region=region,
        aval=produced.aval,
        entry_bytes=entry_bytes,
        entries=entries,
        source=source,
        reason="read again by the backward pass",
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


def _made_at(value: Value) -> tuple[int, int]:
    return (-1 if value.producer is None else value.producer.position, value.index)


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
