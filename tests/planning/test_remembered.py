"""Plans of earlier processes: fewer compiles, the same plan, and no harm from what is in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdynoff
from jdynoff.planning.remembered import FOLDER_VARIABLE
from tests.programs.example import descend, layer, normal, quick, weights

DEPTH, ROWS, WIDTH = 8, 8192, 64


def loss(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
    return jnp.mean(x**2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "plans"))
    return tmp_path / "plans"


def plan(budget: Any) -> Any:
    arguments = weights(depth=DEPTH, width=WIDTH), normal(0, ROWS, WIDTH)
    return jdynoff.managed(quick(descend(loss)), budget=budget).plan(*arguments)


@pytest.mark.parametrize("budget", ["min", "60MiB", "1GiB"])
def test_the_second_time_one_program_is_compiled(budget: str, folder: Path) -> None:
    first, second = plan(budget), plan(budget)
    assert len(list(folder.iterdir())) == 1
    assert second.compiles == 1
    for name in ("device_peak_bytes", "min_feasible_bytes", "offloaded_bytes", "sites", "note"):
        assert getattr(first, name) == getattr(second, name), name


def test_another_budget_or_program_is_planned_anew(folder: Path) -> None:
    plan("60MiB")
    assert plan("61MiB").compiles > 1
    deeper = weights(depth=DEPTH + 1, width=WIDTH), normal(0, ROWS, WIDTH)
    assert jdynoff.managed(quick(descend(loss)), budget="60MiB").plan(*deeper).compiles > 1
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize("content", ["", "{}", '{"unchanged": 1}', "[1, 2]"])
def test_a_damaged_file_counts_as_none(content: str, folder: Path) -> None:
    first = plan("60MiB")
    (file,) = folder.iterdir()
    file.write_text(content)
    second = plan("60MiB")
    assert second.compiles == first.compiles
    assert json.loads(file.read_text())["least_bytes"] == first.min_feasible_bytes


@pytest.mark.parametrize("lie", [{"allowance": 1 << 40, "keeping": True}, {"unchanged": True}])
def test_a_recipe_that_breaks_the_budget_is_not_followed(lie: dict[str, Any], folder: Path) -> None:
    first = plan("60MiB")
    (file,) = folder.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "price": -1.0, **lie}))
    second = plan("60MiB")
    assert second.device_peak_bytes == first.device_peak_bytes <= 60 << 20


def test_a_step_with_other_donations_is_not_told_the_smallest_budget_of_this_one(
    folder: Path,
) -> None:
    arguments = weights(depth=DEPTH, width=WIDTH), normal(0, ROWS, WIDTH)
    plain = jdynoff.managed(quick(descend(loss)), budget="60MiB").plan(*arguments)
    step = quick(descend(loss), donate_argnums=0)
    donated = jdynoff.managed(step, budget="60MiB").plan(*arguments)
    assert donated.min_feasible_bytes < plain.min_feasible_bytes
    for file in folder.iterdir():
        file.unlink()
    again = jdynoff.managed(step, budget="60MiB").plan(*arguments)
    assert again.min_feasible_bytes == donated.min_feasible_bytes


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file" / "plans"))
    assert plan("min").offloaded_bytes > 0
