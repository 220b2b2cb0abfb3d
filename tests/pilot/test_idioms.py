"""Idioms of small regions are those that a reader would name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdynoff.pilot.idioms import IDIOMS, equation_counts, idioms, position
from tests.programs.rewritten import program_of

X = np.ones((64, 64), np.float32)
ROWS = np.arange(32)


def of(step, *arguments) -> dict[str, float]:
    program, _ = program_of(step, arguments)
    return dict(zip(IDIOMS, idioms(program.top).tolist(), strict=True))


@pytest.mark.parametrize(
    ("idiom", "step"),
    [
        ("transpose", lambda x: x.T),
        ("gather", lambda x: x[ROWS * 2 % 7]),
        ("scatter", lambda x: x.at[ROWS * 2 % 7].add(1.0)),
        ("reduction", lambda x: jnp.sum(x)),
        ("reduction", lambda x: jnp.cumsum(x, axis=0)),
        ("stream", lambda x: jnp.tanh(x)),
        ("stencil", lambda x: jnp.concatenate([x[1:], x[:-1]])),
        ("matmul", lambda x: x @ x),
    ],
)
def test_names_the_idiom(idiom, step) -> None:
    found = of(step, X)
    assert max(found, key=found.get) == idiom
    assert 0 < found[idiom] <= 1.5


def test_a_scan_counts_with_its_length_and_a_branch_with_the_mean() -> None:
    def bytes_of(step):
        return np.expm1(of(step, X)["stream"] * np.log1p(2**30))

    once = bytes_of(lambda x: jnp.sin(x))
    scanned = bytes_of(lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=10)[0])
    branched = bytes_of(lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, lambda y: y, x))
    assert scanned == pytest.approx(10 * once, rel=0.01)
    assert branched == pytest.approx(once / 2, rel=0.1)


def test_equations_have_one_column_for_each_name() -> None:
    regions = [program_of(step, (X,))[0].top for step in (jnp.sin, lambda x: jnp.cos(jnp.sin(x)))]
    found = equation_counts(regions)
    assert found.shape == (2, 2)
    assert found[0, 0] == 0  # cos
    assert found[0, 1] > 0


def test_positions_differ() -> None:
    rows = np.stack([position(i, 40) for i in range(40)])
    distances = np.linalg.norm(rows[:, None] - rows[None], axis=2) + 9 * np.eye(40)
    assert distances.min() > 0.3
