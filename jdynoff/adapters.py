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
import threading
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
            clone = copy.copy(fun)
            managed = wrap(_of(clone, inner))
            if managed.has_features:
                raise ConfigurationError(
                    f"features= was given with {module}.{type(fun).__name__}, whose inner function "
                    "has the library's own arguments instead of the step's. Leave it out (the "
                    "batch's statistics are used), or split the state by hand around a plain "
                    "jax.jit function."
                )
            return Adapted(clone, attribute, managed)
    return wrap(fun)


def _of(wrapper: Any, inner: Any) -> Any:
    """Makes `inner` belong to `wrapper`: nnx finds a call's objects by the wrapper's identity."""
    function = inner.__wrapped__
    if not hasattr(function, "ctxtag"):
        return inner
    function = copy.copy(function)
    function.ctxtag = wrapper
    return jax_compat.jit_again(function, inner)


class _Answer(Exception):
    """Carries a result out of a library's wrapper that is not the step's own."""


class _Inner:
    """What the wrapper calls: the managed function, or another method of it that was asked for."""

    def __init__(self, managed: Any) -> None:
        self.managed = managed
        self.asked = threading.local()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self.asked, "method", None)
        if method is None:
            return self.managed(*args, **kwargs)
        raise _Answer(method(*args, **kwargs))


class Adapted:
    """Another library's jit wrapper around a managed function."""

    def __init__(self, wrapper: Any, attribute: str, managed: Any) -> None:
        self.managed = managed
        self._inner = _Inner(managed)
        self._call = wrapper
        object.__setattr__(wrapper, attribute, self._inner)
        functools.update_wrapper(self, wrapper)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step through the library's own wrapper."""
        return self._call(*args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Plans the step for these arguments without running it."""
        return self._ask(self.managed.plan, args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the managed step."""
        return self._ask(self.managed.lower, args, kwargs)

    @property
    def pilot(self) -> Any:
        """What the pilot has learned."""
        return self.managed.pilot

    def calibrate(self) -> Any:
        """Corrects this machine's rates by real steps: `with step.calibrate(): ...`."""
        return self.managed.calibrate()

    def stats(self) -> Any:
        """What the last completed step moved."""
        return self.managed.stats()

    def _ask(
        self, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls `method` with what the wrapper passes to its inner function, while it does."""
        self._inner.asked.method = method
        try:
            self._call(*args, **kwargs)
        except _Answer as answer:
            return answer.args[0]
        finally:
            self._inner.asked.method = None
        raise ConfigurationError("the jit wrapper did not call its inner function.")
