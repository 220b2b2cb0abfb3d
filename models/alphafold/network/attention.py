"""Gated multi-head attention and its global form, for the MSA, triangle and template attentions.

Supplement, Algorithms 7, 8, 13, 14, 17 and 19 differ only in what they attend over and in the bias.
The trap: a masked key's logit is *replaced* by -1e9 after all biases are added, so a query without
any key attends uniformly and its logits get no gradient.
"""

from __future__ import annotations

import math

import haiku as hk
import jax
import jax.numpy as jnp
import ml_collections

from models.alphafold.network.layers import FanIn, final_initializer, glorot_uniform
from models.alphafold.network.settings import Settings

_MASKED_LOGIT = -1e9


@jax.custom_vjp
def _masked(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Logits with -1e9 in the place of those of masked keys, which then have no gradient."""
    return jnp.where(mask > 0, logits, _MASKED_LOGIT)


def _masked_forward(logits: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _masked(logits, mask), mask


def _masked_backward(mask: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.where(mask > 0, cotangent, 0.0), jnp.zeros_like(mask)


# The derivative of a selection keeps its condition, here as large as the logits: of all residuals
# of an extra-MSA block the largest. The mask itself is enough.
_masked.defvjp(_masked_forward, _masked_backward)


def _softmax(logits: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis in float32, keys with mask 0 left out; result in float32."""
    return jax.nn.softmax(_masked(logits.astype(jnp.float32), mask), axis=-1)


class _Projections:
    """Reads the weights of the enclosing attention module in the type of the activations."""

    def __init__(self, settings: Settings, dtype: jnp.dtype) -> None:
        self._settings = settings
        self._dtype = dtype

    def heads(self, name: str, channels: int, num_head: int, head_dim: int) -> jax.Array:
        """Weights [channels, head, head_dim] of a query, key or value."""
        init = glorot_uniform(channels, num_head * head_dim)
        shape = (channels, num_head, head_dim)
        return hk.get_parameter(name, shape, jnp.float32, init).astype(self._dtype)

    def shared(self, name: str, channels: int, head_dim: int) -> jax.Array:
        """Weights [channels, head_dim] of a key or value that all heads share."""
        init = glorot_uniform(channels, head_dim)
        return hk.get_parameter(name, (channels, head_dim), jnp.float32, init).astype(self._dtype)

    def gate(self, channels: int, num_head: int, head_dim: int) -> tuple[jax.Array, jax.Array]:
        """Gate weights (zero) and bias (one), so that gates start almost open."""
        zero, one = hk.initializers.Constant(0.0), hk.initializers.Constant(1.0)
        weights = hk.get_parameter("gating_w", (channels, num_head, head_dim), jnp.float32, zero)
        bias = hk.get_parameter("gating_b", (num_head, head_dim), jnp.float32, one)
        return weights.astype(self._dtype), bias.astype(self._dtype)

    def output(self, num_head: int, head_dim: int, channels: int) -> tuple[jax.Array, jax.Array]:
        """Output weights [head, head_dim, channels] and bias [channels]."""
        init = final_initializer(num_head * head_dim, self._settings.zero_init)
        shape = (num_head, head_dim, channels)
        weights = hk.get_parameter("output_w", shape, jnp.float32, init)
        bias = hk.get_parameter("output_b", (channels,), jnp.float32, hk.initializers.Constant(0.0))
        return weights.astype(self._dtype), bias.astype(self._dtype)


class Attention(hk.Module):
    """Multi-head attention with optional gating.

    Args:
        config: `num_head`, `gating`, and optionally `key_dim` and `value_dim` (over all heads).
        settings: shared settings.
        output_dim: channels of the result.
        name: module name.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        settings: Settings,
        output_dim: int,
        name: str = "attention",
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings
        self._output_dim = output_dim

    def __call__(
        self,
        q_data: jax.Array,
        m_data: jax.Array,
        mask: jax.Array,
        bias: jax.Array | None = None,
    ) -> jax.Array:
        """Attend.

        Args:
            q_data: what the queries come from, [batch, query, c_q].
            m_data: what keys and values come from, [batch, key, c_m].
            mask: 1 for keys to attend to, [batch, key].
            bias: added to the logits of every batch entry, [head, query, key].

        Returns:
            [batch, query, output_dim].
        """
        num_head = self._config.num_head
        c_q, c_m = q_data.shape[-1], m_data.shape[-1]
        key_dim = self._config.get("key_dim", c_q)
        value_dim = self._config.get("value_dim", c_m)
        for kind, dim in (("key_dim", key_dim), ("value_dim", value_dim)):
            if dim % num_head:
                raise ValueError(f"{kind} {dim} is not a multiple of num_head {num_head}.")
        d_k, d_v = key_dim // num_head, value_dim // num_head
        read = _Projections(self._settings, q_data.dtype)

        query = jnp.einsum("bqa,ahc->bqhc", q_data, read.heads("query_w", c_q, num_head, d_k))
        key = jnp.einsum("bka,ahc->bkhc", m_data, read.heads("key_w", c_m, num_head, d_k))
        value = jnp.einsum("bka,ahc->bkhc", m_data, read.heads("value_w", c_m, num_head, d_v))

        logits = jnp.einsum("bqhc,bkhc->bhqk", query / math.sqrt(d_k), key)
        if bias is not None:
            logits = logits + bias[None]
        weights = _softmax(logits, mask[:, None, None, :]).astype(q_data.dtype)
        average = jnp.einsum("bhqk,bkhc->bqhc", weights, value)

        if self._config.get("gating", True):
            gate_w, gate_b = read.gate(c_q, num_head, d_v)
            gate = jax.nn.sigmoid(jnp.einsum("bqa,ahc->bqhc", q_data, gate_w) + gate_b)
            average = average * gate
        output_w, output_b = read.output(num_head, d_v, self._output_dim)
        return jnp.einsum("bqhc,hco->bqo", average, output_w) + output_b


class GlobalAttention(hk.Module):
    """Attention with one query per batch entry, the mean over its rows (Algorithm 19).

    Linear in the number of rows; keys and values are shared by all heads.

    Args:
        config: `num_head`, `gating`, and optionally `key_dim` and `value_dim`.
        settings: shared settings.
        output_dim: channels of the result.
        name: module name.
    """

    def __init__(
        self,
        config: ml_collections.ConfigDict,
        settings: Settings,
        output_dim: int,
        name: str = "attention",
    ) -> None:
        super().__init__(name=name)
        self._config = config
        self._settings = settings
        self._output_dim = output_dim

    def __call__(self, data: jax.Array, mask: jax.Array) -> jax.Array:
        """Attend over the rows of each batch entry.

        Args:
            data: [batch, row, channel].
            mask: 1 for rows to attend to, [batch, row].

        Returns:
            [batch, row, output_dim]; without gating all rows are equal and there is one,
            [batch, 1, output_dim].
        """
        num_head = self._config.num_head
        channels = data.shape[-1]
        d_k = self._config.get("key_dim", channels) // num_head
        d_v = self._config.get("value_dim", channels) // num_head
        read = _Projections(self._settings, data.dtype)
        query_w = read.heads("query_w", channels, num_head, d_k)
        key_w = read.shared("key_w", channels, d_k)
        value_w = read.shared("value_w", channels, d_v)

        weight = mask.astype(data.dtype)[..., None]
        total = jnp.sum(data * weight, axis=1, dtype=jnp.float32)
        count = jnp.sum(mask, axis=1, dtype=jnp.float32)[:, None]
        mean = (total / (count + 1e-10)).astype(data.dtype)

        query = jnp.einsum("ba,ahc->bhc", mean, query_w) / math.sqrt(d_k)
        logits = jnp.einsum("bhc,bkc->bhk", query, data @ key_w)
        weights = _softmax(logits, mask[:, None, :]).astype(data.dtype)
        average = jnp.einsum("bhk,bkc->bhc", weights, data @ value_w)

        output_w, output_b = read.output(num_head, d_v, self._output_dim)
        if self._config.get("gating", True):
            gate_w, gate_b = read.gate(channels, num_head, d_v)
            gate = jax.nn.sigmoid(jnp.einsum("bqa,ahc->bqhc", data, gate_w) + gate_b)
            return jnp.einsum("bqhc,hco->bqo", average[:, None] * gate, output_w) + output_b
        return (jnp.einsum("bhc,hco->bo", average, output_w) + output_b)[:, None]


def pair_bias_weights(channels: int, num_head: int, dtype: jnp.dtype) -> jax.Array:
    """Read the weights [c_z, head] that make an attention bias from the pair representation."""
    init = FanIn(channels)
    weights = hk.get_parameter("feat_2d_weights", (channels, num_head), jnp.float32, init)
    return weights.astype(dtype)
