"""`jax.checkpoint`, custom derivative rules, and derivatives of derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tests.programs.example import (
    BATCH,
    DEPTH,
    WIDTH,
    Example,
    batch,
    descend,
    layer,
    normal,
    weights,
)


def _plain_arguments() -> tuple[Any, ...]:
    return weights(), batch()


def _scan_loss(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
    return jnp.mean(x**2)


def checkpoint_in_scan(prevent_cse: bool) -> Example:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        block = jax.checkpoint(layer, prevent_cse=prevent_cse)
        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, parameters)
        return jnp.mean(x**2)

    return Example(f"checkpoint-in-scan-cse-{not prevent_cse}", descend(loss), _plain_arguments)


def checkpoint_around_scan() -> Example:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        return jax.checkpoint(_scan_loss)(parameters, jnp.sin(x)) * 2

    return Example("checkpoint-around-scan", descend(loss), _plain_arguments)


def checkpoint_between_scans() -> Example:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def stage(x: jax.Array) -> jax.Array:
            return lax.scan(lambda x, w: (layer(x, w), None), x, parameters)[0]

        return jnp.mean(jax.checkpoint(stage)(stage(jax.checkpoint(stage)(x))) ** 2)

    return Example("checkpoint-between-scans", descend(loss), _plain_arguments, ulps=32)


def checkpoint_in_checkpoint() -> Example:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def outer(x: jax.Array, weight: Any) -> jax.Array:
            inner = jax.checkpoint(lambda x: layer(jnp.sin(x), weight))
            return inner(inner(x))

        x, _ = lax.scan(lambda x, w: (outer(x, w), None), x, parameters)
        return jnp.mean(x**2)

    return Example("checkpoint-in-checkpoint-in-scan", descend(loss), _plain_arguments)


def checkpoint_policy() -> Example:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        block = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)
        x, _ = lax.scan(lambda x, w: (block(x, w), None), x, parameters)
        return jnp.mean(x**2)

    return Example("checkpoint-policy-in-scan", descend(loss), _plain_arguments)


def checkpoint_of_switch() -> Example:
    def loss(parameters: Any, x: jax.Array, choices: jax.Array) -> jax.Array:
        @jax.checkpoint
        def block(x: jax.Array, choice: jax.Array, weight: Any) -> jax.Array:
            return lax.switch(choice, [lambda x: layer(x, weight), jnp.sin], x)

        x, _ = lax.scan(lambda x, i: (block(x, *i), None), x, (choices, parameters))
        return jnp.mean(x**2)

    return Example(
        "checkpoint-of-switch-in-scan",
        descend(loss),
        lambda: (weights(), batch(), jnp.arange(DEPTH) % 2),
    )


@jax.custom_vjp
def _clipped(x: jax.Array) -> jax.Array:
    return jnp.sin(x) * x


def _clipped_forward(x: jax.Array) -> tuple[jax.Array, Any]:
    return _clipped(x), (jnp.cos(x) * x, None, {"sine": jnp.sin(x)})


def _clipped_backward(residuals: Any, cotangent: jax.Array) -> tuple[jax.Array]:
    slope, _, rest = residuals
    return (jnp.clip((slope + rest["sine"]) * cotangent, -0.1, 0.1),)


_clipped.defvjp(_clipped_forward, _clipped_backward)


@jax.custom_jvp
def _softened(x: jax.Array) -> jax.Array:
    return jnp.log1p(jnp.exp(x))


@_softened.defjvp
def _softened_jvp(primals: Any, tangents: Any) -> Any:
    (x,), (t,) = primals, tangents
    return _softened(x), jax.nn.sigmoid(x) * t


def custom_vjp() -> Example:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            return x + _clipped(x @ weight["in"]) @ weight["out"], None

        return jnp.mean(lax.scan(body, x, parameters)[0] ** 2)

    return Example("custom-vjp-in-scan", descend(loss), _plain_arguments)


def custom_jvp() -> Example:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            return x + _softened(x @ weight["in"]) @ weight["out"], None

        return jnp.mean(lax.scan(body, x, parameters)[0] ** 2)

    return Example("custom-jvp-in-scan", descend(loss), _plain_arguments)


@jax.custom_vjp
def _scan_with_rule(parameters: Any, x: jax.Array) -> jax.Array:
    return _scan_loss(parameters, x)


def _scan_with_rule_forward(parameters: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    def body(x: jax.Array, weight: Any) -> tuple[jax.Array, jax.Array]:
        return layer(x, weight), x

    last, inputs = lax.scan(body, x, parameters)
    return jnp.mean(last**2), (inputs, last, parameters)


def _scan_with_rule_backward(residuals: Any, cotangent: jax.Array) -> Any:
    inputs, last, parameters = residuals

    def body(g: jax.Array, saved: Any) -> tuple[jax.Array, Any]:
        x, weight = saved
        _, pull = jax.vjp(layer, x, weight)
        g, weight_gradient = pull(g)
        return g, weight_gradient

    start = cotangent * 2 * last / last.size
    g, gradients = lax.scan(body, start, (inputs, parameters), reverse=True)
    return gradients, g


_scan_with_rule.defvjp(_scan_with_rule_forward, _scan_with_rule_backward)


def custom_vjp_of_scan() -> Example:
    return Example("custom-vjp-around-scans", descend(_scan_with_rule), _plain_arguments)


def vmapped_model() -> Example:
    def loss(parameters: Any, xs: jax.Array, choices: jax.Array) -> jax.Array:
        def one(x: jax.Array, choice: jax.Array) -> jax.Array:
            def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
                y = layer(x, weight)
                return lax.cond(choice > 0, lambda y: jnp.sin(y) * y, lambda y: y, y), None

            return jnp.mean(lax.scan(body, x, parameters)[0] ** 2)

        return jax.vmap(one)(xs, choices).sum()

    return Example(
        "vmapped-model-with-batched-cond",
        descend(loss),
        lambda: (weights(), normal(3, 3, BATCH, WIDTH), jnp.asarray([0, 1, 1])),
    )


def vmapped_gradient() -> Example:
    def step(parameters: Any, xs: jax.Array) -> Any:
        return jax.vmap(jax.grad(_scan_loss), in_axes=(None, 0))(parameters, xs)

    return Example("vmap-of-grad", step, lambda: (weights(), normal(3, 3, BATCH, WIDTH)))


def reverse_jacobian() -> Example:
    def step(parameters: Any, x: jax.Array) -> Any:
        def outputs(x: jax.Array) -> jax.Array:
            return lax.scan(lambda x, w: (layer(x, w), None), x, parameters)[0].sum(0)

        return jax.jacrev(outputs)(x)

    return Example("vmapped-vjp-jacrev", step, _plain_arguments)


def hessian_vector_product() -> Example:
    def step(parameters: Any, x: jax.Array, direction: Any) -> Any:
        def gradient(parameters: Any) -> Any:
            return jax.grad(_scan_loss)(parameters, x)

        return jax.jvp(gradient, (parameters,), (direction,))

    return Example("forward-over-reverse", step, lambda: (weights(), batch(), weights(40)), ulps=64)


def reverse_over_reverse(unroll: int) -> Example:
    def step(parameters: Any, x: jax.Array) -> Any:
        def loss(parameters: Any, x: jax.Array) -> jax.Array:
            x, _ = lax.scan(lambda x, w: (layer(x, w), None), x, parameters, unroll=unroll)
            return jnp.mean(x**2)

        def norm(parameters: Any) -> jax.Array:
            gradient = jax.grad(loss)(parameters, x)
            return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient))

        return jax.value_and_grad(norm)(parameters)

    return Example(f"grad-of-grad-unroll-{unroll}", step, _plain_arguments, ulps=64)


def reverse_over_forward() -> Example:
    def step(parameters: Any, x: jax.Array, direction: Any) -> Any:
        def slope(parameters: Any) -> jax.Array:
            return jax.jvp(lambda p: _scan_loss(p, x), (parameters,), (direction,))[1]

        return jax.value_and_grad(slope)(parameters)

    return Example("reverse-over-forward", step, lambda: (weights(), batch(), weights(40)), ulps=64)


def branch_of_scan_differentiated_twice() -> Example:
    """A branch returns stacks that its second derivative reads as a whole.

    They are moved as stacks, so the scan must build them although the branch returns none of them.
    """

    def loss(parameters: Any, x: jax.Array, deep: jax.Array) -> jax.Array:
        def scans(x: jax.Array) -> jax.Array:
            y, states = lax.scan(lambda x, w: (layer(x, w), jnp.sin(x)), x, parameters)
            return lax.scan(lambda y, s: (jnp.tanh(y + s), None), y, states, reverse=True)[0]

        return jnp.mean(lax.cond(deep, scans, jnp.cos, x) ** 2)

    def step(parameters: Any, x: jax.Array, deep: jax.Array) -> Any:
        def norm(x: jax.Array) -> jax.Array:
            return jnp.sum(jax.grad(loss, argnums=1)(parameters, x, deep) ** 2)

        return jax.value_and_grad(norm)(x)

    def arguments() -> tuple[Any, ...]:
        return weights(), batch(), jnp.asarray(True)

    return Example("grad-of-grad-of-branch-of-scan", step, arguments, ulps=64)


def gradient_penalty() -> Example:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        slope = jax.grad(lambda x: _scan_loss(parameters, x))(x)
        return _scan_loss(parameters, x) + jnp.sum(slope**2)

    return Example("gradient-penalty", descend(loss), _plain_arguments, ulps=64)


EXAMPLES = [
    checkpoint_in_scan(True),
    checkpoint_in_scan(False),
    checkpoint_around_scan(),
    checkpoint_between_scans(),
    checkpoint_in_checkpoint(),
    checkpoint_policy(),
    checkpoint_of_switch(),
    custom_vjp(),
    custom_jvp(),
    custom_vjp_of_scan(),
    vmapped_model(),
    vmapped_gradient(),
    reverse_jacobian(),
    hessian_vector_product(),
    reverse_over_reverse(1),
    reverse_over_reverse(2),
    reverse_over_forward(),
    gradient_penalty(),
    branch_of_scan_differentiated_twice(),
]
