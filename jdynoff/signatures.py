"""What distinguishes two calls of a jitted function: structure, types and static arguments.

`jax.jit` resolves signatures in C++ in a microsecond, so a managed function with one signature
never computes this on the host; it is needed where a call turns out to have another one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jdynoff.jax_compat import JitOptions


@dataclasses.dataclass(frozen=True)
class Signature:
    """Hashable; equal for calls that run the same compiled program."""

    structure: Any
    types: tuple[tuple[tuple[int, ...], Any, bool], ...]
    static: tuple[tuple[str, Any], ...]


def split(
    options: JitOptions, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, Any], tuple[tuple[str, Any], ...]]:
    """Separates the traced arguments (a pytree) from the static ones (hashable)."""
    numbers = {
        number % len(args) for number in options.static_argnums if -len(args) <= number < len(args)
    }
    static = [(f"argument {number}", args[number]) for number in sorted(numbers)]
    static += [(name, kwargs[name]) for name in sorted(options.static_argnames) if name in kwargs]
    positional = tuple(value for number, value in enumerate(args) if number not in numbers)
    named = {name: value for name, value in kwargs.items() if name not in options.static_argnames}
    return (positional, named), tuple(static)


def signature(options: JitOptions, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """The signature of a call with arrays, numbers, tracers or `jax.ShapeDtypeStruct`s."""
    dynamic, static = split(options, args, kwargs)
    leaves, structure = jax.tree.flatten(dynamic)
    return Signature(structure, tuple(_type(leaf) for leaf in leaves), static)


def _type(leaf: Any) -> tuple[tuple[int, ...], Any, bool]:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return (tuple(leaf.shape), leaf.dtype, bool(leaf.weak_type))
    aval = jax.typeof(leaf)
    return (tuple(aval.shape), aval.dtype, bool(aval.weak_type))
