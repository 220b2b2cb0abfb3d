"""What the rewritten program looks like, without running it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdynoff
from jdynoff.planning.sites import find_sites
from jdynoff.program.blocks import find_blocks
from jdynoff.program.build import build
from jdynoff.program.graph import Value
from jdynoff.program.order import shorten_live_ranges
from jdynoff.rewrite.emit import emit
from tests.programs import branches, libraries, loops, rules, straight
from tests.programs.example import Example, batch, descend, layer, normal, quick, weights
from tests.programs.rewritten import decide, program_of

WIDE = 64  # weights are WIDE x WIDE, activations are not


def scan_loss(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    "example",
    [
        loops.scanned_layers(1, False),
        loops.nested_scan(2, True),
        loops.two_backwards(),
        loops.accumulated(1),
        loops.fori_static(),
        branches.switch_in_scan(1),
        branches.wide_branches(),
        branches.scan_in_branch(),
        branches.computed_predicate(),
        branches.scan_in_switch_in_scan(),
        straight.unrolled_layers(),
        rules.custom_vjp(),
        libraries.haiku_stack(),
    ],
    ids=lambda example: example.name,
)
def test_weights_are_never_moved(example: Example) -> None:
    parameters, *rest = example.arguments()
    shapes = {leaf.shape[-2:] for leaf in jax.tree.leaves(parameters) if leaf.ndim >= 2}
    shapes |= {shape[::-1] for shape in shapes}
    activations = {leaf.shape[-2:] for leaf in jax.tree.leaves(rest)}
    program, _ = program_of(example.step, (parameters, *rest))
    # Straight-line spills are left out where control flow makes gradients of the weights' shapes.
    unrolled = len(program.regions) == 1
    moved = decide(program, share=0.0 if unrolled else None).moved()
    assert moved or not example.moves
    for site in moved:
        shape = tuple(site.aval.shape[-2:])
        assert shape not in shapes - activations, f"{site.aval} made at {site.source}"


def test_values_below_the_minimum_stay() -> None:
    program, _ = program_of(descend(scan_loss), (weights(), batch()))
    entry = batch().nbytes
    assert {site.entry_bytes for site in decide(program, min_bytes=entry).moved()} == {entry}
    assert decide(program, min_bytes=entry + 1).moved() == []


@pytest.mark.parametrize("unroll", [1, 2])
def test_no_stack_of_residuals_is_left(unroll: int) -> None:
    depth = 13
    arguments = (weights(depth=depth), batch())

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters, unroll=unroll)
        return jnp.mean(x**2)

    stack = f"f32[{depth},{','.join(map(str, batch().shape))}]"
    plain = quick(descend(loss)).lower(*arguments).compile().as_text()
    step = jdynoff.managed(quick(descend(loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
    assert stack in plain
    assert stack not in step.lower(*arguments).compile().as_text()


def test_a_branch_pushes_only_its_own_residuals() -> None:
    example = branches.wide_branches()
    arguments = example.arguments()
    step = jdynoff.managed(quick(example.step), budget="min", min_bytes=1, flops_per_byte=0.0)
    parameters, x, choices = arguments
    pushed = []
    for choice in range(3):
        step(parameters, x, choices * 0 + choice)
        pushed.append(step.stats().bytes_offloaded)
    widths = [into.shape[1] for into, _ in parameters]
    # The narrowest branch stores least, the widest most; what all store is the same.
    by_width = [size for _, size in sorted(zip(widths, pushed, strict=True))]
    assert by_width[0] < by_width[1] < by_width[2]


def unrolled(depth: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        for weight in parameters:
            x = layer(x, weight)
        return jnp.mean(x**2)

    one = jax.tree.map(lambda leaf: leaf[0], weights())
    return descend(loss), ([one] * depth, batch())


def staged(depth: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Several scans in a row, so that the number of regions grows as well."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        for stage in parameters:
            x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, stage)
        return jnp.mean(x**2)

    return descend(loss), ([weights()] * depth, normal(0, 4, 8))


def fanned(depth: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One value with as many readers as the program has layers, each beside one that dies there."""

    def loss(weight: Any, x: jax.Array) -> jax.Array:
        shared = x @ weight["in"]
        total = shared
        for _ in range(depth):
            total = jnp.tanh(total @ weight["out"]) * shared
        return jnp.mean(total**2)

    return descend(loss), ({name: normal(n, 8, 8) for n, name in enumerate(("in", "out"))}, batch())


def lines_executed(run: Callable[[], Any]) -> int:
    """How many lines of the package `run` executes: its work, without a clock."""
    package = os.path.dirname(jdynoff.__file__)
    count = 0

    def inside(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return inside

    def outside(frame: Any, event: str, _: Any) -> Any:
        return inside if frame.f_code.co_filename.startswith(package) else None

    before = sys.gettrace()
    sys.settrace(outside)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("make", [unrolled, staged, fanned], ids=lambda make: make.__name__)
def test_work_grows_with_the_size_of_the_program(make: Callable[[int], Any]) -> None:
    """Indexing, planning and emitting; what JAX itself does is not counted."""
    counts = []
    for depth in (6, 24):
        step, arguments = make(depth)
        traced = jax.jit(step).trace(*arguments)

        def run(traced: Any = traced, arguments: Any = arguments) -> None:
            program = build(traced.jaxpr)
            for region in program.regions:
                shorten_live_ranges(region)
            decisions = decide(program)
            counted = find_blocks(program).counted

            def rewritten(ticket: Any, *leaves: Any) -> Any:
                emitted = emit(program, decisions, ticket, leaves, counted=counted)
                return emitted.outputs, emitted.sentinel, list(emitted.counters.values())

            jax.jit(rewritten).trace(np.uint32(0), *jax.tree.leaves(arguments))

        counts.append(lines_executed(run))
    assert counts[0] > 1000
    assert counts[1] / counts[0] < 5.5  # of a program four times as large


def test_what_is_handed_on_twice_is_moved_once() -> None:
    def step(parameters: Any, x: jax.Array) -> Any:
        def forward(x: jax.Array, weight: Any) -> Any:
            y = layer(x, weight)
            return y, (y, y)

        def weigh(total: jax.Array, slices: Any) -> Any:
            return total + jnp.tanh(slices[0] @ slices[1]).sum(), None

        x, (first, second) = jax.lax.scan(forward, x, parameters)
        total, _ = jax.lax.scan(weigh, x.sum(), (first, parameters["in"]), reverse=True)
        total, _ = jax.lax.scan(weigh, total, (second, parameters["out"]))
        return total

    arguments = (weights(width=WIDE), normal(0, 4, WIDE))
    managed = jdynoff.managed(quick(step), budget="min", min_bytes=1, flops_per_byte=0.0)
    assert jnp.allclose(managed(*arguments), quick(step)(*arguments), rtol=1e-5)
    depth, entry = len(arguments[0]["in"]), 4 * WIDE * 4
    assert managed.stats().bytes_offloaded == depth * entry
    assert managed.stats().bytes_reloaded == 2 * depth * entry


def test_site_ids_do_not_depend_on_the_process_or_the_order_of_objects() -> None:
    example = branches.switch_in_scan(1)
    numbers = []
    for _ in range(2):
        program, _ = program_of(example.step, example.arguments())
        numbers.append([site.identifier for site in decide(program).sites])
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0])) == len(numbers[0])


def test_every_value_that_is_read_has_its_use_indexed() -> None:
    example = loops.nested_scan(2, True)
    program, _ = program_of(example.step, example.arguments())
    for region in program.regions:
        for operation in region.operations:
            for number, operand in enumerate(operation.operands):
                if isinstance(operand, Value):
                    assert (operation, number) in operand.uses
                    assert operand.region is region
    assert find_sites(program, 1).moved()


def test_the_graph_and_its_decisions_print_in_a_line() -> None:
    example = branches.scan_in_switch_in_scan()
    program, _ = program_of(example.step, example.arguments())
    decisions = decide(program)
    region = program.regions[-1]
    values = [value for operation in region.operations for value in operation.results]
    for thing in (
        program,
        *program.regions,
        *region.operations,
        *values,
        decisions,
        *decisions.sites,
        *(site.node for site in decisions.sites),
        *decisions.replays.values(),
    ):
        assert len(repr(thing)) < 300
