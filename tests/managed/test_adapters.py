"""`nnx.jit` and `eqx.filter_jit` steps are managed through their own wrappers."""

from __future__ import annotations

import equinox as eqx
import jax
import optax
import pytest
from flax import nnx

import jdynoff
from tests.programs.example import batch, difference_in_ulps
from tests.programs.libraries import (
    NnxModel,
    equinox_arguments,
    equinox_train_step,
    nnx_train_step,
)


def test_nnx_jit_updates_its_objects_as_it_does_unmanaged() -> None:
    plain = nnx_train_step()
    managed = jdynoff.managed(nnx_train_step(), budget="min", min_bytes=1, flops_per_byte=0.0)
    results = []
    for step in (plain, managed):
        model = NnxModel(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        values = [step(model, optimizer, batch()) for _ in range(2)]
        results.append((values, jax.tree.leaves(nnx.state((model, optimizer)))))

    assert difference_in_ulps(*results) <= 512  # two steps of Adam, which divides by small numbers
    assert managed.stats().bytes_offloaded > 0
    assert managed.plan(model, optimizer, batch()).offloaded_bytes > 0
    assert "jdynoff_offload" in managed.lower(model, optimizer, batch()).as_text()
    # The step that was decorated stays a plain one.
    assert "jdynoff_offload" not in plain.lower(model, optimizer, batch()).as_text()


def test_equinox_filter_jit_keeps_modules_and_static_fields() -> None:
    model, xs = equinox_arguments()
    expected_value, expected = equinox_train_step()(model, xs)
    managed = jdynoff.managed(equinox_train_step(), budget="min", min_bytes=1, flops_per_byte=0.0)
    value, new = managed(model, xs)

    assert new.activation is model.activation
    arrays = [eqx.filter(tree, eqx.is_array) for tree in (expected, new)]
    assert difference_in_ulps((expected_value, arrays[0]), (value, arrays[1])) <= 32
    assert managed.stats().bytes_offloaded > 0
    assert managed.plan(model, xs).offloaded_bytes > 0


def test_a_wrapper_that_cannot_be_looked_into_is_refused_with_advice() -> None:
    class Wrapper:
        lower = None

        def __call__(self) -> None:
            raise AssertionError

    Wrapper.__module__ = "equinox._unknown"
    with pytest.raises(jdynoff.ConfigurationError, match=r"equinox\.partition"):
        jdynoff.managed(Wrapper())
