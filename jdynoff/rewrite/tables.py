"""Indexes decisions by the operation, region or value at which the emitter must act."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping

from jdynoff.planning.decisions import Decisions, Replay, Site, Spill
from jdynoff.planning.residency import Residency
from jdynoff.program.graph import Constant, Operation, Program, Region, Value
from jdynoff.program.structure import Leaf, Node, ScanNode, token_shape


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Export:
    """A site's token that a body returns; `made` is False in branches that store nothing."""

    site: Site
    made: bool
    constant: Constant | None  # what this body stores, if it is no value of the body
    shape: tuple[int, ...]


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Tables:
    """Where each site acts. All lookups of the emitter are here; it decides nothing."""

    exports: dict[Region, list[Export]]  # tokens that a body returns, in order
    imports: dict[Region, list[Site]]  # tokens that a body receives, in order
    offload: dict[Value, list[Site]]  # right after this value exists
    parked: dict[Value, Site]  # this value is reloaded at its first use
    evict: dict[Operation, list[Spill]]  # after this operation
    replays: dict[Region, Replay]
    touched: set[Operation]  # control flow that must be emitted anew
    calling: set[Operation]  # control flow that calls the manager inside
    residency: Residency
    counted: Mapping[Operation, int]  # operations that have a counter, and its length
    counted_in: dict[Operation, list[Operation]]  # of these, the ones that bodies contain


def build_tables(
    program: Program,
    decisions: Decisions,
    residency: Residency,
    calling: set[Operation],
    counted: Mapping[Operation, int],
) -> Tables:
    """One walk over the decisions, and one over what is counted."""
    tables = Tables(
        exports=defaultdict(list),
        imports=defaultdict(list),
        offload=defaultdict(list),
        parked={},
        evict=defaultdict(list),
        replays=decisions.replays,
        touched=set(),
        calling=calling,
        residency=residency,
        counted=counted,
        counted_in=defaultdict(list),
    )
    for site in decisions.sites:
        if site.carried_out and site.node is not None:
            _place(site, site.node, tables)
            _touch_node(site.reach or site.node, tables)
    for rebuilt in decisions.rebuilt:
        _touch_node(rebuilt.node, tables)
    for spill in decisions.spills:
        for operation in spill.evictions:
            tables.evict[operation].append(spill)
        _touch_around(spill.value.region, tables)
    for loop in program.loops:
        _touch_around(loop.region, tables)
    for operation in counted:
        if operation.kind == "while":  # counts its own iterations
            tables.touched.add(operation)
            tables.counted_in[operation].append(operation)
        owner = operation.region.owner
        while owner is not None:
            tables.touched.add(owner)
            tables.counted_in[owner].append(operation)
            owner = owner.region.owner
    for operation in list(tables.touched):
        _touch_around(operation.region, tables)
    return tables


def _place(site: Site, node: Node, tables: Tables) -> None:
    if isinstance(node, Leaf):
        if isinstance(node.produced, Value):
            tables.offload[node.produced].append(site)
        for value in node.consumed:
            tables.parked[value] = site
        return
    tables.touched.add(node.producer)
    tables.touched.update(operation for operation, _ in node.consumers)
    inner = (node.inner,) if isinstance(node, ScanNode) else node.branches
    shape = next(token_shape(child) for child in inner if child is not None)
    for branch, child in enumerate(inner):
        produced = child.produced if isinstance(child, Leaf) else None
        constant = produced if isinstance(produced, Constant) else None
        tables.exports[node.producer.bodies[branch]].append(
            Export(site, child is not None, constant, shape)
        )
        for operation in {operation for operation, _ in node.consumers}:
            tables.imports[operation.bodies[branch]].append(site)
        if child is not None:
            _place(site, child, tables)


def _touch_node(node: Node, tables: Tables) -> None:
    if isinstance(node, Leaf):
        return
    tables.touched.add(node.producer)
    tables.touched.update(operation for operation, _ in node.consumers)
    for child in (node.inner,) if isinstance(node, ScanNode) else node.branches:
        if child is not None:
            _touch_node(child, tables)


def _touch_around(region: Region, tables: Tables) -> None:
    owner = region.owner
    while owner is not None:
        tables.touched.add(owner)
        owner = owner.region.owner
