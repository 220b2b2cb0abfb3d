"""What XLA never builds is not counted, and what it is made from is alive in its place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdynoff
from jdynoff.planning import search
from jdynoff.planning.decisions import Decisions
from jdynoff.planning.fusion import Fusion
from jdynoff.planning.live_ranges import Simulation
from jdynoff.planning.machine import ASSUMED_CPU, FILE_VARIABLE, write_machine
from jdynoff.planning.plan import MemoryUse
from jdynoff.planning.residency import residency
from jdynoff.planning.sites import find_sites, number_sites
from jdynoff.primitives import transfer
from jdynoff.program.graph import Program, Value
from jdynoff.rewrite.emit import emit
from tests.programs.example import normal
from tests.programs.rewritten import program_of

WIDTH, ROWS, DEPTH = 64, 2048, 8


def fusion_of(step: Callable[..., Any], *arguments: Any) -> tuple[Program, Fusion]:
    program, _ = program_of(step, arguments)
    return program, Fusion(residency(program, Decisions()), ())


def results_of(program: Program, name: str) -> list[Value]:
    return [one.results[0] for one in program.top.operations if one.name == name]


def test_cheap_values_between_products_are_fused() -> None:
    def step(x: jax.Array, w: jax.Array) -> Any:
        made = x @ w
        shifted = made * 2.0 + 1.0
        return jnp.sum(shifted), jnp.sum(shifted * made)

    program, fusion = fusion_of(step, normal(0, ROWS, WIDTH), normal(1, WIDTH, WIDTH))
    (product,) = results_of(program, "dot_general")
    assert not fusion.is_fused(product)
    shifted = results_of(program, "add")[0]
    assert fusion.is_fused(shifted)
    assert fusion.roots(shifted) == [product]
    sums = [one.position for one in program.top.operations if one.name == "reduce_sum"]
    assert fusion.positions(product)[-1] == sums[-1]


@pytest.mark.parametrize(
    ("reader", "built"),
    [
        (lambda y, w: jnp.sum(y), False),
        (lambda y, w: y @ w, True),
        (lambda y, w: y, True),
        (lambda y, w: jax.lax.cond(w[0, 0] > 0, jnp.sum, jnp.max, y), True),
    ],
    ids=["sum", "product", "output", "branch"],
)
def test_what_is_needed_as_an_array_is_built(reader: Any, built: bool) -> None:
    program, fusion = fusion_of(
        lambda x, w: reader((x @ w) * 2.0, w), normal(0, ROWS, WIDTH), normal(1, WIDTH, WIDTH)
    )
    assert fusion.is_fused(results_of(program, "mul")[0]) != built


@pytest.mark.parametrize("readers", [1, 2])
def test_what_is_dear_is_computed_once(readers: int) -> None:
    def step(x: jax.Array, w: jax.Array) -> Any:
        dear = jnp.tanh(x @ w)
        return [jnp.sum(dear), jnp.max(dear)][:readers]

    program, fusion = fusion_of(step, normal(0, ROWS, WIDTH), normal(1, WIDTH, WIDTH))
    assert fusion.is_fused(results_of(program, "tanh")[0]) == (readers == 1)


def test_a_long_sum_does_not_keep_all_its_terms() -> None:
    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        total = x
        for _ in range(20):
            total = total + x @ w
            w = w * 0.5
        return jnp.sum(total)

    program, fusion = fusion_of(step, normal(0, ROWS, WIDTH), normal(1, WIDTH, WIDTH))
    assert all(len(fusion.operands(one)) <= 3 for one in program.top.operations)


def layers(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = x + jax.nn.gelu(jnp.tanh(x @ weight) @ weight)
    return jnp.mean(x**2)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, None])
def test_straight_line_code_is_simulated_as_xla_allocates_it(share: float | None) -> None:
    arguments = [normal(n, WIDTH, WIDTH) for n in range(DEPTH)], normal(DEPTH, ROWS, WIDTH)
    program, _ = program_of(jax.grad(layers), arguments)
    decisions = find_sites(program, 1, 0.0)
    # As for a plan with the least memory, and as for one with an allowance.
    fuses = share != 0.0
    simulation = Simulation(program, decisions, residency(program, decisions), fuses)
    least, simulated = simulation.lower_bound(), simulation.peak()
    if share is not None:
        decisions.spills = simulation.spill(int(least + share * (simulated - least)))
        simulated = simulation.spilled_peak
    number_sites(decisions.sites)
    transfer.register_handlers()

    def rewritten(ticket: Any, *leaves: Any) -> Any:
        emitted = emit(program, decisions, ticket, leaves)
        return emitted.outputs, emitted.sentinel

    leaves = jax.tree.leaves(arguments)
    compiled = jax.jit(rewritten).lower(np.uint32(0), *leaves).compile()
    found = MemoryUse.of(compiled.memory_analysis()).temporary_bytes
    assert 0.75 <= simulated / found <= 1.25


@pytest.mark.parametrize("trusting", [False, True])
def test_the_least_is_not_what_xla_makes_much_larger(
    trusting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Straight-line replays of products: XLA keeps what the schedule was to let go."""
    machine = dataclasses.replace(
        ASSUMED_CPU, flops_per_second=1e13, copy_bytes_per_second=1e8, out_bytes_per_second=1e7
    )
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "machine.json"))
    write_machine(machine)
    if trusting:
        monkeypatch.setattr(search, "_MISLED", np.inf)
    arguments = [normal(n, WIDTH, WIDTH) for n in range(12)], normal(99, 8 * ROWS, WIDTH)
    plan = jdynoff.managed(jax.jit(jax.grad(layers)), budget="min").plan(*arguments)
    assert (plan.memory.temporary_bytes > 1.5 * plan.simulated_bytes) == trusting
