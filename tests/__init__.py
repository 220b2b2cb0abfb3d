"""Tests; `tests.programs` is shared by several of their folders."""
