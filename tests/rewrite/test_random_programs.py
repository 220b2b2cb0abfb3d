"""Rewriting is the identity: random programs, first and second derivatives, random decisions.

`JDYNOFF_TEST_EXAMPLES=200` runs more of them, and others each time.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from jax import lax

from jdynoff._native import PAGE_BYTES, Manager
from jdynoff.planning.decisions import Site
from tests.programs.example import difference_in_ulps, normal, quick
from tests.programs.interpret import assert_counted
from tests.programs.rewritten import rewrite

COUNT = int(os.environ.get("JDYNOFF_TEST_EXAMPLES", "0"))
ROWS, WIDTH, LENGTH = 2, 3, 4

# Chains of a dozen operations in which a product of matrices may be summed in another order.
ULPS = 512.0


@dataclasses.dataclass(frozen=True)
class Plain:
    """One operation on the state x, shape=(ROWS, WIDTH), with the weight, shape=(WIDTH, WIDTH)."""

    name: str


@dataclasses.dataclass(frozen=True)
class Scan:
    """A scan of `body`; it may stack its states, and another scan then reads them."""

    body: tuple[Any, ...]
    unroll: int | bool
    reverse: bool
    stack: str  # "", "forward" or "reverse": how a second scan reads the states


@dataclasses.dataclass(frozen=True)
class Branch:
    """A switch over bodies on an index that is data, or that is computed from x."""

    bodies: tuple[tuple[Any, ...], ...]
    computed: bool


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A rematerialised body."""

    body: tuple[Any, ...]


PLAIN: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sin": lambda x, w: jnp.sin(x),
    "multiply": lambda x, w: x * jnp.cos(x),
    "matmul": lambda x, w: x @ w,
    "transposed": lambda x, w: jnp.tanh(x) @ w.T,
    "softmax": lambda x, w: jax.nn.softmax(x @ w),
    "normalise": lambda x, w: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 0.1),
    "reduce": lambda x, w: x - jnp.sum(x, 0),
    "weight": lambda x, w: x + jnp.sin(w).sum(0),
}


def bodies(inner: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(inner, min_size=1, max_size=most).map(tuple)


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            Scan,
            bodies(inner),
            st.sampled_from([1, 2, 3, True]),
            st.booleans(),
            st.sampled_from(["", "forward", "reverse"]),
        ),
        st.builds(
            Branch, st.lists(bodies(inner, 2), min_size=2, max_size=3).map(tuple), st.booleans()
        ),
        st.builds(Checkpoint, bodies(inner, 2)),
    )


leaf = st.sampled_from(sorted(PLAIN)).map(Plain)
programs = bodies(st.one_of(nest(leaf), nest(st.one_of(leaf, nest(leaf))), leaf), most=3)


NORMALISE, SOFTMAX, MATMUL = Plain("normalise"), Plain("softmax"), Plain("matmul")
TOKENS_IN_BRANCHES = (
    Checkpoint((Checkpoint((NORMALISE, SOFTMAX)),)),
    Branch(
        (
            (
                Scan((NORMALISE, SOFTMAX, Plain("multiply")), 1, True, "reverse"),
                Branch(((MATMUL,), (Plain("reduce"), SOFTMAX)), False),
            ),
            (
                Branch(((Plain("transposed"), Plain("sin")), (MATMUL,)), False),
                Branch(
                    (
                        (Plain("weight"), Plain("multiply")),
                        (NORMALISE, SOFTMAX),
                        (MATMUL,),
                    ),
                    True,
                ),
            ),
            (Branch(((Plain("transposed"), Plain("multiply")), (Plain("weight"),)), True),),
        ),
        False,
    ),
    Checkpoint((SOFTMAX,)),
)


def run(body: Sequence[Any], x: jax.Array, weights: jax.Array, index: jax.Array) -> jax.Array:
    """Interprets a program on a state; `weights` has shape=(LENGTH, WIDTH, WIDTH)."""
    for part in body:
        if isinstance(part, Plain):
            x = PLAIN[part.name](x, weights[0])
        elif isinstance(part, Checkpoint):
            x = jax.checkpoint(lambda x, w, i, part=part: run(part.body, x, w, i))(
                x, weights, index
            )
        elif isinstance(part, Branch):
            chosen = index
            if part.computed:
                chosen = (x.sum() > 0).astype(jnp.int32) + index
            x = lax.switch(
                chosen,
                [lambda x, w, b=b: run(b, x, w, index) for b in part.bodies],
                x,
                weights,
            )
        else:
            x = _scan(part, x, weights, index)
    return x


def _scan(part: Scan, x: jax.Array, weights: jax.Array, index: jax.Array) -> jax.Array:
    def step(x: jax.Array, slices: Any) -> tuple[jax.Array, jax.Array]:
        weight, i = slices
        rolled = weights.at[0].set(weight)
        return 0.5 * run(part.body, x, rolled, i) + x, jnp.sin(x)

    indices = (jnp.arange(LENGTH) + index) % 3
    x, states = lax.scan(step, x, (weights, indices), unroll=part.unroll, reverse=part.reverse)
    if part.stack:
        x, _ = lax.scan(
            lambda x, s: (jnp.tanh(x + s), None), x, states, reverse=part.stack == "reverse"
        )
    return x


def derivative(kind: str, body: Sequence[Any]) -> Callable[..., Any]:
    """The step: a derivative of the program's mean square."""

    def loss(weights: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.mean(run(body, x, weights, index) ** 2)

    def penalty(weights: jax.Array, x: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.sum(jax.grad(loss, argnums=1)(weights, x, index) ** 2)

    def two(weights: jax.Array, x: jax.Array, index: jax.Array) -> Any:
        value, pull = jax.vjp(lambda w: run(body, x, w, index), weights)
        return pull(value), pull(jnp.cos(value))

    def product(weights: jax.Array, x: jax.Array, index: jax.Array) -> Any:
        return jax.jvp(lambda w: jax.grad(loss)(w, x, index), (weights,), (weights,))

    return {
        "gradient": jax.value_and_grad(loss, argnums=(0, 1)),
        "second": jax.value_and_grad(penalty),
        "product": product,
        "two backwards": two,
    }[kind]


@settings(
    max_examples=COUNT or 8,
    phases=(Phase.explicit, Phase.generate),  # shrinking compiles for minutes
    derandomize=COUNT == 0,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@example(  # a stack that is moved as a whole from a branch that returns nothing else of it
    body=TOKENS_IN_BRANCHES[1:2],
    kind="second",
    index=0,
    kept=18338,
    share=None,
    pages=9,
    price=0.0,
)
@example(  # inputs of branches that arrive as tokens, where a byte is dear
    body=TOKENS_IN_BRANCHES,
    kind="second",
    index=1,
    kept=5209,
    share=None,
    pages=9,
    price=math.inf,
)
@given(
    body=programs,
    kind=st.sampled_from(["gradient", "gradient", "second", "product", "two backwards"]),
    index=st.integers(0, 2),
    kept=st.integers(0, 2**16 - 1),
    share=st.sampled_from([0.0, 0.0, 0.5, None]),
    pages=st.sampled_from([3, 9, None]),
    price=st.sampled_from([-1.0, 0.0, 0.0, 16.0, math.inf]),
)
def test_a_rewritten_random_program_gives_the_same_results(
    body: tuple[Any, ...],
    kind: str,
    index: int,
    kept: int,
    share: float | None,
    pages: int | None,
    price: float,
    spill_directory: Path,
) -> None:
    def keep(sites: Sequence[Site]) -> Sequence[Site]:
        return [site for number, site in enumerate(sites) if kept >> (number % 16) & 1]

    step = derivative(kind, body)
    arguments = (
        normal(1, LENGTH, WIDTH, WIDTH),
        normal(2, ROWS, WIDTH),
        jnp.asarray(index, jnp.int32),
    )
    expected = quick(step)(*arguments)
    # Without a disk, what is reserved for the worst path must hold every path.
    manager = Manager(None if pages is None else str(spill_directory))
    for choose in (lambda sites: (), keep):
        rewritten = rewrite(step, arguments, keep=choose, share=share, price=price)
        pool = None if pages is None else pages * PAGE_BYTES
        found, record = rewritten.run(arguments, manager, pool)
        assert difference_in_ulps(expected, found) <= ULPS
        assert record["entries_unread"] == 0
        assert_counted(rewritten, arguments)
    assert manager.totals()["live_entries"] == 0
    manager.shutdown()
