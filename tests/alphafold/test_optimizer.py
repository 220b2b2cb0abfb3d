"""The optimiser has the paper's rates, and clips each sample before it averages."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("haiku")
pytest.importorskip("ml_collections")

from models.alphafold.optimizer import learning_rate_schedule
from models.alphafold.training import train_step
from models.alphafold.training.settings import training_config
from tests.alphafold.small_model import compile_quickly


@pytest.mark.parametrize(
    ("preset", "rates"),
    [
        # Section 1.11.3: 128,000 samples of linear warm-up and a drop after 6.4 million, at 128
        # samples a step; the rate of step 0 is not 0, or that step would be lost.
        (
            "initial_training",
            {0: 1e-6, 1: 2e-6, 500: 5.005e-4, 1000: 1e-3, 49_999: 1e-3, 50_000: 9.5e-4},
        ),
        ("finetuning", {0: 5e-4, 1: 5e-4, 49_999: 5e-4, 50_000: 4.75e-4, 200_000: 4.75e-4}),
        ("demo", {0: 4e-5, 50: 2e-3, 99: 2e-3, 100: 1.8e-3}),
    ],
)
def test_rates_at_given_steps(preset: str, rates: dict[int, float]) -> None:
    schedule = learning_rate_schedule(training_config(preset).train)
    for step, rate in rates.items():
        np.testing.assert_allclose(schedule(step), rate, rtol=2e-3, err_msg=f"step {step}")


def test_a_warm_up_longer_than_the_decay_ends_before_the_rate_drops() -> None:
    config = training_config("initial_training").train
    config.update({"warmup_steps": 10, "decay_steps": 5})
    schedule = learning_rate_schedule(config)
    assert float(schedule(9)) <= config.learning_rate
    np.testing.assert_allclose(schedule(10), config.learning_rate * config.decay_rate, rtol=1e-6)


def step_of_linear_losses(monkeypatch: pytest.MonkeyPatch, *slopes: list[float]) -> Any:
    """Metrics and first moment after a step over samples whose losses have these gradients."""

    def loss(params: Any, rng: Any, features: Any) -> tuple[None, Any]:
        zero = jnp.zeros(())
        parts = ("sidechain_fape", "chi_loss", "angle_norm_loss", "violation_loss")
        structure = {
            "backbone_fape": jnp.sum(params["a"]["w"] * features["slope"][0]),
            **dict.fromkeys(parts, zero),
            "final_atom_positions": features["all_atom_positions"][0],
        }
        return None, {"structure_module": structure}

    monkeypatch.setattr(train_step, "make_model", lambda _: train_step.Model(None, None, loss))
    config = training_config("demo", "model_3")
    config.data.update({"crop_size": 4, "max_msa_clusters": 1, "max_extra_msa": 1})
    config.train.accumulate_grad_batches = len(slopes)
    training = train_step.make_training(config)
    batch = {name: jnp.ones(leaf.shape, leaf.dtype) for name, leaf in training.spec.items()}
    batch["slope"] = jnp.asarray(slopes)[:, None]
    args = training.state_of({"a": {"w": jnp.zeros(2)}}), batch
    state, metrics = compile_quickly(training.step, *args)(*args)
    adam = state.opt_state[1][0]
    return metrics, np.asarray(adam.mu["a"]["w"]) / (1.0 - config.train.adam_b1)


def test_each_sample_is_clipped_before_gradients_are_averaged(monkeypatch) -> None:
    # The loss is half the backbone's times the root of four residues: its gradient is the slope.
    metrics, mean = step_of_linear_losses(monkeypatch, [1e6, 0.0], [0.0, 0.05])
    # The huge sample counts with norm 0.1, and the other one, below that, with its own gradient.
    np.testing.assert_allclose(mean, [0.1 / 2, 0.05 / 2], rtol=1e-5)
    # What is reported is the norm before clipping.
    np.testing.assert_allclose(metrics["grad_norm"], (1e6 + 0.05) / 2, rtol=1e-5)


def test_small_gradients_are_averaged_as_they_are(monkeypatch) -> None:
    _, mean = step_of_linear_losses(monkeypatch, [0.03, 0.04], [0.01, -0.02])
    np.testing.assert_allclose(mean, [0.02, 0.01], rtol=1e-5)
