"""Small programs that drive the manager's custom calls the way a rewritten step does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdynoff import _native, errors
from jdynoff.primitives.transfer import AS_OPENED, register_handlers

register_handlers("cpu")

SERIAL = jax.ShapeDtypeStruct((), jnp.uint32)
MIB = 1 << 20


def _call(name: str, results: Any, *operands: Any, **attributes: Any) -> Any:
    return jax.ffi.ffi_call(f"jdynoff_{name}", results, has_side_effect=True)(
        *operands, **attributes
    )


def begin(ticket: jax.Array) -> jax.Array:
    return _call("begin", SERIAL, ticket, AS_OPENED)


def offload(value: jax.Array, serial: jax.Array, *, site: int = 1, readers: int = 1) -> jax.Array:
    return _call("offload", SERIAL, value, serial, site=np.int64(site), readers=np.int32(readers))


def reload(
    token: jax.Array, serial: jax.Array, like: Any, *after: jax.Array, site: int = 1
) -> tuple[jax.Array, jax.Array]:
    result = jax.ShapeDtypeStruct(like.shape, like.dtype)
    return _call("reload", (result, SERIAL), token, serial, *after, site=np.int64(site))


def discard(token: jax.Array, serial: jax.Array, *, site: int = 1) -> jax.Array:
    return _call("discard", SERIAL, token, serial, site=np.int64(site))


def end(serial: jax.Array) -> jax.Array:
    return _call("end", SERIAL, serial)


def stack_step(count: int, *, newest_first: bool = True) -> Callable[..., Any]:
    """A scan that stores `count` values, and a scan that reads them back and combines them."""

    @jax.jit
    def step(ticket: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        def forward(carry: Any, _: None) -> Any:
            value, serial = carry
            token = offload(value, serial)
            return (jnp.sin(value) + 0.1, token), token

        def backward(carry: Any, token: jax.Array) -> Any:
            total, serial = carry
            value, serial = reload(token, serial, x, total)
            return (total * jnp.cos(value), serial), value

        (_, serial), tokens = jax.lax.scan(forward, (x, begin(ticket)), None, length=count)
        (total, serial), values = jax.lax.scan(
            backward, (jnp.ones_like(x), serial), tokens, reverse=newest_first
        )
        return total, values, end(serial)

    return step


def stack_values(x: jax.Array, count: int) -> jax.Array:
    """The values that `stack_step` stores, computed without the manager."""
    return jax.jit(
        lambda x: jax.lax.scan(lambda v, _: (jnp.sin(v) + 0.1, v), x, None, length=count)[1]
    )(x)


@contextlib.contextmanager
def ticket_of(manager: _native.Manager, pool_bytes: int, spill_bytes: int = 0) -> Iterator[Any]:
    """Opens a ticket as the u32 scalar that a step takes, and closes it."""
    ticket = manager.open(pool_bytes, spill_bytes)
    try:
        yield np.uint32(ticket)
    finally:
        manager.close(ticket)


def failure_of(step: Callable[..., Any], *arguments: Any) -> errors.TransferError:
    """Runs a step that must fail, and returns the manager's error."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(step(*arguments))
    found = errors.from_xla(caught.value)
    assert isinstance(found, errors.TransferError), str(caught.value)
    return found
