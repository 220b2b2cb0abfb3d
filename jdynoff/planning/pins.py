"""What the user decides: actions for values by name, module path or source line.

A pattern is matched, like a file name with `*` and `?`, against the name that
`jax.ad_checkpoint.checkpoint_name` gave, against `file:line`, and against the path of
`jax.named_scope`s or modules with the operation's name at its end (`evoformer/attention/exp`). It
may leave out components at either end of a path.

The trap: in a differentiated program a path is wrapped in the transformations that it went through
(`transpose(jvp(evoformer))`). They are taken off, so a pattern also matches the backward pass; only
values that a later part of the step needs are affected.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, cast, get_args

from jdynoff import jax_compat
from jdynoff.errors import ConfigurationError
from jdynoff.program.graph import Operation, Program

Action = Literal["keep", "offload", "recompute"]
Pins = dict[Operation, Action]

_TRANSFORMATIONS = re.compile(r"\b(jvp|transpose|vmap|jit|rematted_computation|checkpoint)\(|\)")
_MOST_SUGGESTED = 5


def check_actions(actions: Mapping[str, str]) -> dict[str, Action]:
    """Validates `actions=`.

    Raises:
      ConfigurationError: if an action is not "keep", "offload" or "recompute".
    """
    known = get_args(Action)
    for pattern, action in actions.items():
        if action not in known:
            raise ConfigurationError(
                f"actions={{{pattern!r}: {action!r}}} names no action; there are: "
                f"{', '.join(known)}."
            )
    return {pattern: cast("Action", action) for pattern, action in actions.items()}


def find_pins(program: Program, actions: Mapping[str, Action]) -> Pins:
    """Which operations' results have an action. The first pattern that matches counts.

    Raises:
      ConfigurationError: if a pattern matches nothing in the step.
    """
    pins: Pins = {}
    if not actions:
        return pins
    unmatched = dict.fromkeys(actions)
    seen: dict[str, None] = {}
    for region in program.regions:
        around = _path(region.owner)
        for operation in region.operations:
            names = _names(operation, around)
            seen.update(dict.fromkeys(names))
            for pattern, action in actions.items():
                if any(_matches(name, pattern) for name in names):
                    pins.setdefault(operation, action)
                    unmatched.pop(pattern, None)
    if unmatched:
        pattern = next(iter(unmatched))
        near = difflib.get_close_matches(pattern, seen, _MOST_SUGGESTED, cutoff=0.0)
        raise ConfigurationError(
            f"actions= has {pattern!r}, which matches no checkpoint_name, source line or module "
            f"path of this step. Patterns match like file names; nearest: {', '.join(near)}."
        )
    return pins


def _matches(name: str, pattern: str) -> bool:
    return any(
        fnmatchcase(name, tried)
        for tried in (pattern, f"*/{pattern}", f"{pattern}/*", f"*/{pattern}/*")
    )


def _names(operation: Operation, around: str) -> list[str]:
    here = _scope(operation)
    names = ["/".join(part for part in (around, here, operation.name) if part)]
    if operation.name == "name":
        names.append(str(operation.eqn.params["name"]))
    if operation.source:
        names.append(operation.source)
    return names


def _path(operation: Operation | None) -> str:
    parts: list[str] = []
    while operation is not None:
        parts.append(_scope(operation))
        operation = operation.region.owner
    return "/".join(part for part in reversed(parts) if part)


def _scope(operation: Operation) -> str:
    stack = _TRANSFORMATIONS.sub("", jax_compat.name_stack(operation.eqn))
    return "/".join(part for part in stack.split("/") if part)
