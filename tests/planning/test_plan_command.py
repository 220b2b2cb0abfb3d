"""`python -m jdynoff plan`: answers without running anything."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdynoff import cli
from tests.programs.example import descend, layer, quick, weights

WIDTH = 64


def make_step(batch: int = 64) -> tuple[Any, tuple[Any, ...]]:
    """A step on shapes alone."""

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
        return jnp.mean(x**2)

    shapes = jax.eval_shape(lambda: weights(width=WIDTH))
    return quick(descend(loss)), (shapes, jax.ShapeDtypeStruct((batch, WIDTH), jnp.float32))


def make_nothing() -> None:
    """Not what the command expects."""


NAME = f"{__name__}:make_step"


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert cli.main(["plan", NAME, "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_step_is_planned_from_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--budget", "min")
    assert plan["device_peak_bytes"] == plan["min_feasible_bytes"]
    assert any(site["action"] == "offload" for site in plan["sites"])
    assert cli.main(["plan", NAME, "--budget", "min"]) == 0
    assert "smallest budget" in capsys.readouterr().out


def test_a_step_that_does_not_fit_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    least = planned(capsys, "--budget", "min")["min_feasible_bytes"]
    assert cli.main(["plan", NAME, "--budget", str(least - 1)]) == 1
    assert str(least) in capsys.readouterr().out


def test_the_largest_batch_that_fits_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    budget = planned(capsys, "--budget", "min")["min_feasible_bytes"]  # of batch 64
    assert cli.main(["plan", NAME, "--budget", str(budget), "--search", "batch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (largest,) = [line for line in lines if line.startswith("largest batch that fits:")]
    assert 60 <= int(largest.split(":")[1]) <= 64


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("nowhere_at_all:make", "cannot import"),
        (f"{__name__}:missing", "has no function"),
        ("make_step", "module:function"),
        (f"{__name__}:make_nothing", "must return"),
    ],
)
def test_a_wrong_name_is_explained(
    capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    assert cli.main(["plan", name, "--budget", "min"]) == 2
    assert text in " ".join(capsys.readouterr().out.split())
