"""Prediction by recalling similar steps: a learned distance to the steps of the window.

Most statistics of a batch say nothing about its path, and a network that sees a few hundred steps
fits their noise. Here each one only has a weight in a distance, learned so that a step is predicted
by the other steps of the window (neighbourhood components analysis, Goldberger et al. 2004, with a
diagonal metric). Because a step never votes for itself, what is learned is what generalises. A path
is recalled as a whole, from the first time that it is seen.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_SPEED = 10.0  # of the weights' logarithms relative to the network's parameters
_FLOOR = 0.01  # probability left to counts that no similar step had


def attention(
    metric: jax.Array, queries: jax.Array, window: jax.Array, allowed: jax.Array
) -> jax.Array:
    """How much each step of the window resembles some steps.

    Args:
        metric: f32[M], learned; all 0 at first.
        queries: f32[n, M], standardised features and paths before.
        window: f32[W, M], the same of the window.
        allowed: bool[n, W], which steps may be recalled.

    Returns:
        f32[n, W]; rows sum to 1, or to 0 where nothing may be recalled.
    """
    weights = jnp.exp(_SPEED * metric) / jnp.sqrt(metric.size)
    queries, window = queries * weights, window * weights
    # The query's own length is the same for all of the window.
    nearness = 2 * queries @ window.T - jnp.sum(window**2, axis=1)
    nearness = jnp.where(allowed, nearness, -jnp.inf)
    nearness -= jax.lax.stop_gradient(
        jnp.max(jnp.where(allowed, nearness, -1e30), axis=1, keepdims=True)
    )
    votes = jnp.exp(nearness)
    return votes / jnp.maximum(jnp.sum(votes, axis=1, keepdims=True), 1e-30)


def log_likelihood(attention: jax.Array, chosen: jax.Array, window: jax.Array) -> jax.Array:
    """Logarithm of the probability of what was observed.

    Args:
        attention: f32[n, W].
        chosen: i32[n, B], observed classes.
        window: i32[W, B], classes of the window.

    Returns:
        f32[n, B].
    """
    agree = (chosen[:, None, :] == window[None]).astype(jnp.float32)
    return jnp.log(_FLOOR + (1 - _FLOOR) * jnp.einsum("nw,nwb->nb", attention, agree))


def probabilities(attention: jax.Array, window: jax.Array, number: int) -> jax.Array:
    """The distribution that one step's recollections give.

    Args:
        attention: f32[W].
        window: i32[W, B], classes of the window.
        number: K.

    Returns:
        f32[B, K].
    """
    blocks = window.shape[1]
    votes = jnp.zeros((blocks, number)).at[jnp.arange(blocks), window].add(attention[:, None])
    return (1 - _FLOOR) * votes
