"""Primitives that hand arrays to the buffer manager and take them back.

They carry no JAX effect: an effect would disable `jit`'s fast call path (494 us a call instead of
57). Order is dataflow instead. Every call takes the *serial* that the previous call returned, so
XLA cannot reorder them, and XLA's own side-effect flag keeps it from removing or merging them.

The trap: outside of a compiled managed step there is no run for the calls to belong to, so the
primitives have no eager rule and cannot be batched or differentiated.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.extend.core as jex_core
import numpy as np
from jax.interpreters import ad, batching, mlir

from jdynoff import jax_compat
from jdynoff.errors import TransformError

# In the place of a number of pages (`kAsOpened` in xla_ext/handlers.cc).
AS_OPENED = np.uint32(0xFFFFFFFF)
SERIAL = jax_compat.shaped_array((), np.dtype(np.uint32))

begin_p = jex_core.Primitive("jdynoff_begin")
offload_p = jex_core.Primitive("jdynoff_offload")
reload_p = jex_core.Primitive("jdynoff_reload")
end_p = jex_core.Primitive("jdynoff_end")
after_p = jex_core.Primitive("jdynoff_after")
reload_p.multiple_results = True

TARGETS = tuple(primitive.name for primitive in (begin_p, offload_p, reload_p, end_p, after_p))


def begin(ticket: jax.Array, expected_pages: jax.Array | None = None) -> jax.Array:
    """Opens the run that `ticket` was issued for.

    Args:
      ticket: u32[].
      expected_pages: u32[], what the run will probably offload; None: as the ticket was opened.

    Returns:
      The first serial, u32[].
    """
    return begin_p.bind(ticket, AS_OPENED if expected_pages is None else expected_pages)


def offload(value: jax.Array, serial: jax.Array, *, site: int, readers: int) -> jax.Array:
    """Gives `value` to the manager.

    Args:
      value: array of any shape and plain dtype.
      serial: u32[], from the previous call.
      site: content hash of the site, shared by all entries made here.
      readers: how many reloads will be made before the entry is freed.

    Returns:
      The token, u32[]: the entry's id, and the next serial.
    """
    return offload_p.bind(value, serial, site=site, readers=readers)


def reload(
    token: jax.Array, serial: jax.Array, dependencies: list[jax.Array], *, site: int, aval: Any
) -> tuple[jax.Array, jax.Array]:
    """Takes an entry back.

    Args:
      token: u32[], from `offload`.
      serial: u32[], from the previous call.
      dependencies: arrays that must exist first; they only order the call.
      site: the site of the entry.
      aval: shape and dtype of the value.

    Returns:
      The value and the next serial.
    """
    value, serial = reload_p.bind(token, serial, *dependencies, site=site, aval=aval)
    return value, serial


def end(serial: jax.Array) -> jax.Array:
    """Closes the run; returns the sentinel (u32[], the ticket)."""
    return end_p.bind(serial)


def after(value: jax.Array, dependency: jax.Array) -> jax.Array:
    """Returns `value`, but not before `dependency` exists.

    An optimization barrier does not order a schedule: XLA removes it before it makes one.
    """
    return after_p.bind(value, dependency)


begin_p.def_abstract_eval(lambda ticket, expected_pages: SERIAL)
offload_p.def_abstract_eval(lambda value, serial, *, site, readers: SERIAL)
reload_p.def_abstract_eval(lambda token, serial, *dependencies, site, aval: [aval, SERIAL])
end_p.def_abstract_eval(lambda serial: SERIAL)
after_p.def_abstract_eval(lambda value, dependency: value)


def _lower_begin(ctx: Any, ticket: Any, expected_pages: Any) -> Any:
    return jax.ffi.ffi_lowering("jdynoff_begin", has_side_effect=True)(ctx, ticket, expected_pages)


def _lower_offload(ctx: Any, value: Any, serial: Any, *, site: int, readers: int) -> Any:
    return jax.ffi.ffi_lowering("jdynoff_offload", has_side_effect=True)(
        ctx, value, serial, site=np.int64(site), readers=np.int32(readers)
    )


def _lower_reload(
    ctx: Any, token: Any, serial: Any, *dependencies: Any, site: int, aval: Any
) -> Any:
    return jax.ffi.ffi_lowering("jdynoff_reload", has_side_effect=True)(
        ctx, token, serial, *dependencies, site=np.int64(site)
    )


def _lower_end(ctx: Any, serial: Any) -> Any:
    return jax.ffi.ffi_lowering("jdynoff_end", has_side_effect=True)(ctx, serial)


def _lower_after(ctx: Any, value: Any, dependency: Any) -> Any:
    return jax.ffi.ffi_lowering("jdynoff_after", operand_output_aliases={0: 0})(
        ctx, value, dependency
    )


def _refuse(*args: Any, **params: Any) -> NoReturn:
    raise TransformError(
        "a managed step was transformed (grad, vmap or eager evaluation of its equations). "
        "jdynoff rewrites the whole step after differentiation, so jdynoff.managed must be the "
        "outermost transformation: apply grad, vmap and scan inside the function, then "
        "jdynoff.managed on top."
    )


for _primitive, _rule in (
    (begin_p, _lower_begin),
    (offload_p, _lower_offload),
    (reload_p, _lower_reload),
    (end_p, _lower_end),
    (after_p, _lower_after),
):
    mlir.register_lowering(_primitive, _rule)
    _primitive.def_impl(_refuse)
    batching.primitive_batchers[_primitive] = _refuse
    ad.primitive_jvps[_primitive] = _refuse

_registered: set[str] = set()


def register_handlers(platform: str = "cpu") -> None:
    """Registers the manager's FFI handlers for `platform`, once.

    For platform "CUDA" the handlers only let a program be compiled for a GPU that is not there;
    they never run.
    """
    if platform in _registered:
        return
    from jdynoff import _native

    for name, capsule in _native.handlers().items():
        jax.ffi.register_ffi_target(name, capsule, platform=platform)
    _registered.add(platform)
