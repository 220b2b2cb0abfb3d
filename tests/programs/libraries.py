"""Steps written with the libraries that people use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as linen
import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from tests.programs.example import BATCH, DEPTH, WIDTH, Example, batch, filled, normal

HIDDEN = 2 * WIDTH


class LinenBlock(linen.Module):
    """One residual block."""

    @linen.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        y = linen.LayerNorm()(x)
        y = linen.Dense(WIDTH)(linen.gelu(linen.Dense(HIDDEN)(y)))
        return x + y, None


class LinenStack(linen.Module):
    """Blocks in a scan, with parameters stacked by `nn.scan`."""

    remat: bool = False

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        block = linen.remat(LinenBlock) if self.remat else LinenBlock
        scanned = linen.scan(
            block, variable_axes={"params": 0}, split_rngs={"params": True}, length=DEPTH
        )
        x, _ = scanned()(x, None)
        return linen.Dense(1)(x)


def linen_with_optax(remat: bool) -> Example:
    """Flax linen, optax Adam with clipping, `TrainState`-like handling."""
    model = LinenStack(remat)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def step(parameters: Any, state: Any, x: jax.Array) -> Any:
        def loss(parameters: Any) -> jax.Array:
            return jnp.mean(model.apply(parameters, x) ** 2)

        value, gradient = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradient, state, parameters)
        return value, optax.apply_updates(parameters, updates), state

    def arguments() -> tuple[Any, ...]:
        parameters = filled(model.init, jax.random.key(0), batch())
        return parameters, filled(optimizer.init, parameters, scale=0.1), batch()

    name = "linen-scan-remat-optax" if remat else "linen-scan-optax"
    return Example(name, step, arguments, ulps=64)


def haiku_stack() -> Example:
    """Haiku, `layer_stack`, and its own state."""

    def forward(x: jax.Array) -> jax.Array:
        def block(x: jax.Array) -> jax.Array:
            y = hk.LayerNorm(-1, True, True)(x)
            return x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(HIDDEN)(y)))

        x = hk.experimental.layer_stack(DEPTH)(block)(x)
        return hk.Linear(1)(x)

    model = hk.without_apply_rng(hk.transform(forward))
    optimizer = optax.adam(1e-2)

    def step(parameters: Any, state: Any, x: jax.Array) -> Any:
        value, gradient = jax.value_and_grad(lambda p: jnp.mean(model.apply(p, x) ** 2))(parameters)
        updates, state = optimizer.update(gradient, state)
        return value, optax.apply_updates(parameters, updates), state

    def arguments() -> tuple[Any, ...]:
        parameters = filled(model.init, jax.random.key(0), batch())
        return parameters, filled(optimizer.init, parameters, scale=0.1), batch()

    return Example("haiku-layer-stack-optax", step, arguments, ulps=64)


class NnxBlock(nnx.Module):
    """One residual block with dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.into = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.out = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.sin(self.into(self.norm(x)))
        return x + self.dropout(self.out(nnx.gelu(y)))


class NnxModel(nnx.Module):
    """Blocks in a Python loop."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(DEPTH)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_split() -> Example:
    """Flax nnx, split and merged by hand around a plain function."""
    graph, _ = nnx.split(NnxModel(nnx.Rngs(0)))

    def step(state: Any, x: jax.Array) -> Any:
        model = nnx.merge(graph, state)

        def loss(model: NnxModel) -> jax.Array:
            return jnp.mean(model(x) ** 2)

        value, gradient = nnx.value_and_grad(loss)(model)
        parameters = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradient))
        return value, nnx.state(model)

    def arguments() -> tuple[Any, ...]:
        return nnx.split(NnxModel(nnx.Rngs(0)))[1], batch()

    return Example("nnx-split-and-merge", step, arguments, ulps=64)


def nnx_train_step(jit: Callable[..., Any] = nnx.jit) -> Any:
    """A step on nnx objects, which it updates in place, as `nnx.jit` runs it."""

    @jit
    def step(model: NnxModel, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
        def loss(model: NnxModel) -> jax.Array:
            return jnp.mean(model(x) ** 2)

        value, gradient = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradient)
        return value

    return step


class EquinoxModel(eqx.Module):
    """Blocks whose arrays are stacked, applied in a scan, and a static activation."""

    blocks: eqx.nn.MLP
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key: jax.Array) -> None:
        def make(key: jax.Array) -> eqx.nn.MLP:
            return eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, key=key)

        self.blocks = eqx.filter_vmap(make)(jax.random.split(key, DEPTH))
        self.activation = jnp.tanh

    def __call__(self, x: jax.Array) -> jax.Array:
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def body(x: jax.Array, block_arrays: Any) -> tuple[jax.Array, None]:
            block = eqx.combine(block_arrays, static)
            return x + self.activation(block(x)), None

        return lax.scan(body, x, arrays)[0]


def equinox_train_step(jit: Callable[..., Any] = eqx.filter_jit) -> Any:
    """A step on an equinox module, as `eqx.filter_jit` runs it."""

    @jit
    def step(model: EquinoxModel, xs: jax.Array) -> Any:
        @eqx.filter_value_and_grad
        def loss(model: EquinoxModel) -> jax.Array:
            return jnp.mean(jax.vmap(model)(xs) ** 2)

        value, gradient = loss(model)
        updates = jax.tree.map(lambda g: -0.1 * g, gradient)
        return value, eqx.apply_updates(model, updates)

    return step


def equinox_arguments() -> tuple[EquinoxModel, jax.Array]:
    """A model and a batch."""
    return EquinoxModel(jax.random.key(0)), normal(3, BATCH, WIDTH)


EXAMPLES = [linen_with_optax(False), linen_with_optax(True), haiku_stack(), nnx_split()]
