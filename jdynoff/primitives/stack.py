"""Primitives that push what a loop's trip keeps onto a stack of the buffer manager, and pop it.

They exist only while a loop is lowered (`jdynoff.loops.lowering`), inside `lax.while_loop` bodies
that hand a *serial* from trip to trip: pushes and pops of one stack happen in the order of the
trips. Different stacks have no order, and need none: each is named by its *handle*, made at run
time by `open_stack` and carried as data.

The trap: XLA must neither merge two openings with equal operands, nor move one out of a loop, nor
remove a push. The side-effect flag says so; there is no JAX effect, as in `primitives.transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.interpreters import mlir

from jdynoff import jax_compat
from jdynoff.primitives import transfer
from jdynoff.primitives.transfer import SERIAL
from jdynoff.runtime import loops as loop_memory

open_p = jex_core.Primitive("jdynoff_stack_open")
push_p = jex_core.Primitive("jdynoff_stack_push")
seal_p = jex_core.Primitive("jdynoff_stack_seal")
claim_p = jex_core.Primitive("jdynoff_stack_claim")
pop_p = jex_core.Primitive("jdynoff_stack_pop")
pop_p.multiple_results = True


def _sizes(avals: Sequence[Any]) -> tuple[int, ...]:
    return tuple(jax_compat.saveable_bytes(aval) for aval in avals)


def open_stack(anchor: jax.Array, avals: Sequence[Any]) -> jax.Array:
    """Makes a stack for one execution of a loop.

    Args:
      anchor: u32[], must exist first; orders the call after a managed step's beginning.
      avals: shape and dtype of the arrays that each trip keeps.

    Returns:
      Its handle, u32[], never 0 and unique in the process.
    """
    return open_p.bind(anchor, sizes=_sizes(avals))


def push(handle: jax.Array, serial: jax.Array, values: Sequence[jax.Array]) -> jax.Array:
    """Pushes one trip's arrays; `serial` (u32[]) counts the trips. Returns the next serial."""
    return push_p.bind(handle, serial, *values)


def seal(handle: jax.Array, serial: jax.Array) -> jax.Array:
    """Ends the forward pass; returns the handle, or 0 if the stack is gone."""
    return seal_p.bind(handle, serial)


def claim(
    handle: jax.Array, trips: jax.Array, dependencies: Sequence[jax.Array], avals: Sequence[Any]
) -> jax.Array:
    """Takes a stack for one backward pass.

    Args:
      handle: u32[], from `seal`.
      trips: u32[], how many must have been pushed.
      dependencies: arrays that must exist first; they only order the call.
      avals: as given to `open_stack`.

    Returns:
      The handle, or 0 if no such stack is there: it was claimed before, or given up.
    """
    return claim_p.bind(handle, trips, *dependencies, sizes=_sizes(avals))


def pop(
    handle: jax.Array, serial: jax.Array, dependencies: Sequence[jax.Array], avals: Sequence[Any]
) -> tuple[list[jax.Array], jax.Array]:
    """Takes back the last trip's arrays; returns them and the serial (u32[]), one less."""
    serial, *values = pop_p.bind(handle, serial, *dependencies, avals=tuple(avals))
    return values, serial


open_p.def_abstract_eval(lambda anchor, *, sizes: SERIAL)
push_p.def_abstract_eval(lambda handle, serial, *values: SERIAL)
seal_p.def_abstract_eval(lambda handle, serial: SERIAL)
claim_p.def_abstract_eval(lambda handle, trips, *dependencies, sizes: SERIAL)
pop_p.def_abstract_eval(lambda handle, serial, *dependencies, avals: [SERIAL, *avals])


def _rule(primitive: jex_core.Primitive) -> Any:
    def lower(ctx: Any, *operands: Any, sizes: tuple[int, ...] | None = None, **_: Any) -> Any:
        attributes = {} if sizes is None else {"sizes": np.asarray(sizes, np.int64)}
        return jax.ffi.ffi_lowering(primitive.name, has_side_effect=True)(
            ctx, *operands, **attributes
        )

    return lower


def _lower_open(ctx: Any, anchor: Any, *, sizes: tuple[int, ...]) -> Any:
    for platform in jax_compat.lowering_platforms(ctx):
        transfer.register_handlers("CUDA" if platform in ("cuda", "gpu") else platform)
    loop_memory.configure()
    return _rule(open_p)(ctx, anchor, sizes=sizes)


mlir.register_lowering(open_p, _lower_open)
for _primitive in (push_p, seal_p, claim_p, pop_p):
    mlir.register_lowering(_primitive, _rule(_primitive))
