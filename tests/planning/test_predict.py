"""Predicted times follow from the rates, and what is computed again is counted while it lives."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdynoff.planning.cost import region_flops
from jdynoff.planning.decisions import Decisions
from jdynoff.planning.machine import Machine
from jdynoff.planning.predict import Load, Model, replayed
from jdynoff.planning.rebuilt_ranges import rebuilt_ranges
from jdynoff.planning.residency import residency
from jdynoff.planning.sites import find_sites
from tests.programs.example import descend, normal
from tests.programs.rewritten import program_of

DEPTH, ROWS, WIDTH = 4, 16, 8
BLOCK = 32 << 20  # the smallest that malloc gives back to the kernel
# 3 s of computing would be 3e6 FLOPs; memory is so fast that arithmetic alone counts.
MACHINE = Machine("made up", 1e6, math.inf, 1e3, 1e4, 100.0, 200.0, 0.5)


def loss(parameters: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        shared = x @ weight  # no residual: both functions of it are
        first = jnp.sin(shared) @ weight
        return jnp.cos(first) * jnp.tanh(shared) + x, None

    return jnp.mean(jax.lax.scan(layer, x, parameters)[0] ** 2)


@pytest.fixture(scope="module")
def program() -> Any:
    return program_of(descend(loss), (normal(0, DEPTH, WIDTH, WIDTH), normal(1, ROWS, WIDTH)))[0]


def test_each_rate_has_its_part(program: Any) -> None:
    model = Model(program, MACHINE)
    assert model.flops == region_flops(program.top)
    assert model.compute_seconds == pytest.approx(model.flops / 1e6)
    found = model.predict(
        Decisions(),
        Load(
            offloaded_bytes=1_000,
            reloaded_bytes=3_000,
            calls=6,
            held_bytes=500,
            pool_bytes=200,
            temporary_bytes=BLOCK,
        ),
    )
    assert found.memory_seconds == BLOCK / 1e3
    assert found.copy_seconds == pytest.approx(4_000 / 1e4 + 6 * 0.5)
    third = model.compute_seconds / 3
    out, back = 600 / 100.0, 1_800 / 200.0  # three fifths of what is held do not fit
    assert found.stall_seconds == pytest.approx(
        max(out - third, 0) + max(back - (model.compute_seconds - third), 0)
    )
    assert out > third  # or the parts of the last line would not be told apart
    assert back > model.compute_seconds - third
    assert found.step_seconds == pytest.approx(
        model.compute_seconds + found.memory_seconds + found.copy_seconds + found.stall_seconds
    )


def test_a_small_block_is_there_from_the_step_before(program: Any) -> None:
    model = Model(program, MACHINE)
    assert model.predict(Decisions(), Load(temporary_bytes=BLOCK - 1)).memory_seconds == 0


def test_what_is_computed_again_is_added_as_often_as_it_runs(program: Any) -> None:
    decisions = find_sites(program, 1, math.inf)
    products = sum(operation.name == "dot_general" for operation, _ in replayed(decisions))
    assert products == 2
    found = Model(program, MACHINE).predict(decisions, Load())
    of_products = DEPTH * products * 2 * ROWS * WIDTH * WIDTH
    assert of_products <= found.extra_flops <= 1.3 * of_products
    assert found.extra_seconds == pytest.approx(found.extra_flops / 1e6)


def test_what_two_chains_share_is_alive_from_one_to_the_other(program: Any) -> None:
    decisions = find_sites(program, 1, math.inf)
    (ranges,) = rebuilt_ranges(decisions, residency(program, decisions)).values()
    shared = [found for found in ranges if found.last > found.first]
    assert shared
    assert all(found.nbytes == ROWS * WIDTH * 4 for found in shared)
    kept = find_sites(program, 1, -1.0)
    assert not any(rebuilt_ranges(kept, residency(program, kept)).values())
