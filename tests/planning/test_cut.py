"""What to store and what to compute again: the choice is the cheapest one there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdynoff.planning.cost import flops
from jdynoff.planning.cut import Network, expected_executions
from jdynoff.planning.decisions import Decisions
from jdynoff.planning.pairs import Pairs
from jdynoff.planning.predict import replayed
from jdynoff.planning.recompute import can_replay
from jdynoff.planning.sites import find_sites
from jdynoff.program.graph import Value
from jdynoff.program.structure import CondNode, Leaf, ScanNode, leaves
from tests.programs import branches
from tests.programs.example import descend, normal
from tests.programs.rewritten import program_of

ROWS, WIDTH, DEPTH = 512, 16, 3  # so large that a product costs about what its bytes are worth
Layer = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]

STEPS: dict[str, Layer] = {  # of the last value, the one before, and two weights
    "matmul": lambda x, y, w, v: x @ w,
    "sin": lambda x, y, w, v: jnp.sin(x),
    "wide": lambda x, y, w, v: jnp.tanh(x @ v) @ v.T,
    "sum": lambda x, y, w, v: x * jnp.sum(y, -1, keepdims=True),
    "add": lambda x, y, w, v: x + y,
}


def scanned(steps: tuple[str, ...]) -> Any:
    """The program of a scan whose body is `steps`, after a product."""

    def body(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        last, before = x @ weights[0], x
        for step in steps:
            last, before = STEPS[step](last, before, *weights), last
        return 0.1 * last, None

    def loss(weights: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

    weights = normal(0, DEPTH, WIDTH, WIDTH), normal(1, DEPTH, WIDTH, 3 * WIDTH)
    program, _ = program_of(descend(loss), (weights, normal(2, ROWS, WIDTH)))
    return program


def cheapest(residuals: list[Value], pairs: Pairs, price: float) -> float:
    """By trying every set of stored values."""
    (pair,) = pairs.by_consumer.values()
    times = expected_executions(pair.producer)
    worth = max(price, 4.0)
    cone: dict[Value, None] = {}
    waiting = list(residuals)
    while waiting:
        value = waiting.pop()
        if value in cone or (value.producer is None and pairs.free_origin(pair, value)):
            continue
        cone[value] = None
        if value.producer is not None and can_replay(value.producer, price):
            waiting.extend(o for o in value.producer.operands if isinstance(o, Value))
    best = math.inf
    for choice in itertools.product([False, True], repeat=len(cone)):
        stored = {value for value, chosen in zip(cone, choice, strict=True) if chosen}
        cost = sum(worth * (value.nbytes + 4096) * times for value in stored)
        made = set()
        waiting = list(residuals)
        while waiting and cost < best:
            value = waiting.pop()
            if value in stored or value not in cone:
                continue
            if value.producer is None or not can_replay(value.producer, price):
                cost = math.inf
            elif value.producer not in made:
                made.add(value.producer)
                cost += flops(value.producer) * times
                waiting.extend(o for o in value.producer.operands if isinstance(o, Value))
        best = min(best, cost)
    return best


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(
    steps=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3).map(tuple),
    price=st.sampled_from([0.0, 1.0, 5.0, 8.0, 16.0, 64.0]),
)
def test_no_other_choice_costs_less(steps: tuple[str, ...], price: float) -> None:
    program = scanned(steps)
    forward, backward = (op for op in program.top.operations if op.kind == "scan")
    pairs = Pairs(program.top, 0, {}, set())
    pair = pairs.find(((forward.bodies[0], backward.bodies[0]),), ())
    assert pair is not None
    stacked = [r for r in forward.results[forward.spec.num_carry :] if r.uses]
    residuals = [forward.bodies[0].outputs[result.index] for result in stacked]
    residuals = list(dict.fromkeys(v for v in residuals if isinstance(v, Value) and v.nbytes))
    chosen = Network([(pair, value) for value in residuals], pairs, price).solve()
    times = expected_executions(pair.producer)
    worth = max(price, 4.0)
    found = sum(worth * (value.nbytes + 4096) * times for _, value in chosen.stored)
    operations = {value.producer for _, value in chosen.computed if value.producer is not None}
    found += sum(flops(operation) * times for operation in operations)
    if len(chosen.stored) + len(operations) <= 14:
        # Costs are rounded up to a 2^30th of what storing all residuals costs.
        assert found <= cheapest(residuals, pairs, price) * (1 + 1e-6) + 1e-3


def chunked_attention(parameters: Any, x: jax.Array) -> jax.Array:
    """Layers that attend in chunks of rows, with a bias that the layer makes from its input."""

    def layer(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
        keys, bias = x @ weight["k"], (x @ weight["b"]).T

        def chunk(_: None, rows: jax.Array) -> tuple[None, jax.Array]:
            logits = (rows @ weight["q"]) @ keys.T + bias
            return None, jax.nn.softmax(logits) @ x

        _, mixed = jax.lax.scan(chunk, None, x.reshape(4, -1, x.shape[-1]))
        return x + mixed.reshape(x.shape), None

    x, _ = jax.lax.scan(layer, x, parameters)
    return jnp.mean(x**2)


@pytest.mark.parametrize("price", [0.0, 32.0])
def test_inner_bodies_start_from_what_the_body_around_computes_again(price: float) -> None:
    """Keys and bias come from products of the layer; the logits in the chunks follow from them."""
    rows, width = 256, 8
    weights = {
        "q": normal(0, DEPTH, width, width),
        "k": normal(1, DEPTH, width, width),
        "b": normal(2, DEPTH, width, 1),
    }
    program, _ = program_of(descend(chunked_attention), (weights, normal(3, rows, width)))
    decisions = find_sites(program, 1, price)
    logits = [site for site in decisions.moved() if site.entry_bytes >= rows // 4 * rows * 4]
    again = [op for op, _ in replayed(decisions) if op.name == "dot_general"]
    assert bool(logits) == (price == 0.0)
    assert bool(again) == (price > 0.0)
    # What the layer computes for its chunks alone is counted there: the bias, in the layer's body.
    layers = {region for op, region in replayed(decisions) if op.results[0].aval.shape == (rows, 1)}
    assert len(layers) == (price > 0.0)


def test_what_one_branch_needs_is_stored_in_that_branch() -> None:
    example = branches.switch_in_scan(1)
    program, _ = program_of(example.step, example.arguments())
    moved = find_sites(program, 1).moved()
    per_branch = {len(leaves(site.node)) for site in moved if isinstance(site.node, ScanNode)}
    assert moved
    # The last branch is the identity and stores nothing, so what has a leaf outside of the branches
    # was made outside of them: JAX 0.12 saves the layer's input itself, not each branch's copy.
    for site in moved:
        if not isinstance(site.node.inner, CondNode):
            assert isinstance(site.node.inner, Leaf)
            assert site.node.inner.produced.producer is None
    assert max(per_branch) < 3


def test_at_a_negative_price_only_layout_is_done_again() -> None:
    program = scanned(("matmul", "sin"))
    again: Decisions = find_sites(program, 1, -1.0)
    assert all(flops(operation) == 0 for operation, _ in replayed(again))


def test_a_spread_price_divides_products_of_one_width() -> None:
    def body(x: jax.Array, weights: jax.Array) -> tuple[jax.Array, None]:
        for weight in weights:
            x = x + jnp.sin(jnp.tanh(x @ weight) @ weight)
        return x, None

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(body, x, weights)[0] ** 2)

    width = 64  # a product costs 2 * 64 / 4 = 32 FLOPs for each byte of its result
    program, _ = program_of(
        descend(loss), (normal(0, DEPTH, 4, width, width), normal(1, 4096, width))
    )

    def moved(price: float, spread: float) -> int:
        return sum(
            site.total_bytes for site in find_sites(program, 1, price, spread=spread).moved()
        )

    prices = [30.0 + 0.5 * number for number in range(20)]
    whole = [moved(price, 0.0) for price in prices]
    divided = [moved(price, 0.1) for price in prices]
    assert (divided[0], divided[-1]) == (whole[0], whole[-1])
    assert divided == sorted(divided, reverse=True)
    # All but the last of the layers' products change sides at two prices, or at many.
    assert len(set(whole)) == 3
    assert len(set(divided)) >= 6
