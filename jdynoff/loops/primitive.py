"""The primitives behind `jdynoff.while_loop`, and JAX's rules for them.

`jdynoff_while` is the loop as the user wrote it. Differentiating it gives `jdynoff_while_forward`,
which pushes, and the linear `jdynoff_while_tangent`, which exists to be transposed into
`jdynoff_while_backward`, which pops. They are opaque to JAX until they are lowered, so that no
transformation can tear a push from its loop; forward and backward loop are tied by the handle.

A forward loop whose handle nobody uses (no gradient was asked for, or `jax.checkpoint` computes
it again) is turned back into a plain one by its dead-code rule.

The trap: JAX may run one forward and several backward loops (it hoists what does not vary out of
a scan, a pullback can be called twice). `jdynoff_while_backward` is therefore a function of the
loop's operands; the stack only spares it the forward loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.interpreters import ad, batching, mlir

from jdynoff import jax_compat
from jdynoff.errors import TransformError
from jdynoff.loops.lowering import backward_loop, forward_loop, in_one_program, plain_loop
from jdynoff.loops.trip import Trip, active, differentiate

while_p = jex_core.Primitive("jdynoff_while")
forward_p = jex_core.Primitive("jdynoff_while_forward")
tangent_p = jex_core.Primitive("jdynoff_while_tangent")
backward_p = jex_core.Primitive("jdynoff_while_backward")
second_p = jex_core.Primitive("jdynoff_while_second_derivative")
for _primitive in (while_p, forward_p, tangent_p, backward_p, second_p):
    _primitive.multiple_results = True

COUNT = jax_compat.shaped_array((), np.dtype(np.uint32))
_NOWHERE = np.uint32(0)  # the anchor of a stack that is in no managed step

_FORWARD_MODE = (
    "jdynoff.while_loop was differentiated in forward mode (jax.jvp, jax.jacfwd, jax.linearize, or "
    "a Hessian-vector product through them). Its derivative is a loop that runs backwards over "
    "what the forward loop has kept, so only reverse mode is defined: use jax.grad, jax.vjp or "
    "jax.jacrev. Where forward mode is all that is needed, jax.lax.while_loop has it."
)
_SECOND_ORDER = (
    "the gradient of a jdynoff.while_loop was differentiated again. Its second derivative is not "
    "defined: only jax.grad, jax.vjp and jax.jacrev, once. Stop the gradient "
    "(jax.lax.stop_gradient) where the second derivative is not meant, or use jax.lax.scan over "
    "the largest number of trips."
)
_PREDICATE = (
    "the predicate of a jdynoff.while_loop differs between the lanes of a jax.vmap{where}: lanes "
    "would make different numbers of trips, and the trips of one lane would be kept and run for "
    "all. Write the loop over the whole batch instead: go on while any lane is active, and carry "
    "finished lanes through with jnp.where; or map with jax.lax.map."
)
_SPECIFIC = "; it depends on a mapped argument"
_AROUND = "; a jax.lax.cond or jax.lax.switch around it has a mapped predicate"


# Types


def _while_types(*operands: Any, cond_jaxpr: Any, body_jaxpr: Any, **_: Any) -> Any:
    effects = jax_compat.jaxpr_effects(cond_jaxpr) | jax_compat.jaxpr_effects(body_jaxpr)
    return jax_compat.out_avals(body_jaxpr), effects


def _forward_types(anchor: Any, *operands: Any, trip: Trip) -> Any:
    effects = jax_compat.jaxpr_effects(trip.cond) | jax_compat.jaxpr_effects(trip.step)
    return [*jax_compat.out_avals(trip.step)[: trip.num_carry], COUNT, COUNT], effects


def _backward_types(*operands: Any, trip: Trip) -> Any:
    # The forward loop may run again, and with it what its body prints.
    effects = jax_compat.jaxpr_effects(trip.step) | jax_compat.jaxpr_effects(trip.back)
    return jax_compat.out_avals(trip.back), effects


while_p.def_effectful_abstract_eval(_while_types)
forward_p.def_effectful_abstract_eval(_forward_types)
backward_p.def_effectful_abstract_eval(_backward_types)
tangent_p.def_abstract_eval(
    lambda *operands, trip: [
        jax_compat.out_avals(trip.step)[number] for number in trip.active_carry
    ]
)
second_p.def_abstract_eval(lambda *operands, avals: list(avals))


# Derivatives


def _while_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    split = params["cond_nconsts"]
    consts, carry = _split(primals[split:], params["body_nconsts"])
    const_tangents, carry_tangents = _split(tangents[split:], params["body_nconsts"])
    if all(map(jax_compat.is_zero, [*const_tangents, *carry_tangents])):
        outputs = while_p.bind(*primals, **params)
        return outputs, [jax_compat.zero_tangent(output) for output in outputs]

    body = jax_compat.trace(
        functools.partial(jax_compat.evaluate, params["body_jaxpr"]),
        [variable.aval for variable in jax_compat.view(params["body_jaxpr"]).invars],
    )
    const_marks = [not jax_compat.is_zero(tangent) for tangent in const_tangents]
    carry_marks = active(
        body, const_marks, [not jax_compat.is_zero(tangent) for tangent in carry_tangents]
    )
    trip = differentiate(params["cond_jaxpr"], body, split, const_marks, carry_marks)
    *outputs, trips, handle = forward_p.bind(_NOWHERE, *primals, trip=trip)
    chosen = [const_tangents[number] for number in trip.active_consts]
    chosen += [carry_tangents[number] for number in trip.active_carry]
    results = tangent_p.bind(
        handle, trips, *consts, *carry, *map(jax_compat.instantiate, chosen), trip=trip
    )
    out_tangents = [jax_compat.zero_tangent(output) for output in outputs]
    for number, result in zip(trip.active_carry, results, strict=True):
        out_tangents[number] = result
    return outputs, out_tangents


def _tangent_transpose(cotangents: Sequence[Any], *operands: Any, trip: Trip) -> list[Any]:
    known = 2 + trip.num_consts + trip.num_carry
    linear = operands[known:]
    if all(map(jax_compat.is_zero, cotangents)):
        results: list[Any] = [None] * len(linear)
    else:
        given = map(jax_compat.instantiate, cotangents)
        results = backward_p.bind(_NOWHERE, *operands[:known], *given, trip=trip)
    return [None] * known + [
        result if jax_compat.is_linear_operand(operand) else None
        for result, operand in zip(results, linear, strict=True)
    ]


def _forward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, trip: Trip) -> Any:
    outputs = forward_p.bind(*primals, trip=trip)
    # A second derivative, or one that nobody will ask for: then this is dead code.
    params = _plain_params(trip)
    _, out_tangents = _while_jvp(primals[1:], tangents[1:], **params)
    return outputs, [*out_tangents, *map(jax_compat.zero_tangent, outputs[-2:])]


def _backward_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, trip: Trip) -> Any:
    outputs = backward_p.bind(*primals, trip=trip)
    varying = [tangent for tangent in tangents if not jax_compat.is_zero(tangent)]
    if not varying:
        return outputs, list(map(jax_compat.zero_tangent, outputs))
    avals = tuple(jax.typeof(output) for output in outputs)
    return outputs, second_p.bind(*varying, avals=avals)


ad.primitive_jvps[while_p] = _while_jvp
ad.primitive_jvps[forward_p] = _forward_jvp
ad.primitive_jvps[backward_p] = _backward_jvp
ad.primitive_transposes[tangent_p] = _tangent_transpose


# Vectorisation: the axis goes to the front of whatever depends on it.


def _while_batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    operands = list(map(jax_compat.to_front, operands, dims))
    split, num_consts = params["cond_nconsts"], params["body_nconsts"]
    mapped = [not jax_compat.is_unmapped(dim) for dim in dims]
    consts, carry = mapped[split : split + num_consts], mapped[split + num_consts :]
    body, carry = _batch_body(axis, params["body_jaxpr"], consts, carry, 0)
    cond = _batch_cond(axis, params["cond_jaxpr"], mapped[:split], carry)
    _broadcast(axis, operands, split + num_consts, mapped, carry)
    results = while_p.bind(*operands, **{**params, "cond_jaxpr": cond, "body_jaxpr": body})
    return results, _dims(carry)


def _forward_batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, trip: Trip) -> Any:
    operands = list(map(jax_compat.to_front, operands, dims))
    mapped = [not jax_compat.is_unmapped(dim) for dim in dims]
    first = 1 + trip.num_cond_consts
    last = first + trip.num_consts
    step, carry = _batch_body(
        axis, trip.step, mapped[first:last], mapped[last:], len(trip.kept_avals)
    )
    cond = _batch_cond(axis, trip.cond, mapped[1:first], carry)
    _broadcast(axis, operands, last, mapped, carry)
    results = forward_p.bind(*operands, trip=_replace(trip, step=step, cond=cond))
    return results, [*_dims(carry), None, None]


def _backward_batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, trip: Trip) -> Any:
    if not all(map(jax_compat.is_unmapped, dims[:3])):
        raise TransformError(_PREDICATE.format(where=_AROUND))
    operands = list(map(jax_compat.to_front, operands, dims))
    mapped = [not jax_compat.is_unmapped(dim) for dim in dims]
    carry_at = 3 + trip.num_consts
    cotangents_at = carry_at + trip.num_carry
    consts, carry = mapped[3:carry_at], mapped[carry_at:cotangents_at]
    num_kept = len(trip.kept_avals)
    # As the forward loop was: what it has pushed is found again if the sizes agree.
    step, carry = _batch_body(axis, trip.step, consts, carry, num_kept)
    _, in_step = jax_compat.batch(
        trip.step, axis, [*consts, *carry], [*carry, *([False] * num_kept)]
    )
    num_invariants = len(jax_compat.out_avals(trip.hoist))
    hoist, invariants = jax_compat.batch(trip.hoist, axis, consts, [False] * num_invariants)
    known = [*invariants, *in_step[trip.num_carry :]]
    cotangents = mapped[cotangents_at:]
    num_sums = len(trip.active_consts)
    while True:
        back, found = jax_compat.batch(
            trip.back, axis, [*known, *cotangents], [*([False] * num_sums), *cotangents]
        )
        if found[num_sums:] == cotangents:
            break
        cotangents = found[num_sums:]
    _broadcast(axis, operands, carry_at, mapped, carry)
    _broadcast(axis, operands, cotangents_at, mapped, cotangents)
    results = backward_p.bind(*operands, trip=_replace(trip, step=step, hoist=hoist, back=back))
    return results, _dims(found)


def _batch_body(
    axis: Any, body: Any, consts: Sequence[bool], carry: Sequence[bool], num_more: int
) -> tuple[Any, list[bool]]:
    """Vectorises a body; returns which carried values are mapped, at least those of `carry`."""
    carry = list(carry)
    while True:
        at_least = [*carry, *([False] * num_more)]
        batched, found = jax_compat.batch(body, axis, [*consts, *carry], at_least)
        if found[: len(carry)] == carry:
            return batched, carry
        carry = found[: len(carry)]


def _batch_cond(axis: Any, cond: Any, consts: Sequence[bool], carry: Sequence[bool]) -> Any:
    batched, (predicate,) = jax_compat.batch(cond, axis, [*consts, *carry], [False])
    if predicate:
        raise TransformError(_PREDICATE.format(where=_SPECIFIC))
    return batched


def _broadcast(
    axis: Any, operands: list[Any], first: int, mapped: Sequence[bool], wanted: Sequence[bool]
) -> None:
    for number, want in enumerate(wanted, start=first):
        if want and not mapped[number]:
            operands[number] = jax_compat.along_axis(operands[number], axis)


def _dims(mapped: Sequence[bool]) -> list[int | None]:
    return [0 if mark else None for mark in mapped]


jax_compat.define_batching_rule(while_p, _while_batch)
jax_compat.define_batching_rule(forward_p, _forward_batch)
jax_compat.define_batching_rule(backward_p, _backward_batch)


# Dead code


def _forward_dead_code(used: list[bool], eqn: Any) -> Any:
    trip: Trip = eqn.params["trip"]
    if any(used[-2:]):
        return [True] * len(eqn.invars), eqn
    inputs = [False] + [True] * (len(eqn.invars) - 1)
    if not any(used) and not jax_compat.has_effects(eqn):
        return [False] * len(eqn.invars), None
    plain = jax_compat.replace_equation(
        eqn, eqn.invars[1:], eqn.outvars[:-2], while_p, _plain_params(trip)
    )
    return inputs, plain


jax_compat.define_dead_code_rule(forward_p, _forward_dead_code)


def _plain_params(trip: Trip) -> dict[str, Any]:
    return {
        "cond_nconsts": trip.num_cond_consts,
        "body_nconsts": trip.num_consts,
        "cond_jaxpr": trip.cond,
        "body_jaxpr": trip.body,
    }


# Execution

for _primitive, _function in (
    (while_p, plain_loop),
    (forward_p, forward_loop),
    (backward_p, backward_loop),
):
    _primitive.def_impl(
        lambda *operands, _function=_function, **params: in_one_program(_function, **params)(
            *operands
        )
    )
    mlir.register_lowering(_primitive, mlir.lower_fun(_function, multiple_results=True))


def _refuse(text: str) -> Any:
    def rule(*_: Any, **__: Any) -> NoReturn:
        raise TransformError(text)

    return rule


for _primitive, _text in ((tangent_p, _FORWARD_MODE), (second_p, _SECOND_ORDER)):
    _primitive.def_impl(_refuse(_text))
    mlir.register_lowering(_primitive, _refuse(_text))
    batching.primitive_batchers[_primitive] = _refuse(_text)
    ad.primitive_jvps[_primitive] = _refuse(_text)
ad.primitive_transposes[second_p] = _refuse(_SECOND_ORDER)


def _split(values: Sequence[Any], at: int) -> tuple[list[Any], list[Any]]:
    return list(values[:at]), list(values[at:])


def _replace(trip: Trip, **changes: Any) -> Trip:
    return dataclasses.replace(trip, **changes)
