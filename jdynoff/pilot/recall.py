"""Prediction by recalling similar steps: a learned distance to the steps of the window.

Most statistics of a batch say nothing about its path, and a network that sees a few hundred steps
fits their noise. Here each one only has a weight in a distance, learned so that a step is predicted
by the other steps of the window (neighbourhood components analysis, Goldberger et al. 2004, with a
diagonal metric). Because a step never votes for itself, what is learned is what generalises. A path
is recalled as a whole, from the first time that it is seen.

The network trains while it is observed, so old steps say less; how much less is learned too.

A vote for a count is also one for the counts next to it, the less the farther they are: a count
that sums many small choices (how many sequences an expert was given) is seldom the same twice, and
what is likely is near what was seen. How far a vote carries is learned for each block, so that the
branch of a single conditional keeps its votes to itself.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

_SPEED = 10.0  # of what is learned here, relative to the network's parameters
_FIRST_FADING = 1e-3  # of the logarithm of a vote, for each step that it is older
_LARGEST_FADING = 10.0
_REACHES = (-20.0, 4.0)  # as logits
_FIRST_REACH = -5.0  # as a logit: a vote is all but one for the same count
_FLOOR = 0.01  # probability left to counts that no similar step had


def attention(
    metric: jax.Array,
    fading: jax.Array,
    queries: jax.Array,
    window: jax.Array,
    distances: jax.Array,
    allowed: jax.Array,
) -> jax.Array:
    """How much each step of the window resembles some steps.

    Args:
        metric: f32[M], learned; all 0 at first.
        fading: f32[], learned; 0 at first.
        queries: f32[n, M], standardised features and paths before.
        window: f32[W, M], the same of the window.
        distances: f32[n, W], how many steps lie between them.
        allowed: bool[n, W], which steps may be recalled.

    Returns:
        f32[n, W]; rows sum to 1, or to 0 where nothing may be recalled.
    """
    weights = jnp.exp(_SPEED * metric) / jnp.sqrt(metric.size)
    queries, window = queries * weights, window * weights
    # The query's own length is the same for all of the window.
    nearness = 2 * queries @ window.T - jnp.sum(window**2, axis=1)
    faded = jnp.clip(_SPEED * fading, max=np.log(_LARGEST_FADING / _FIRST_FADING))
    nearness -= _FIRST_FADING * jnp.exp(faded) * distances
    nearness = jnp.where(allowed, nearness, -jnp.inf)
    nearness -= jax.lax.stop_gradient(
        jnp.max(jnp.where(allowed, nearness, -1e30), axis=1, keepdims=True)
    )
    votes = jnp.exp(nearness)
    return votes / jnp.maximum(jnp.sum(votes, axis=1, keepdims=True), 1e-30)


def carried(reach: jax.Array) -> jax.Array:
    """The share of a vote that each class farther away gets, of the class before it.

    Args:
        reach: f32[B], learned; all 0 at first.

    Returns:
        f32[B], between 0 and 1.
    """
    return jnp.exp(_log_carried(reach))


def _log_carried(reach: jax.Array) -> jax.Array:
    # Bounded, or one far step would leave it where there is no gradient.
    return jax.nn.log_sigmoid(jnp.clip(_SPEED * reach + _FIRST_REACH, *_REACHES))


def log_likelihood(
    attention: jax.Array, reach: jax.Array, chosen: jax.Array, window: jax.Array
) -> jax.Array:
    """Logarithm of the probability of what was observed.

    Args:
        attention: f32[n, W].
        reach: f32[B], learned.
        chosen: i32[n, B], observed classes.
        window: i32[W, B], classes of the window.

    Returns:
        f32[n, B].
    """
    log_share = _log_carried(reach)
    distance = jnp.abs(chosen[:, None, :] - window[None]).astype(jnp.float32)
    agree = _weight(jnp.exp(log_share)) * jnp.exp(distance * log_share)
    return jnp.log(_FLOOR + (1 - _FLOOR) * jnp.einsum("nw,nwb->nb", attention, agree))


def probabilities(
    attention: jax.Array, reach: jax.Array, window: jax.Array, number: int
) -> jax.Array:
    """The distribution that one step's recollections give.

    Args:
        attention: f32[W].
        reach: f32[B], learned.
        window: i32[W, B], classes of the window.
        number: K.

    Returns:
        f32[B, K].
    """
    blocks = window.shape[1]
    share = carried(reach)
    votes = jnp.zeros((blocks, number)).at[jnp.arange(blocks), window].add(attention[:, None])

    def carry(before: jax.Array, votes: jax.Array) -> tuple[jax.Array, jax.Array]:
        here = votes + share * before
        return here, here

    # Both ways: a class gets its own votes, and those that come from either side.
    start = jnp.zeros((2, blocks))
    _, sums = jax.lax.scan(carry, start, jnp.stack([votes.T, votes.T[::-1]], axis=1))
    spread = sums[:, 0] + sums[::-1, 1] - votes.T
    return (1 - _FLOOR) * (_weight(share) * spread).T


def _weight(share: jax.Array) -> jax.Array:
    """What makes the votes of a two-sided geometric distribution sum to 1."""
    return (1 - share) / (1 + share)
