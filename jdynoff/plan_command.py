"""`jdynoff plan`: would this step fit, on this machine or on a GPU that is not there?

The user names a function that makes the step and its arguments; shapes are enough. The trap: for a
described GPU nothing may be allocated, so arrays among the arguments are replaced by their shapes.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import jax

from jdynoff.errors import BudgetError, ConfigurationError
from jdynoff.managed import Managed, managed
from jdynoff.planning.plan import Plan
from jdynoff.targets import described_sharding, memory_bytes

_LARGEST_SIZE = 1 << 20


def load(name: str) -> Callable[..., Any]:
    """Find a function by `module:function`; modules of the working directory count.

    Raises:
      ConfigurationError: if there is none.
    """
    module_name, separator, attribute = name.partition(":")
    if not separator or not attribute:
        raise ConfigurationError(
            f"{name!r} does not name a function; write module:function, e.g. train:make_step."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"cannot import {module_name!r}: {error}.") from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ConfigurationError(f"module {module_name!r} has no function {attribute!r}.")
    return found


@dataclasses.dataclass(frozen=True)
class Question:
    """What to plan.

    Attributes:
      make_step: returns `(step, arguments)` or `(step, arguments, keyword arguments)`; arguments
        are arrays or `jax.ShapeDtypeStruct`s. With `search` it takes a keyword of that name.
      budget: bytes, text, "min", or None for what the device has.
      target: a described device, or None for this machine.
      search: name of the keyword whose largest feasible value is looked for, or None.
    """

    make_step: Callable[..., Any]
    budget: int | str | None
    target: str | None = None
    search: str | None = None

    def plan(self, size: int | None = None) -> Plan:
        """Plans the step, of one size where there are several.

        Raises:
          BudgetError: if it does not fit.
          ConfigurationError: if `make_step` returns something else, or the target is unknown.
        """
        options = {} if self.search is None else {self.search: size}
        made = self.make_step(**options)
        if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
            raise ConfigurationError(
                f"{_name(self.make_step)} must return (step, arguments) or (step, arguments, "
                f"keyword arguments), not {type(made).__name__}."
            )
        step, args, *rest = made
        kwargs = rest[0] if rest else {}
        if self.target is not None:
            args, kwargs = described((args, kwargs), self.target)
        if not isinstance(step, Managed):
            budget = self.budget
            if budget is None and self.target is not None:
                budget = memory_bytes(self.target)
            step = managed(step, budget=budget)
        return step.plan(*args, **kwargs)

    def largest(self, report: Callable[[int, Plan | None], None]) -> tuple[int, Plan] | None:
        """The largest size whose step fits, by doubling and halving.

        Args:
          report: called with each size that was tried, and its plan or None.

        Returns:
          The size and its plan; None if not even size 1 fits.
        """

        def fits(size: int) -> Plan | None:
            try:
                plan = self.plan(size)
            except BudgetError:
                plan = None
            report(size, plan)
            return plan

        best: tuple[int, Plan] | None = None
        low, high = 0, 1
        while high <= _LARGEST_SIZE and (plan := fits(high)) is not None:
            best, low, high = (high, plan), high, 2 * high
        while high - low > max(low // 16, 1):  # as exact as the question deserves
            middle = (low + high) // 2
            plan = fits(middle)
            if plan is None:
                high = middle
            else:
                best, low = (middle, plan), middle
        return best


def described(tree: Any, target: str) -> Any:
    """The shapes of all arrays of a tree, placed on a described device."""
    sharding = described_sharding(target)

    def place(leaf: Any) -> Any:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, tree)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))


__all__ = ["Question", "described", "load"]
