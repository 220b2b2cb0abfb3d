"""The optimiser of section 1.11.3: Adam with clipping, warm-up and decay.

For the trunk and the whole model. The trap: the published training clips the gradient of *each
sample* to norm 0.1 before averaging; here a step has one sample, so clipping the step's gradient
is the same, and gradient accumulation must clip before it adds.
"""

from __future__ import annotations

import ml_collections
import optax


def learning_rate_schedule(config: ml_collections.ConfigDict) -> optax.Schedule:
    """Return the rate at each step: linear warm-up, constant, then one drop after `decay_steps`."""
    rate = config.learning_rate
    steps = max(1, config.warmup_steps)
    warmup = optax.linear_schedule(rate / steps, rate, steps)
    constant = optax.constant_schedule(rate)
    decayed = optax.constant_schedule(rate * config.decay_rate)
    boundaries = [config.warmup_steps, max(config.warmup_steps, config.decay_steps)]
    return optax.join_schedules([warmup, constant, decayed], boundaries)


def make_optimizer(config: ml_collections.ConfigDict) -> optax.GradientTransformation:
    """Return clipping by global norm followed by Adam.

    Args:
        config: the `train` part of a configuration.

    Returns:
        An optax transformation.
    """
    return optax.chain(
        optax.clip_by_global_norm(config.gradient_clip_norm),
        optax.adam(
            learning_rate_schedule(config),
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
        ),
    )
