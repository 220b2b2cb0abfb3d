"""The network: from a batch's features, the blocks and the last path to a distribution of counts.

The trunk sees a sample once; a block only scales and shifts what the trunk has found, so that a
step with many blocks costs little more than one with few, and what is learned about one block
serves those that do similar work (FiLM, Perez et al. 2018).
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp


class Network(nn.Module):
    """Predicts how often each block runs.

    Any Flax module with the same call may stand in its place. A field named `classes` is set to K
    before it is used.

    Attributes:
        classes: K, see `jdynoff.pilot.counts`.
        hidden: width of the trunk.
        joined: width of the layer where sample and block meet.
    """

    classes: int = 0
    hidden: int = 64
    joined: int = 32

    @nn.compact
    def __call__(self, features: jax.Array, blocks: jax.Array, previous: jax.Array) -> jax.Array:
        """Evaluates the network.

        Args:
            features: f32[n, F], standardised.
            blocks: f32[B, D], what the blocks are like.
            previous: f32[n, B], the path before each sample, standardised.

        Returns:
            f32[n, B, K] logits.
        """
        sample = jnp.concatenate([features, previous], axis=-1)
        sample = nn.relu(nn.Dense(self.hidden, name="trunk")(sample))
        sample = nn.Dense(self.joined, name="sample")(sample)
        scale = nn.Dense(self.joined, name="scale")(blocks)
        shift = nn.Dense(self.joined, name="shift")(blocks)
        joined = nn.relu(sample[:, None, :] * (1 + scale) + shift)
        return nn.Dense(self.classes, name="logits")(joined)
