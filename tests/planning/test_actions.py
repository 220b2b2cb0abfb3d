"""`actions=`: what the user decides holds, and a pattern that matches nothing is an error."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jdynoff
from tests.programs.example import descend, difference_in_ulps, normal, quick

DEPTH, ROWS, WIDTH = 3, 16, 32


def loss(parameters: Any, x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("mix"):
            hidden = checkpoint_name(jnp.tanh(x @ weight), "hidden")
        with jax.named_scope("gate"):
            return x + hidden * jnp.sin(hidden @ weight), None

    with jax.named_scope("net"):
        x, _ = jax.lax.scan(layer, x, parameters)
    return jnp.mean(x**2)


def arguments() -> tuple[Any, jax.Array]:
    return normal(0, DEPTH, WIDTH, WIDTH), normal(1, ROWS, WIDTH)


def managed(actions: dict[str, str], **options: Any) -> Any:
    given = {"budget": "min", "min_bytes": 1, "flops_per_byte": 0.0, **options}
    return jdynoff.managed(quick(descend(loss)), actions=actions, **given)


def actions_of(plan: Any, shape: tuple[int, ...] = (ROWS, WIDTH)) -> list[str]:
    return sorted(site.action for site in plan.sites if site.shape == shape)


@pytest.mark.parametrize("pattern", ["hidden", "net/mix", "mix/dot_general", "*/mi?/tanh", "net"])
@pytest.mark.parametrize("action", ["offload", "recompute", "keep"])
def test_results_do_not_depend_on_actions(pattern: str, action: str) -> None:
    plain = quick(descend(loss))(*arguments())
    assert difference_in_ulps(plain, managed({pattern: action})(*arguments())) <= 8


def test_what_is_recomputed_is_not_moved() -> None:
    before = managed({}).plan(*arguments())
    after = managed({"net": "recompute"}).plan(*arguments())
    moved = [s for s in after.sites if s.action == "offload" and s.entries == DEPTH]
    # The carry is no result of an operation: it is moved, and everything follows from it.
    assert [site.bytes for site in moved] == [DEPTH * ROWS * WIDTH * 4]
    assert after.offloaded_bytes < before.offloaded_bytes
    assert after.forecast.extra_flops > before.forecast.extra_flops


def test_what_is_offloaded_is_not_recomputed() -> None:
    free = managed({}, flops_per_byte=1e9).plan(*arguments())
    pinned = managed({"mix/tanh": "offload", "hidden": "offload"}, flops_per_byte=1e9)
    assert pinned.plan(*arguments()).offloaded_bytes > free.offloaded_bytes


def test_what_is_kept_stays_in_xla() -> None:
    plan = managed({"net": "keep"}).plan(*arguments())
    assert "keep" in actions_of(plan)
    # But for the carry, which no operation made.
    assert [s.bytes for s in plan.sites if s.action == "offload" and s.entries == DEPTH] == [
        DEPTH * ROWS * WIDTH * 4
    ]


def test_a_pattern_that_matches_nothing_names_what_there_is() -> None:
    with pytest.raises(jdynoff.ConfigurationError, match=r"'hiden'.*hidden"):
        managed({"net": "keep", "hiden": "offload"})(*arguments())


def test_an_unknown_action_is_refused_at_once() -> None:
    with pytest.raises(jdynoff.ConfigurationError, match="keep, offload, recompute"):
        managed({"net": "forget"})


def test_what_cannot_be_recomputed_says_so() -> None:
    def looping(parameters: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("solve"):
                y = jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ weight), x)
                y = jax.lax.stop_gradient(y)
            return (x @ weight) * y, None

        return jnp.mean(jax.lax.scan(layer, x, parameters)[0] ** 2)

    step = jdynoff.managed(
        quick(descend(looping)), budget="min", min_bytes=1, actions={"solve": "recompute"}
    )
    with pytest.raises(jdynoff.ConfigurationError, match="cannot be computed again"):
        step(*arguments())
