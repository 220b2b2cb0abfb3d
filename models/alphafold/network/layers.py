"""Linear, layer norm and dropout, for every other file of the network.

Parameters are float32 and are cast to the type of the activations where they are used, so one set
of weights serves float32 and bfloat16 runs. The trap: initial values follow section 1.11.4 of the
supplement (zero for the last layer of a residual update), so a fresh network predicts nothing
until a step has been taken.
"""

from __future__ import annotations

import math
from typing import Literal

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np

Initializer = Literal["linear", "relu", "zeros"]

# Standard deviation of a standard normal distribution truncated to [-2, 2].
_TRUNCATED_NORMAL_STDDEV = 0.87962566103423978


class FanIn(hk.initializers.Initializer):
    """Truncated normal values of variance `scale / fan_in`, with the fan-in given."""

    def __init__(self, fan_in: int, scale: float = 1.0) -> None:
        self._stddev = math.sqrt(scale / max(1, fan_in)) / _TRUNCATED_NORMAL_STDDEV

    def __call__(self, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        """Draw values."""
        return hk.initializers.TruncatedNormal(self._stddev)(shape, dtype)


def glorot_uniform(fan_in: int, fan_out: int) -> hk.initializers.Initializer:
    """Return the uniform initialiser of variance `2 / (fan_in + fan_out)`."""
    limit = math.sqrt(6.0 / (fan_in + fan_out))
    return hk.initializers.RandomUniform(-limit, limit)


def final_initializer(fan_in: int, zero_init: bool) -> hk.initializers.Initializer:
    """Return the initialiser of the last weights before a residual addition."""
    return hk.initializers.Constant(0.0) if zero_init else FanIn(fan_in)


class Linear(hk.Module):
    """`x @ weights + bias` over the last axis.

    Args:
        num_output: channels of the result.
        initializer: `linear` (fan-in), `relu` (doubled variance) or `zeros`.
        bias_init: initial value of every bias.
        name: module name.
    """

    def __init__(
        self,
        num_output: int,
        initializer: Initializer = "linear",
        bias_init: float = 0.0,
        name: str = "linear",
    ) -> None:
        super().__init__(name=name)
        self._num_output = num_output
        self._initializer = initializer
        self._bias_init = bias_init

    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply the layer to [..., channels]."""
        fan_in = x.shape[-1]
        if self._initializer == "zeros":
            w_init: hk.initializers.Initializer = hk.initializers.Constant(0.0)
        else:
            w_init = FanIn(fan_in, 2.0 if self._initializer == "relu" else 1.0)
        shape = (fan_in, self._num_output)
        weights = hk.get_parameter("weights", shape, jnp.float32, w_init)
        bias = hk.get_parameter(
            "bias", shape[1:], jnp.float32, hk.initializers.Constant(self._bias_init)
        )
        return x @ weights.astype(x.dtype) + bias.astype(x.dtype)


def final_linear(num_output: int, zero_init: bool, name: str) -> Linear:
    """Return the last linear layer of a residual update."""
    return Linear(num_output, "zeros" if zero_init else "linear", name=name)


class LayerNorm(hk.Module):
    """Layer norm over the last axis, statistics in float32, epsilon 1e-5."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalise [..., channels]."""
        shape = x.shape[-1:]
        scale = hk.get_parameter("scale", shape, jnp.float32, hk.initializers.Constant(1.0))
        offset = hk.get_parameter("offset", shape, jnp.float32, hk.initializers.Constant(0.0))
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        return (centred * jax.lax.rsqrt(variance + 1e-5) * scale + offset).astype(x.dtype)


def dropout(
    x: jax.Array, rate: float, *, active: bool, shared_axis: int | None = None
) -> jax.Array:
    """Zero entries of `x` with probability `rate` and scale the rest.

    Args:
        x: activations.
        rate: probability of a zero.
        active: whether to drop at all; needs Haiku's random key if so.
        shared_axis: axis along which one draw is shared (Supplement, 1.11.6: rows or columns).

    Returns:
        Array like `x`.
    """
    if not active or rate == 0.0:
        return x
    shape = list(x.shape)
    if shared_axis is not None:
        shape[shared_axis] = 1
    keep = jax.random.bernoulli(hk.next_rng_key(), 1.0 - rate, tuple(shape))
    return jnp.where(keep, x / np.asarray(1.0 - rate, x.dtype), jnp.zeros((), x.dtype))
