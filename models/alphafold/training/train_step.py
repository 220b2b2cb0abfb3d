"""One optimiser step of the whole model, as a pure function to be jitted (or managed).

A step averages the gradients of one or more samples, which run one after another in a scan. Each
sample's gradient is clipped *before* it is added (supplement, 1.11.3), so that one bad crop cannot
drown the others; then Adam, then the exponential moving average of the parameters. The trap:
randomness comes from (seed, step, sample) and is not carried, so a resumed run needs nothing but
the state to go on exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections
import optax

from models.alphafold.metrics import drmsd_ca, lddt_ca
from models.alphafold.model import Model, batch_spec, initial_params, make_model
from models.alphafold.optimizer import learning_rate_schedule, make_optimizer
from models.alphafold.training.loss_terms import (
    finite_gradient,
    loss_terms,
    total_loss,
    zero_unusable,
)
from models.alphafold.training.settings import SettingsError

Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]
#: Prefix of the metrics that count zeroed terms.
ZEROED = "zeroed/"


class TrainState(NamedTuple):
    """What training carries from step to step."""

    params: hk.Params
    ema_params: hk.Params  # like params
    opt_state: optax.OptState
    step: jax.Array  # shape=(), dtype=int32; steps done


class Training(NamedTuple):
    """The pure functions of training one configuration; none is jitted."""

    init: Callable[[], TrainState]
    state_of: Callable[[hk.Params], TrainState]  # a fresh state with given parameters
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    spec: dict[str, jax.ShapeDtypeStruct]  # of a batch: samples first
    model: Model

    def state_shapes(self) -> TrainState:
        """Shapes and types of a state; nothing is computed."""
        sample = {
            name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
            for name, leaf in self.spec.items()
        }
        params = jax.eval_shape(self.model.init, jax.random.key(0), sample)
        return jax.eval_shape(self.state_of, params)


def samples_per_step(config: ml_collections.ConfigDict) -> int:
    """How many samples one optimiser step averages."""
    return int(config.train.batch_size * config.train.accumulate_grad_batches)


def update_average(average: hk.Params, params: hk.Params, decay: float) -> hk.Params:
    """Exponential moving average: `decay * average + (1 - decay) * params`."""
    return optax.incremental_update(params, average, 1.0 - decay)


def make_training(config: ml_collections.ConfigDict) -> Training:
    """Make the train step of a configuration.

    Args:
        config: a tree of `models.alphafold.training.settings.training_config`.

    Returns:
        `init() -> state`, `step(state, batch) -> (state, metrics)`, and the shapes of a batch:
        those of the model's features with a leading axis of `samples_per_step` (where crops are
        padded to buckets, the largest shapes).

    Raises:
        SettingsError: crops are padded to buckets and a step averages several samples.
    """
    model = make_model(config)
    sample_spec = batch_spec(config)
    samples = samples_per_step(config)
    if config.data.pad_crops_to_buckets and samples > 1:
        raise SettingsError(
            f"data.pad_crops_to_buckets is on and a step averages {samples} samples, which must "
            "have one length; set train.batch_size and train.accumulate_grad_batches to 1, or turn "
            "it off."
        )
    optimizer = make_optimizer(config.train)
    schedule = learning_rate_schedule(config.train)
    clip = optax.clip_by_global_norm(config.train.gradient_clip_norm)

    def init() -> TrainState:
        params = initial_params(config, jax.random.key(config.train.seed))
        return state_of(params)

    def state_of(params: hk.Params) -> TrainState:
        # A copy, because a donated state must not hold one buffer twice.
        average = jax.tree.map(jnp.copy, params)
        return TrainState(params, average, optimizer.init(params), jnp.zeros((), jnp.int32))

    def sample_gradient(
        params: hk.Params, rng: jax.Array, features: Batch
    ) -> tuple[hk.Params, Metrics]:
        def loss_fn(params: hk.Params) -> tuple[jax.Array, Metrics]:
            _, out = model.loss(params, rng, features)
            terms, weights = loss_terms(out, config.model.heads)
            weights["fape"] *= config.train.fape_weight
            terms, zeroed = zero_unusable(terms)
            unscaled = total_loss(terms, weights)
            # Longer crops weigh more (supplement, 1.9); without clipping this is a factor only.
            loss = unscaled * jnp.sqrt(jnp.sum(features["seq_mask"][0]))
            metrics = {
                **terms,
                **{f"{ZEROED}{name}": flag for name, flag in zeroed.items()},
                "loss": loss,
                "unscaled_loss": unscaled,
                **_accuracy(out, features),
            }
            return loss, metrics

        gradient, metrics = jax.grad(loss_fn, has_aux=True)(params)
        gradient = finite_gradient(gradient)
        metrics["grad_norm"] = optax.global_norm(gradient)
        gradient, _ = clip.update(gradient, clip.init(params))
        return gradient, metrics

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        first = {name: value[0] for name, value in batch.items()}
        if samples == 1:
            gradient, metrics = sample_gradient(state.params, rng, first)
        else:

            def one(total: Any, numbered: tuple[jax.Array, Batch]) -> tuple[Any, None]:
                number, features = numbered
                found = sample_gradient(state.params, jax.random.fold_in(rng, number), features)
                return jax.tree.map(jnp.add, total, found), None

            shapes = jax.eval_shape(sample_gradient, state.params, rng, first)
            zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            (gradient, metrics), _ = jax.lax.scan(one, zero, (jnp.arange(samples), dict(batch)))
            gradient = jax.tree.map(lambda leaf: leaf / samples, gradient)
            metrics = {
                name: value if name.startswith(ZEROED) else value / samples
                for name, value in metrics.items()
            }
        updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        average = update_average(state.ema_params, params, config.train.ema_decay)
        metrics["lr"] = jnp.asarray(schedule(state.step))
        return TrainState(params, average, opt_state, state.step + 1), metrics

    spec = {
        name: jax.ShapeDtypeStruct((samples, *leaf.shape), leaf.dtype)
        for name, leaf in sample_spec.items()
    }
    return Training(init, state_of, step, spec, model)


def _accuracy(out: Mapping[str, Any], features: Batch) -> Metrics:
    """Scores of the predicted structure that need no superposition."""
    atoms = jax.lax.stop_gradient(out["structure_module"]["final_atom_positions"])
    true, mask = features["all_atom_positions"][0], features["all_atom_mask"][0]
    return {"lddt_ca": lddt_ca(atoms, true, mask), "drmsd_ca": drmsd_ca(atoms, true, mask)}
