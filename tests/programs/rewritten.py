"""Carries out decisions without `managed`: any choice of sites, any pool, any tier.

`managed` picks one set of decisions for a budget. Exactness must hold for all of them, also for
those that no budget would choose.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jdynoff._native import Manager
from jdynoff.planning.by_path import held_bytes
from jdynoff.planning.decisions import Decisions, Site
from jdynoff.planning.live_ranges import Simulation
from jdynoff.planning.residency import residency
from jdynoff.planning.sites import find_sites, number_sites
from jdynoff.primitives import transfer
from jdynoff.program.blocks import Blocks, find_blocks
from jdynoff.program.build import build
from jdynoff.program.graph import Program
from jdynoff.program.order import shorten_live_ranges
from jdynoff.rewrite.emit import emit
from tests.programs.example import quick


@dataclasses.dataclass
class Rewritten:
    """A step under one set of decisions, compiled."""

    program: Program
    blocks: Blocks
    decisions: Decisions
    compiled: Any
    counters: Any = None  # of the last run, one array for each counted operation

    def run(
        self, arguments: tuple[Any, ...], manager: Manager, pool_bytes: int | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Runs it once.

        Args:
          arguments: of the step.
          manager: where its entries go.
          pool_bytes: memory for them; None for all that they need.

        Returns:
          The step's results and the manager's record of the run.
        """
        held = held_bytes(self.program, self.blocks, self.decisions).worst
        pool = held if pool_bytes is None else pool_bytes
        ticket = manager.open(pool, held if pool < held else 0, expected_bytes=held)
        try:
            results, sentinel, self.counters = self.compiled(np.uint32(ticket), *arguments)
            jax.block_until_ready(results)
            assert int(sentinel) == ticket
        finally:
            manager.close(ticket)
        return results, manager.stats(ticket)


def program_of(step: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Program, Any]:
    """The indexed program of a step, and the structure of its results."""
    traced = jax.jit(step).trace(*arguments)
    program = build(traced.jaxpr)
    for region in program.regions:
        shorten_live_ranges(region)
    return program, jax.tree.structure(traced.out_info)


def decide(
    program: Program,
    *,
    min_bytes: int = 1,
    keep: Callable[[Sequence[Site]], Sequence[Site]] = lambda sites: (),
    share: float | None = 0.0,
    price: float = 0.0,
) -> Decisions:
    """Makes decisions that need not come from any budget.

    Args:
      program: the step.
      min_bytes: arrays smaller than this stay.
      keep: chooses the sites that stay in XLA.
      share: where between the least possible and the unspilled peak straight-line code is to
        stay; None leaves it alone.
      price: FLOPs to pay for computing again rather than move one byte.
    """
    decisions = find_sites(program, min_bytes, price)
    for site in keep(decisions.moved()):
        site.kept = True
    if share is not None:
        simulation = Simulation(program, decisions, residency(program, decisions))
        least, most = simulation.lower_bound(), simulation.peak()
        decisions.spills = simulation.spill(int(least + share * max(most - least, 0)))
    number_sites(decisions.sites)
    return decisions


def rewrite(step: Callable[..., Any], arguments: tuple[Any, ...], **choices: Any) -> Rewritten:
    """Rewrites and compiles a step; `choices` are those of `decide`."""
    transfer.register_handlers()
    program, structure = program_of(step, arguments)
    decisions = decide(program, **choices)
    blocks = find_blocks(program)

    def rewritten(ticket: Any, *arguments: Any) -> Any:
        leaves = jax.tree.leaves(arguments)
        emitted = emit(program, decisions, ticket, leaves, counted=blocks.counted)
        results = jax.tree.unflatten(structure, emitted.outputs)
        return results, emitted.sentinel, list(emitted.counters.values())

    lowered = quick(rewritten).lower(np.uint32(0), *arguments)
    return Rewritten(program, blocks, decisions, lowered.compile())
