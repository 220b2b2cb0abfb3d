"""Blocks repeated with their own parameters, as one `lax.scan` over stacked parameters.

For the Evoformer, the extra-MSA stack and the template pair stack. Parameters keep the path that a
single block would have and gain a leading block axis, as in the published files. The trap: the
block is transformed on its own, so it must not use a Haiku module of the surrounding function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from models.alphafold.network.settings import Settings

Carry = Any
Constants = Any


def lift_function(
    fun: Callable[..., Any], *args: Any, scope: str | None = None, count: int | None = None
) -> tuple[hk.Params, Callable[..., Any]]:
    """Turn a Haiku function into a pure one, its parameters registered in the current scope.

    JAX control flow (`scan`, `cond`, `while_loop`) may then be used on it freely.

    Args:
        fun: function of `args` that makes Haiku modules.
        *args: example arguments; their shapes decide those of the parameters.
        scope: extra name in the path of the parameters.
        count: number of independent copies; parameters then have a leading axis of that length.

    Returns:
        The parameters and `apply(params, rng, *args)`.
    """
    transformed = hk.transform(fun)

    def init(rng: jax.Array | None, *xs: Any) -> hk.Params:
        if count is None:
            return transformed.init(rng, *xs)
        if rng is None:
            raise ValueError(
                "A random key is needed to initialise stacked blocks; pass one to init."
            )
        keys = jax.random.split(rng, count)
        return jax.vmap(lambda key: transformed.init(key, *xs))(keys)

    rng = hk.next_rng_key() if hk.running_init() else None
    lift = hk.transparent_lift(init) if scope is None else hk.lift(init, name=scope)
    return lift(rng, *args), transformed.apply


def run_if(
    predicate: jax.Array,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    otherwise: Callable[..., Any],
    settings: Settings,
) -> Any:
    """Run a Haiku function only if a traced predicate holds (`lax.cond`).

    Under `vmap` over the predicate both branches run, as always in JAX.

    Args:
        predicate: boolean scalar.
        fun: Haiku function of `args`.
        args: its arguments.
        otherwise: function of `args` without parameters, with results of the same shapes.
        settings: says whether `fun` needs a random key.

    Returns:
        The result of `fun` or of `otherwise`.
    """
    params, apply = lift_function(fun, *args)
    if hk.running_init():
        return otherwise(*args)
    rng = hk.next_rng_key() if settings.uses_dropout else None
    return jax.lax.cond(
        predicate, lambda xs: apply(params, rng, *xs), lambda xs: otherwise(*xs), args
    )


def scan_blocks(
    block: Callable[[Carry, Constants], Carry],
    count: int,
    carry: Carry,
    constants: Constants,
    settings: Settings,
    *,
    module: str | None = None,
    scope: str | None = None,
    converged: Callable[[Carry, Carry], jax.Array] | None = None,
) -> tuple[Carry, jax.Array]:
    """Run `count` blocks, each on the result of the one before.

    Args:
        block: Haiku function from carry and constants to a carry of the same shapes.
        count: number of blocks; 0 has no parameters and returns `carry`.
        carry: what the blocks transform.
        constants: what they all read (masks).
        settings: checkpointing, dropout and halting.
        module: name of the one module that `block` makes, to tell its parameters from those of
            other stacks in the same scope.
        scope: extra name in the path of the parameters.
        converged: maps a block's input and output to a boolean scalar; once true (after
            `settings.halt_min_blocks` blocks) the remaining blocks are skipped by `lax.cond`.

    Returns:
        The last carry, and the number of blocks that ran (int32 scalar).
    """
    if count == 0:
        return carry, jnp.zeros((), jnp.int32)
    params, apply = lift_function(block, carry, constants, scope=scope, count=count)
    if hk.running_init():
        return carry, jnp.asarray(count, jnp.int32)
    if module is not None:
        params = {
            path: values
            for path, values in params.items()
            if path == module or path.startswith(module + "/")
        }
    rngs = jax.random.split(hk.next_rng_key(), count) if settings.uses_dropout else None

    def run(block_params: hk.Params, rng: jax.Array | None, value: Carry) -> Carry:
        return apply(block_params, rng, value, constants)

    if settings.checkpoint_blocks:
        run = jax.checkpoint(run)

    if converged is None:

        def step(value: Carry, xs: Any) -> tuple[Carry, None]:
            return run(*xs, value), None

        final, _ = jax.lax.scan(step, carry, (params, rngs))
        return final, jnp.asarray(count, jnp.int32)

    def maybe_step(state: tuple[Carry, jax.Array, jax.Array], xs: Any) -> tuple[Any, None]:
        value, halted, ran = state

        def advance(operands: tuple[Any, Carry]) -> tuple[Carry, jax.Array]:
            block_xs, before = operands
            after = run(*block_xs, before)
            return after, converged(before, after)

        def keep(operands: tuple[Any, Carry]) -> tuple[Carry, jax.Array]:
            return operands[1], jnp.asarray(True)

        new_value, settled = jax.lax.cond(halted, keep, advance, (xs, value))
        ran = ran + jnp.where(halted, 0, 1)
        halted = halted | (settled & (ran >= settings.halt_min_blocks))
        return (new_value, halted, ran), None

    start = (carry, jnp.asarray(False), jnp.asarray(0, jnp.int32))
    (final, _, ran), _ = jax.lax.scan(maybe_step, start, (params, rngs))
    return final, ran
