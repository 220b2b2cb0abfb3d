"""What distinguishes two calls of a jitted function: structure, types and static arguments.

`jax.jit` resolves signatures in C++ in a microsecond, so a managed function with one signature
never computes this on the host; it is needed where a call turns out to have another one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from jdynoff import jax_compat
from jdynoff.jax_compat import JitOptions


@dataclasses.dataclass(frozen=True)
class Signature:
    """Hashable; equal for calls that run the same compiled program."""

    structure: Any
    types: tuple[tuple[tuple[int, ...], Any, bool], ...]
    static: tuple[tuple[str, Any], ...]
    context: Any  # options of JAX that a trace depends on


def split(
    options: JitOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, Any], tuple[tuple[str, Any], ...]]:
    """Separates the traced arguments (a pytree) from the static ones (hashable)."""
    numbers = {number for number in options.static_argnums if number < len(args)}
    static = [(f"argument {number}", args[number]) for number in sorted(numbers)]
    static += [(name, kwargs[name]) for name in sorted(options.static_argnames) if name in kwargs]
    positional = tuple(value for number, value in enumerate(args) if number not in numbers)
    named = {name: value for name, value in kwargs.items() if name not in options.static_argnames}
    return (positional, named), tuple(static)


def join(
    options: JitOptions, dynamic: tuple[Any, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with other traced ones; the inverse of `split`."""
    positional, named = iter(dynamic[0]), dynamic[1]
    numbers = set(options.static_argnums)
    joined = tuple(
        value if number in numbers else next(positional) for number, value in enumerate(args)
    )
    return joined, {name: named.get(name, value) for name, value in kwargs.items()}


def signature(options: JitOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of a call with arrays, numbers, tracers or `jax.ShapeDtypeStruct`s."""
    dynamic, static = split(options, args, kwargs)
    leaves, structure = jax.tree.flatten(dynamic)
    types = tuple(_type(leaf) for leaf in leaves)
    return Signature(structure, types, static, jax_compat.trace_context())


class Guess:
    """Tells known signatures apart by the few arguments in which they differ.

    A step that is called with several batch sizes has many arguments of one type and few that
    vary; only those are looked at. A guess may be wrong for a signature that is not known yet.
    """

    def __init__(self, options: JitOptions, signatures: Iterable[Signature]) -> None:
        self._options = options
        groups: dict[Any, list[Signature]] = {}
        for one in signatures:
            groups.setdefault((one.structure, one.static, one.context), []).append(one)
        self._groups = {
            key: (numbers := _differing(group), {_chosen(one, numbers): one for one in group})
            for key, group in groups.items()
        }

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature | None:
        """The known signature that the arguments probably have."""
        dynamic, static = split(self._options, args, kwargs)
        leaves, structure = jax.tree.flatten(dynamic)
        found = self._groups.get((structure, static, jax_compat.trace_context()))
        if found is None:
            return None
        numbers, known = found
        return known.get(tuple(_type(leaves[number]) for number in numbers))


def _differing(group: list[Signature]) -> tuple[int, ...]:
    first = group[0].types
    return tuple(
        number
        for number in range(len(first))
        if any(one.types[number] != first[number] for one in group)
    )


def _chosen(one: Signature, numbers: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(one.types[number] for number in numbers)


def _type(leaf: Any) -> tuple[tuple[int, ...], Any, bool]:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return (tuple(leaf.shape), leaf.dtype, bool(leaf.weak_type))
    aval = jax.typeof(leaf)
    return (tuple(aval.shape), aval.dtype, bool(aval.weak_type))
