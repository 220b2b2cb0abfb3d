"""Tests of the C++ manager through its Python face and through XLA."""
