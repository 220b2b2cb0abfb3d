"""Managed steps take their arguments as the jitted step does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdynoff
from tests.programs.example import batch, descend, layer, normal, quick, same_bits, weights


def loss(parameters: Any, x: jax.Array, power: int = 2, scale: Any = 1.0) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w) * scale, None), x, parameters)
    return jnp.mean(x**power)


def counted(step: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """The step, and a list that grows by one with each of its traces."""
    traces: list[int] = []

    @functools.wraps(step)
    def traced(*args: Any, **kwargs: Any) -> Any:
        traces.append(1)
        return step(*args, **kwargs)

    return traced, traces


def test_each_signature_is_traced_once() -> None:
    step, traces = counted(descend(loss))
    managed = jdynoff.managed(quick(step), budget="min", min_bytes=1, flops_per_byte=0.0)
    plain = quick(descend(loss))
    small, large = (weights(), batch()), (weights(), jnp.concatenate([batch(), batch()]))
    for arguments in (small, large, small, large, small):
        assert same_bits(managed(*arguments), plain(*arguments))
    assert len(traces) == 2


def test_static_arguments_and_keywords_choose_a_program() -> None:
    def step(parameters: Any, x: jax.Array, power: int, *, scale: Any, negate: bool) -> Any:
        sign = -1 if negate else 1
        return jax.value_and_grad(lambda p: sign * loss(p, x, power, scale))(parameters)

    options: dict[str, Any] = {"static_argnums": (2,), "static_argnames": ("negate",)}
    counted_step, traces = counted(step)
    plain = quick(step, **options)
    managed = jdynoff.managed(
        quick(counted_step, **options), budget="min", min_bytes=1, flops_per_byte=0.0
    )
    for power, negate in ((2, False), (4, False), (2, True), (2, False)):
        expected = plain(weights(), batch(), power, scale=0.5, negate=negate)
        actual = managed(weights(), batch(), power, scale=0.5, negate=negate)
        assert same_bits(expected, actual)
    assert len(traces) == 3


@pytest.mark.parametrize("scale", [2, 0.5, np.float32(0.5), np.array(0.5), True, jnp.float32(0.5)])
def test_numpy_and_python_scalars_keep_their_weak_types(scale: Any) -> None:
    def step(x: jax.Array, scale: Any) -> Any:
        return (x.astype(jnp.bfloat16) * scale, jnp.asarray(scale) + 1)

    expected, actual = jax.jit(step)(batch(), scale), jdynoff.managed(step)(batch(), scale)
    for left, right in zip(expected, actual, strict=True):
        assert jax.typeof(left) == jax.typeof(right)
    assert same_bits(expected, actual)


def test_weak_and_strong_scalars_are_different_signatures() -> None:
    step, traces = counted(lambda x, s: x.astype(jnp.bfloat16) * s)
    managed = jdynoff.managed(step)
    x = batch()
    dtypes = [managed(x, s).dtype for s in (2.0, np.float32(2.0), 3.0, np.float32(3.0))]
    assert dtypes == [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.float32]
    assert len(traces) == 2


def test_none_and_empty_trees_pass_through() -> None:
    def step(tree: Any, nothing: Any) -> Any:
        return {"a": tree["x"] + 1, "none": None, "empty": (), "nested": [nothing, {}]}

    managed = jdynoff.managed(step)
    found = managed({"x": batch(), "y": None}, ())
    assert found["none"] is None
    assert found["empty"] == ()
    assert found["nested"] == [(), {}]
    assert jdynoff.managed(lambda: ())() == ()
    assert same_bits(jdynoff.managed(lambda: jnp.arange(3))(), jnp.arange(3))


def test_donated_arguments_are_used_up_by_the_step() -> None:
    step = jdynoff.managed(
        quick(descend(loss), donate_argnums=0), budget="min", min_bytes=1, flops_per_byte=0.0
    )
    parameters, x = weights(), batch()
    _, new = step(parameters, x)
    jax.block_until_ready(new)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(parameters))
    assert not x.is_deleted()
    memory = step.lower(new, x).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(new))


def test_donated_arguments_survive_a_failed_reservation(spill_directory: Path) -> None:
    tier = jdynoff.Disk(spill_directory, limit=16384)
    step = quick(descend(loss), donate_argnums=0)
    managed = jdynoff.managed(step, budget="min", tiers=[tier])
    parameters, x = weights(depth=16, width=128), normal(0, 2048, 128)
    assert managed.plan(parameters, x).spill_bytes > 16384
    with pytest.raises(jdynoff.SpillSpaceError):
        managed(parameters, x)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(parameters))


def test_shardings_on_one_device_are_kept() -> None:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    options: dict[str, Any] = {"in_shardings": (sharding, None), "out_shardings": sharding}
    plain = quick(descend(loss), **options)
    managed = jdynoff.managed(
        quick(descend(loss), **options), budget="min", min_bytes=1, flops_per_byte=0.0
    )
    expected, actual = plain(weights(), batch()), managed(weights(), batch())
    assert same_bits(expected, actual)
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(actual))


def test_the_wrapper_looks_like_the_step() -> None:
    @jdynoff.managed(budget="min")
    @jax.jit
    def train_step(x: jax.Array) -> jax.Array:
        """Trains."""
        return x + 1

    assert train_step.__name__ == "train_step"
    assert train_step.__doc__ == "Trains."
    assert train_step.__wrapped__(1) == 2


def test_the_default_minimum_leaves_small_arrays_alone() -> None:
    managed = jdynoff.managed(quick(descend(loss)), budget="min")
    assert managed.plan(weights(), batch()).offloaded_bytes == 0


def test_a_method_is_managed_like_a_function() -> None:
    class Trainer:
        def __init__(self, power: int) -> None:
            self.power = power

        @jdynoff.managed(budget="min", min_bytes=1, flops_per_byte=0.0)
        @functools.partial(jax.jit, static_argnums=0)
        def step(self, parameters: Any, x: jax.Array) -> Any:
            return jax.value_and_grad(loss)(parameters, x, self.power)

    arguments = (weights(), batch())
    for power in (2, 4):
        trainer = Trainer(power)
        expected = quick(jax.value_and_grad(loss), static_argnums=2)(*arguments, power)
        assert jnp.allclose(trainer.step(*arguments)[0], expected[0], rtol=1e-6)
        assert trainer.step.plan(*arguments).sites
        assert trainer.step.stats().bytes_offloaded > 0


def test_argument_numbers_may_count_from_the_end() -> None:
    def step(x: jax.Array, parameters: Any, power: int) -> Any:
        return jax.value_and_grad(loss)(parameters, x, power)

    options = {"static_argnums": -1, "donate_argnums": -2}
    managed = jdynoff.managed(quick(step, **options), budget="min", min_bytes=1, flops_per_byte=0.0)
    given = weights()
    found = managed(batch(), given, 2)
    assert same_bits(found, quick(step, static_argnums=2)(batch(), weights(), 2))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_options_of_jax_that_change_a_trace_are_part_of_the_signature() -> None:
    def step(parameters: Any, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(loss)(parameters, x)
        return value, gradient, jnp.arange(3.0) + 0.5

    managed = jdynoff.managed(quick(step), budget="min", min_bytes=1, flops_per_byte=0.0)
    arguments = (weights(), batch())
    assert managed(*arguments)[2].dtype == jnp.float32
    with jax.enable_x64(True):
        assert managed(*arguments)[2].dtype == jnp.float64
    assert managed(*arguments)[2].dtype == jnp.float32


def test_calls_do_not_look_at_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with one signature, nor with several, nor after a plan that chose anew."""
    managed = jdynoff.managed(quick(descend(loss)), min_bytes=1, flops_per_byte=0.0)
    small, large = (weights(), batch()), (weights(), jnp.concatenate([batch(), batch()]))
    managed(*small)
    managed.plan(*small)  # compiles the least-memory program too
    counted: list[int] = []
    whole = jdynoff.managed.__globals__["signature"]
    monkeypatch.setitem(
        jdynoff.managed.__globals__,
        "signature",
        lambda *args: counted.append(1) or whole(*args),
    )
    managed(*small)  # the program that the plan chose
    counted.clear()
    for _ in range(3):
        managed(*small)
    assert not counted
    managed(*large)
    managed(*small)
    counted.clear()
    for arguments in (small, large, large, small):
        managed(*arguments)
    assert not counted


def test_a_compiled_step_refuses_other_types() -> None:
    managed = jdynoff.managed(quick(descend(loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
    compiled = managed.lower(weights(), batch()).compile()
    assert same_bits(compiled(weights(), batch()), managed(weights(), batch()))
    with pytest.raises(TypeError, match="lowered for arguments of other types"):
        compiled(weights(), jnp.concatenate([batch(), batch()]))


def test_shapes_of_results_are_known_without_planning() -> None:
    managed = jdynoff.managed(quick(descend(loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
    shapes = managed.eval_shape(weights(), batch())
    assert shapes[0].shape == ()
