"""Masked-MSA loss (section 1.9.9): cross entropy of the masked entries of the alignment.

The trap: it is averaged over masked entries only, so a batch without any has loss zero.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def softmax_cross_entropy(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """Return the cross entropy [...] of integer classes [...] under logits [..., class]."""
    log_probability = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return -jnp.take_along_axis(log_probability, classes[..., None], axis=-1)[..., 0]


def masked_msa_loss(logits: jax.Array, true_msa: jax.Array, bert_mask: jax.Array) -> jax.Array:
    """Compute the loss.

    Args:
        logits: [rows, residues, 23].
        true_msa: classes before masking, [rows, residues].
        bert_mask: 1 where the entry was masked or replaced, [rows, residues].

    Returns:
        Scalar.
    """
    errors = softmax_cross_entropy(logits, true_msa)
    return jnp.sum(errors * bert_mask) / (1e-8 + jnp.sum(bert_mask))
