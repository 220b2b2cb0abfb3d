"""Checkpoints and the logbook: what is written comes back, resumed records are whole."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

pytest.importorskip("orbax.checkpoint")
pytest.importorskip("tensorboardX")
pytest.importorskip("haiku")

from models.alphafold.training.checkpoints import CheckpointError, Checkpoints, restore_from
from models.alphafold.training.logbook import Logbook
from models.alphafold.training.train_step import TrainState


def made_state(step: int, width: int = 4) -> TrainState:
    params = {
        "a/b": {"weights": jnp.full((3, width), float(step)), "bias": jnp.arange(width) * 1.0}
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adam(lambda count: 1e-3))
    average = jax.tree.map(lambda leaf: leaf + 0.5, params)
    return TrainState(params, average, optimizer.init(params), jnp.asarray(step, jnp.int32))


def test_a_checkpoint_comes_back_exactly_in_another_process_of_the_run(tmp_path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(made_state(3), 12)
        checkpoints.save(made_state(7), 28)
    with Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(jax.eval_shape(lambda: made_state(0)))
        older = checkpoints.restore(made_state(0), step=3)
    assert (restored.position, older.position) == (28, 12)
    assert jax.tree.structure(restored.state) == jax.tree.structure(made_state(7))
    jax.tree.map(np.testing.assert_array_equal, restored.state, made_state(7))
    assert int(older.state.step) == 3


def test_only_the_newest_checkpoints_are_kept(tmp_path) -> None:
    with Checkpoints(tmp_path, kept=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(made_state(step), step)
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 1; there are \[2, 3\]"):
            checkpoints.restore(made_state(0), step=1)


def test_a_checkpoint_of_another_configuration_names_the_difference(tmp_path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(made_state(1), 1)
        with pytest.raises(CheckpointError, match=r"a/b/bias: saved \(4,\), configured \(5,\)"):
            checkpoints.restore(made_state(1, width=5))


@pytest.mark.parametrize("step", [2, 3])
def test_a_step_that_orbax_would_pass_over_is_an_error(step, tmp_path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(made_state(3), 12)
    with Checkpoints(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=f"Step {step} was not saved: .* of step 3"):
            checkpoints.save(made_state(step), 12)
        checkpoints.save(made_state(4), 16)
        assert checkpoints.latest_step == 4


def test_a_run_is_resumed_by_its_folder_its_checkpoints_or_one_step(tmp_path) -> None:
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        for step in (3, 5):
            checkpoints.save(made_state(step), 4 * step, {"config": {"data.crop_size": step}})
    for path, step in (
        (tmp_path / "run", 5),
        (tmp_path / "run" / "checkpoints", 5),
        (tmp_path / "run" / "checkpoints" / "3", 3),
    ):
        restored = restore_from(path, made_state(0))
        assert (int(restored.state.step), restored.position) == (step, 4 * step)
        assert restored.record == {"config": {"data.crop_size": step}}
        jax.tree.map(np.testing.assert_array_equal, restored.state, made_state(step))


def test_a_mistyped_folder_is_an_error_and_is_not_made(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        restore_from(tmp_path / "nowhere", made_state(0))
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "other").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint; there are none"):
        restore_from(tmp_path / "other", made_state(0))
    assert list((tmp_path / "other").iterdir()) == []


def test_a_damaged_checkpoint_is_an_error_that_names_the_others(tmp_path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(made_state(step), step)
    (tmp_path / "2" / "run" / "metadata").write_text("{")
    with pytest.raises(CheckpointError, match=r"2 cannot be read .* there are \[1, 2\]"):
        restore_from(tmp_path, made_state(0))


def test_checkpoints_of_a_period_stay(tmp_path) -> None:
    with Checkpoints(tmp_path, kept=1, kept_period=2) as checkpoints:
        for step in (1, 2, 3, 4, 5):
            checkpoints.save(made_state(step), step)
        with pytest.raises(CheckpointError, match=r"there are \[2, 4, 5\]"):
            checkpoints.restore(made_state(0), step=1)


def test_resuming_without_a_checkpoint_says_so(tmp_path) -> None:
    with (
        Checkpoints(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match="there are none"),
    ):
        checkpoints.restore(made_state(1))


def test_a_resumed_record_drops_steps_that_are_done_again(tmp_path) -> None:
    with Logbook(tmp_path) as logbook:
        for step in (1, 2, 3):
            logbook.write(step, {"train/loss": 10.0 - step})
    with Logbook(tmp_path, resumed_step=2) as logbook:
        logbook.write(3, {"train/loss": 5.0, "val/lddt_ca": 0.5})
        assert logbook.curve("train/loss") == ([1, 2, 3], [9.0, 8.0, 5.0])
        assert logbook.draw("title") is not None
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((tmp_path / "tensorboard").glob("events*"))) == 2
    with Logbook(tmp_path) as logbook:
        assert logbook.curve("train/loss") == ([], [])


def test_a_run_that_goes_on_elsewhere_takes_its_record_along(tmp_path) -> None:
    with Logbook(tmp_path / "a") as logbook:
        for step in (1, 2, 3):
            logbook.write(step, {"train/loss": 10.0 - step})
    with Logbook(tmp_path / "b", resumed_step=2, resumed_folder=tmp_path / "a") as logbook:
        logbook.write(3, {"train/loss": 5.0})
        assert logbook.curve("train/loss") == ([1, 2, 3], [9.0, 8.0, 5.0])
    assert len((tmp_path / "a" / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_value_that_is_not_finite_leaves_a_gap(tmp_path) -> None:
    with Logbook(tmp_path) as logbook:
        logbook.write(1, {"train/loss": math.nan})
        logbook.write(2, {"train/loss": 1.0})
        assert logbook.curve("train/loss") == ([2], [1.0])
