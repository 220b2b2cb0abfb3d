"""The loops that a differentiated `while_loop` becomes: one that pushes, and one that pops.

    forward:   handle = open()                      backward:  handle = claim(handle, trips)
               while cond(x):                                  or, if it is gone, the forward loop
                   x, kept = step(x)                                again, for as many trips
                   push(handle, kept)                          for each trip, last first:
               handle, trips = seal(handle)                        ct = back(pop(handle), ct)

A second backward pass over one forward pass finds the stack gone and computes it again. So does
one in another execution (`jax.grad` of a jitted function), if its stack has been given up.

The trap: computing again must not ask the predicate. Another compilation may round differently
and make another trip; the number of trips is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdynoff import jax_compat
from jdynoff.loops.trip import Trip
from jdynoff.primitives import stack

_NONE = np.uint32(0)


def plain_loop(
    *operands: Any, cond_nconsts: int, body_nconsts: int, cond_jaxpr: Any, body_jaxpr: Any
) -> list[Any]:
    """The loop without a derivative: `lax.while_loop`."""
    first = cond_nconsts + body_nconsts
    cond_consts, consts = operands[:cond_nconsts], operands[cond_nconsts:first]
    return lax.while_loop(
        lambda carry: jax_compat.evaluate(cond_jaxpr, *cond_consts, *carry)[0],
        lambda carry: jax_compat.evaluate(body_jaxpr, *consts, *carry),
        list(operands[first:]),
    )


def forward_loop(anchor: Any, *operands: Any, trip: Trip) -> list[Any]:
    """The loop that keeps what its backward pass needs.

    Args:
      anchor: u32[], what the stack must be opened after.
      *operands: constants of the predicate, constants of the body, initial values.
      trip: what a trip does.

    Returns:
      The final values, the number of trips (u32[]) and the stack's handle (u32[]).
    """
    split = trip.num_cond_consts
    cond_consts, operands = operands[:split], operands[split:]
    consts, init = operands[: trip.num_consts], list(operands[trip.num_consts :])

    def test(carried: Any) -> Any:
        return jax_compat.evaluate(trip.cond, *cond_consts, *carried[0])[0]

    return _push_trips(trip, anchor, consts, init, test)


def _push_trips(
    trip: Trip, anchor: Any, consts: Sequence[Any], init: list[Any], test: Any
) -> list[Any]:
    keeps = bool(trip.kept_avals)
    handle: Any = stack.open_stack(anchor, trip.kept_avals) if keeps else _NONE

    def iteration(carried: Any) -> Any:
        state, trips = carried
        results = jax_compat.evaluate(trip.step, *consts, *state)
        state, kept = results[: trip.num_carry], results[trip.num_carry :]
        return state, stack.push(handle, trips, kept) if keeps else trips + 1

    state, trips = lax.while_loop(test, iteration, (init, jnp.uint32(0)))
    sealed = stack.seal(handle, trips) if keeps else jnp.uint32(0)
    return [*state, trips, sealed]


def backward_loop(anchor: Any, handle: Any, trips: Any, *operands: Any, trip: Trip) -> list[Any]:
    """The loop over the same trips, last first.

    Args:
      anchor: u32[], as in `forward_loop`.
      handle: u32[], from the forward loop.
      trips: u32[], how many there were.
      *operands: constants of the body, initial values, cotangents of the active final values.
      trip: what a trip does.

    Returns:
      Cotangents of the active constants, then of the active initial values.
    """
    first = trip.num_consts + trip.num_carry
    consts, init = operands[: trip.num_consts], list(operands[trip.num_consts : first])
    cotangents = list(operands[first:])
    invariants = jax_compat.evaluate(trip.hoist, *consts)
    kept_avals = trip.kept_avals

    def compute_again() -> Any:
        def test(carried: Any) -> Any:
            return carried[1] < trips

        *_, again = _push_trips(trip, anchor, consts, init, test)
        return stack.claim(again, trips, [], kept_avals)

    if kept_avals:
        claimed = stack.claim(handle, trips, cotangents[:1], kept_avals)
        handle = lax.cond(claimed == 0, compute_again, lambda: claimed)

    num_consts = len(trip.active_consts)
    sums = [
        jnp.zeros(aval.shape, aval.dtype) for aval in jax_compat.out_avals(trip.back)[:num_consts]
    ]

    def iteration(carried: Any) -> Any:
        left, sums, cotangents = carried
        kept: list[Any] = []
        if kept_avals:
            kept, left = stack.pop(handle, left, cotangents[:1], kept_avals)
        else:
            left = left - 1
        results = jax_compat.evaluate(trip.back, *invariants, *kept, *cotangents)
        sums = [total + new for total, new in zip(sums, results, strict=False)]
        return left, sums, results[num_consts:]

    _, sums, cotangents = lax.while_loop(
        lambda carried: carried[0] > 0, iteration, (trips, sums, cotangents)
    )
    return [*sums, *cotangents]


def in_one_program(function: Any, **params: Any) -> Any:
    """How a primitive of this package runs outside of `jax.jit`: compiled by itself."""
    return lambda *operands: jax.jit(lambda *arrays: function(*arrays, **params))(*operands)
