"""Steps are planned for a described GPU that is not there, where JAX's CUDA plugin is."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

import jdynoff
from benchmarks.table import has_cuda_plugin
from jdynoff import targets
from jdynoff.planning.machine import machine_of
from tests.programs.example import descend, layer

DEPTH, WIDTH, ROWS = 8, 128, 1024


def test_targets_are_described_with_their_memory() -> None:
    assert {"h200", "h100-80", "a100-40", "a100-80"} <= set(targets.names())
    sizes = {name: targets.memory_bytes(name) for name in targets.names()}
    assert sizes["a100-40"] == 40 << 30
    assert sizes["h200"] > sizes["h100-80"] >= sizes["a100-80"] > sizes["a100-40"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200 141GB HBM3e", "NVIDIA H200"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80 GB"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 40 GB"),
        ("something new", "a GPU"),
    ],
)
def test_rates_are_those_of_the_device(kind: str, name: str) -> None:
    machine = machine_of(types.SimpleNamespace(device_kind=kind, platform="gpu"))
    assert machine.name == name
    assert machine.flops_per_second > 1e13


def test_an_unknown_device_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(jdynoff.ConfigurationError, match=r"'h300'.*there are: .*h200"):
        targets.described_sharding("h300")


@pytest.mark.skipif(has_cuda_plugin(), reason="JAX's CUDA plugin is installed")
def test_without_the_plugin_the_error_says_what_to_install() -> None:
    with pytest.raises(jdynoff.ConfigurationError, match=r"pip install .*jax-cuda13-plugin"):
        targets.described_sharding("h200")


@pytest.mark.skipif(not has_cuda_plugin(), reason="JAX's CUDA plugin is not installed")
def test_a_step_is_planned_for_an_absent_h200() -> None:
    sharding = targets.described_sharding("h200")

    def struct(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)
        return jnp.mean(x**2)

    weights = {name: struct(DEPTH, WIDTH, WIDTH) for name in ("in", "out")}
    x = struct(ROWS, WIDTH)
    step = jax.jit(descend(loss))
    plain = step.lower(weights, x).compile().memory_analysis().temp_size_in_bytes
    plan = jdynoff.managed(step, budget="min").plan(weights, x)
    assert plan.offloaded_bytes > 0
    assert plan.memory.temporary_bytes + plan.pool_bytes < plain
