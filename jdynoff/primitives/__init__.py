"""The JAX primitives over the buffer manager's custom calls."""
