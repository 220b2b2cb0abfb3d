"""Decisions in the words of a plan."""

from __future__ import annotations

from jdynoff import jax_compat
from jdynoff.planning.budget import format_bytes
from jdynoff.planning.decisions import Decisions, Rebuild, Site
from jdynoff.planning.live_ranges import LiveTensor
from jdynoff.planning.plan import PlannedSite
from jdynoff.program.graph import Program


def describe(tensor: LiveTensor) -> str:
    """One line on one array: size, shape, dtype and where it is made."""
    shape = ", ".join(map(str, tensor.shape))
    return (
        f"{format_bytes(tensor.nbytes):>10}  {tensor.dtype}[{shape}]  "
        f"{tensor.source or 'argument of the step'}"
    )


def planned_loops(program: Program) -> list[PlannedSite]:
    """One entry for each `jdynoff.while_loop`; how many trips there are, only a run tells."""
    planned = []
    for operation in program.loops:
        nbytes = jax_compat.loop_frame_bytes(operation.eqn)
        if nbytes is not None:
            planned.append(
                PlannedSite(
                    source=operation.source,
                    shape=(nbytes,),
                    dtype="uint8",
                    entry_bytes=nbytes,
                    entries=0,
                    bytes=0,
                    action="offload",
                    tier="pool, then disk",
                    reason="kept by each trip of a jdynoff.while_loop, of which no number is known",
                )
            )
    return planned


def planned_sites(decisions: Decisions, on_disk: bool) -> list[PlannedSite]:
    """Every residual with its action, largest first."""
    planned = [_planned_site(site, on_disk) for site in decisions.sites]
    planned.extend(_planned_rebuild(rebuilt) for rebuilt in decisions.rebuilt)
    planned.extend(
        PlannedSite(
            source=spill.value.producer.source if spill.value.producer is not None else "",
            shape=tuple(spill.value.aval.shape),
            dtype=str(spill.value.aval.dtype),
            entry_bytes=spill.value.nbytes,
            entries=1,
            bytes=spill.value.nbytes,
            action="recompute",
            tier="xla",
            reason="follows cheaply from what is there",
        )
        for spill in decisions.spills
        if spill.site is None and not spill.fused
    )
    return sorted(planned, key=lambda site: -site.bytes)


def _planned_site(site: Site, on_disk: bool) -> PlannedSite:
    tier = "xla" if site.kept else ("pool, then disk" if on_disk else "pool")
    return PlannedSite(
        source=site.source,
        shape=tuple(site.aval.shape),
        dtype=str(site.aval.dtype),
        entry_bytes=site.entry_bytes,
        entries=site.entries,
        bytes=site.total_bytes,
        action="keep" if site.kept else "offload",
        tier=tier,
        reason=site.reason,
    )


def _planned_rebuild(rebuilt: Rebuild) -> PlannedSite:
    return PlannedSite(
        source=rebuilt.source,
        shape=tuple(rebuilt.leaf.aval.shape),
        dtype=str(rebuilt.leaf.aval.dtype),
        entry_bytes=rebuilt.entry_bytes,
        entries=rebuilt.entries,
        bytes=rebuilt.entry_bytes * rebuilt.entries,
        action="recompute",
        tier="xla",
        reason=rebuilt.reason,
    )
