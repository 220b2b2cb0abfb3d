"""Lets `jdynoff.managed` sit on top of the jits of other libraries.

`flax.nnx.jit` and `equinox.filter_jit` turn their objects into arrays, call a plain `jax.jit`
function, and turn the results back. Only that inner function is exchanged for a managed one; the
library's own handling around it stays as it is.

The trap: neither offers a public way to do this. Where the expected attribute is missing (another
version), the error says what to write instead.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from jdynoff import jax_compat
from jdynoff.errors import ConfigurationError

# The attribute under which each library's wrapper holds its jax.jit function.
_INNER = {"flax.nnx": "jitted_fn", "equinox": "_cached"}


def adapt(fun: Callable[..., Any], wrap: Callable[[Callable[..., Any]], Any]) -> Any:
    """Applies `wrap` to `fun`, or to the jitted function inside another library's jit wrapper."""
    if jax_compat.jit_options(fun) is not None:
        return wrap(fun)
    module = type(fun).__module__
    for library, attribute in _INNER.items():
        if module.startswith(library) and hasattr(fun, "lower"):
            inner = getattr(fun, attribute, None)
            if inner is None or jax_compat.jit_options(inner) is None:
                raise ConfigurationError(
                    f"jdynoff.managed cannot look inside this {module}.{type(fun).__name__}: it "
                    f"has no jax.jit function under {attribute!r}. Split the state by hand "
                    "(nnx.split/merge, or equinox.partition/combine) around a plain jax.jit "
                    "function and manage that."
                )
            return Adapted(fun, attribute, wrap(inner))
    return wrap(fun)


class _Captured(Exception):
    """Carries what a library's wrapper passes to its inner function."""


class Adapted:
    """Another library's jit wrapper around a managed function."""

    def __init__(self, fun: Any, attribute: str, managed: Any) -> None:
        self._attribute = attribute
        self.managed = managed
        self._call = self._with(fun, managed)
        functools.update_wrapper(self, fun)

    def _with(self, fun: Any, inner: Any) -> Any:
        clone = copy.copy(fun)
        object.__setattr__(clone, self._attribute, inner)
        return clone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step through the library's own wrapper."""
        return self._call(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Plans the step for these arguments without running it."""
        inner_args, inner_kwargs = self._inner_arguments(args, kwargs)
        return self.managed.plan(*inner_args, **inner_kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the managed step."""
        inner_args, inner_kwargs = self._inner_arguments(args, kwargs)
        return self.managed.lower(*inner_args, **inner_kwargs)

    def stats(self) -> Any:
        """What the last completed step moved."""
        return self.managed.stats()

    def _inner_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def capture(*inner_args: Any, **inner_kwargs: Any) -> Any:
            raise _Captured(inner_args, inner_kwargs)

        try:
            self._with(self._call, capture)(*args, **kwargs)
        except _Captured as captured:
            return captured.args
        raise ConfigurationError("the jit wrapper did not call its inner function.")
