"""What one trip of a differentiated loop does, forwards and backwards, as jaxprs.

`differentiate` applies `jax.vjp` to the loop's body and sorts what the backward pass needs:

- *invariants* follow from the body's constants alone (captured weights, their transposes and
  casts): computed once for all trips, from the constants;
- *kept* values are pushed in each trip;
- what one cheap operation makes of kept values and invariants is made again (tanh's slope);
- what the backward pass turns out not to use is neither.

The trap: an equation that wraps a whole jaxpr hides which of its results depend on what, so calls
are put in place first (`jax_compat.trace`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from jdynoff import jax_compat

_CHEAP = frozenset(
    {
        "abs",
        "add",
        "and",
        "convert_element_type",
        "cos",
        "div",
        "eq",
        "ge",
        "gt",
        "integer_pow",
        "le",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "select_n",
        "sign",
        "sin",
        "square",
        "sub",
    }
)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trip:
    """A differentiated loop. Jaxprs are closed; `carry` and constants are flat lists of arrays."""

    cond: Any  # (*cond constants, *carry) -> bool[]
    step: Any  # (*constants, *carry) -> (*carry, *kept)
    hoist: Any  # (*constants) -> invariants
    back: Any  # (*invariants, *kept, *cotangents) -> (*cotangents of constants, *of carry)
    num_cond_consts: int
    num_consts: int
    active_consts: tuple[int, ...]  # which have a cotangent
    active_carry: tuple[int, ...]

    @property
    def body(self) -> Any:
        """`(*constants, *carry) -> carry`: the step without what it keeps."""
        body, used = jax_compat.restrict(self.step, range(self.num_carry))
        avals = [variable.aval for variable in jax_compat.view(self.step).invars]
        return _with_all_inputs(body, used, avals)

    @property
    def num_carry(self) -> int:
        """How many values the loop carries."""
        return len(jax_compat.view(self.step).invars) - self.num_consts

    @property
    def kept_avals(self) -> list[Any]:
        """Shape and dtype of what each trip pushes."""
        return jax_compat.out_avals(self.step)[self.num_carry :]

    def __repr__(self) -> str:
        kept = ", ".join(str(aval) for aval in self.kept_avals)
        return f"Trip(keeps [{kept}])"


def active(body: Any, consts: Sequence[bool], carry: Sequence[bool]) -> list[bool]:
    """Which carried values have a derivative, if those constants and initial values have one."""
    carry = list(carry)
    while True:
        following = jax_compat.reached(body, [*consts, *carry], inexact_only=True)
        grown = [before or after for before, after in zip(carry, following, strict=True)]
        if grown == carry:
            return carry
        carry = grown


def differentiate(
    cond: Any, body: Any, num_cond_consts: int, consts: Sequence[bool], carry: Sequence[bool]
) -> Trip:
    """Splits the body's derivative into what is done once, forwards and backwards.

    Args:
      cond: the loop's predicate, `(*cond constants, *carry) -> bool[]`.
      body: its body, `(*constants, *carry) -> carry`, calls in place.
      num_cond_consts: how many constants `cond` has.
      consts: which constants of the body are differentiated.
      carry: which carried values are, closed under the body (see `active`).

    Returns:
      The trip.
    """
    avals = [variable.aval for variable in jax_compat.view(body).invars]
    num_consts, num_carry = len(consts), len(carry)
    active_consts = tuple(number for number, mark in enumerate(consts) if mark)
    active_carry = tuple(number for number, mark in enumerate(carry) if mark)
    positions = [*active_consts, *(num_consts + number for number in active_carry)]
    pullback: list[Any] = []  # structure and types of the residuals

    def forwards(*arguments: Any) -> list[Any]:
        def of_active(*values: Any) -> tuple[list[Any], list[Any]]:
            inputs = list(arguments)
            for position, value in zip(positions, values, strict=True):
                inputs[position] = value
            outputs = jax_compat.evaluate(body, *inputs)
            return [outputs[number] for number in active_carry], outputs

        chosen = [arguments[position] for position in positions]
        _, transpose, outputs = jax.vjp(of_active, *chosen, has_aux=True)
        leaves, structure = jax.tree.flatten(transpose)
        pullback[:] = [structure, [jax.typeof(leaf) for leaf in leaves], _generators(leaves)]
        return [*outputs, *map(_encode, leaves)]

    everything = jax_compat.trace(forwards, avals)
    structure, residuals, generators = pullback
    cotangents = [avals[num_consts + number] for number in active_carry]
    encoded = jax_compat.out_avals(everything)[num_carry:]

    def backwards(*arguments: Any) -> list[Any]:
        leaves = [
            _decode(value, aval, generator)
            for value, aval, generator in zip(arguments, residuals, generators, strict=False)
        ]
        return list(jax.tree.unflatten(structure, leaves)(list(arguments[len(residuals) :])))

    back = jax_compat.trace(backwards, [*encoded, *cotangents])
    _, needed = jax_compat.restrict(back, range(len(positions)))
    sources = _sort(everything, num_consts, num_carry, [n for n in needed if n < len(residuals)])

    kept = sorted({place for kind, place in sources.values() if kind == "kept"})
    invariant = sorted({place for kind, place in sources.values() if kind == "invariant"})
    made_again = _made_again(everything, kept, invariant)
    kept = [place for place in kept if place not in made_again]
    hoist, used = jax_compat.restrict(everything, invariant)
    assert all(number < num_consts for number in used), "an invariant depends on the carry"
    step, step_inputs = jax_compat.restrict(everything, [*range(num_carry), *kept])
    places = {place: number for number, place in enumerate([*invariant, *kept])}

    def backwards_from_kept(*arguments: Any) -> list[Any]:
        given = arguments[len(places) :]
        values = {place: arguments[number] for place, number in places.items()}
        for place, (eqn, inputs) in made_again.items():
            read = [values[where] if held else where for held, where in inputs]
            (values[place],) = jax_compat.bind_equation(eqn, read)
        leaves = [
            values[sources[number][1]]
            if number in sources and sources[number][0] != "literal"
            else _fill(sources.get(number), aval)
            for number, aval in enumerate(encoded)
        ]
        return jax_compat.evaluate(back, *leaves, *given)

    all_avals = jax_compat.out_avals(everything)
    return Trip(
        cond=cond,
        step=_with_all_inputs(step, step_inputs, avals),
        hoist=_with_all_inputs(hoist, used, avals[:num_consts]),
        back=jax_compat.trace(
            backwards_from_kept, [*(all_avals[place] for place in places), *cotangents]
        ),
        num_cond_consts=num_cond_consts,
        num_consts=num_consts,
        active_consts=active_consts,
        active_carry=active_carry,
    )


def _sort(
    everything: Any, num_consts: int, num_carry: int, needed: Sequence[int]
) -> dict[int, tuple[str, Any]]:
    """For each residual that is needed: its kind, and the first result that holds its value."""
    inputs = [False] * num_consts + [True] * num_carry
    varying = jax_compat.reached(everything, inputs, inexact_only=False)
    outputs = jax_compat.view(everything).outvars
    first: dict[Any, int] = {}
    sources: dict[int, tuple[str, Any]] = {}
    for number in needed:
        place = num_carry + number
        atom = outputs[place]
        if jax_compat.is_literal(atom):
            sources[number] = ("literal", atom.val)
        else:
            place = first.setdefault(atom, place)
            sources[number] = ("kept" if varying[place] else "invariant", place)
    return sources


def _made_again(
    everything: Any, kept: Sequence[int], invariant: Sequence[int]
) -> dict[int, tuple[Any, list[tuple[bool, Any]]]]:
    """Kept values that need not be: each one's equation and where its operands are held.

    An operand is (True, the result that holds it) or (False, a literal's value). What is made again
    is no operand of another, so that any order will do.
    """
    body = jax_compat.view(everything)
    producers = {variable: eqn for eqn in body.eqns for variable in eqn.outvars}
    held = {body.outvars[place]: place for place in [*kept, *invariant]}
    needed: set[Any] = set()
    found: dict[int, tuple[Any, list[tuple[bool, Any]]]] = {}
    for place in kept:
        eqn = producers.get(body.outvars[place])
        if eqn is None or eqn.primitive.name not in _CHEAP or body.outvars[place] in needed:
            continue
        variables = [atom for atom in eqn.invars if not jax_compat.is_literal(atom)]
        if any(atom not in held or held[atom] in found for atom in variables):
            continue
        needed.update(variables)
        found[place] = (
            eqn,
            [
                (False, atom.val) if jax_compat.is_literal(atom) else (True, held[atom])
                for atom in eqn.invars
            ],
        )
    return found


def _with_all_inputs(closed: Any, used: Sequence[int], avals: Sequence[Any]) -> Any:
    return jax.make_jaxpr(
        lambda *arguments: jax_compat.evaluate(closed, *(arguments[number] for number in used))
    )(*map(jax_compat.struct_of, avals))


def _fill(source: tuple[str, Any] | None, aval: Any) -> Any:
    """A residual that is a literal, or that the backward pass does not look at."""
    return lax.full(aval.shape, 0 if source is None else source[1], aval.dtype)


def _encode(value: Any) -> Any:
    """A residual as plain bytes: PRNG keys as their data, packed integers as int8."""
    dtype = jax_compat.plain_dtype(jax.typeof(value))
    if dtype is None:
        return jax.random.key_data(value)
    return value if dtype == value.dtype else value.astype(dtype)


def _generators(values: Sequence[Any]) -> list[Any]:
    """The PRNG of each value that is a key."""
    return [
        jax.random.key_impl(value) if jax_compat.is_extended_dtype(value) else None
        for value in values
    ]


def _decode(value: Any, aval: Any, generator: Any) -> Any:
    dtype = jax_compat.plain_dtype(aval)
    if dtype is None:
        return jax.random.wrap_key_data(value, impl=generator)
    return value if dtype == aval.dtype else value.astype(aval.dtype)
