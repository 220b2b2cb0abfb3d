"""The one place where jdynoff touches private or version-dependent parts of JAX.

Everything above this module sees equations through the small functions below, so a new JAX
release is a change of this file alone. Supported: jax 0.10.2 to 0.12. The trap: in 0.12 `scan`
describes its operands by `ft_in`/`ft_out` instead of `num_consts`/`num_carry`, and `ClosedJaxpr`
is merged into `Jaxpr` (which then carries its own `consts`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
from jax._src import config as _config
from jax._src import core as _core
from jax._src import source_info_util as _source_info_util
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax.interpreters import ad

_PACKAGE_DIRECTORY = os.path.dirname(os.path.abspath(__file__)) + os.sep

# Equations that only wrap a jaxpr. After differentiation nothing depends on their being calls, so
# the program is analysed and emitted with their bodies in place.
_CALL_PRIMITIVES = frozenset(
    {
        "jit",
        "pjit",
        "closed_call",
        "core_call",
        "core_closed_call",
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
        "remat2",
        "remat",
        "checkpoint",
        "eval_jaxpr",
    }
)
# XLA packs several of these into a byte, so their size in memory is not `itemsize` each.
_PACKED_DTYPES = frozenset({"int1", "uint1", "int2", "uint2", "int4", "uint4", "float4_e2m1fn"})
_REMAT_PRIMITIVES = frozenset({"remat2", "remat", "checkpoint"})


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr with its constants: one view for both layouts of JAX's classes."""

    constvars: tuple[Any, ...]
    consts: tuple[Any, ...]
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ScanSpec:
    """How a `scan` equation splits its operands and results."""

    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int
    body: Any


@dataclasses.dataclass(frozen=True)
class WhileSpec:
    """How a `while` equation splits its operands."""

    cond_num_consts: int
    body_num_consts: int
    cond: Any
    body: Any


@dataclasses.dataclass(frozen=True)
class JitOptions:
    """What the user gave to `jax.jit`, to be given to the managed function as well."""

    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]
    in_shardings: Any | None
    out_shardings: Any | None
    keep_unused: bool
    compiler_options: dict[str, Any] | None


def view(jaxpr: Any) -> Body:
    """Returns the parts of a Jaxpr or ClosedJaxpr, whichever this JAX uses."""
    if hasattr(jaxpr, "jaxpr") and not isinstance(jaxpr, _core.Jaxpr):
        inner = jaxpr.jaxpr
        return Body(
            tuple(inner.constvars),
            tuple(jaxpr.consts),
            tuple(inner.invars),
            tuple(inner.outvars),
            tuple(inner.eqns),
        )
    consts = tuple(getattr(jaxpr, "consts", ()))
    return Body(
        tuple(jaxpr.constvars), consts, tuple(jaxpr.invars), tuple(jaxpr.outvars), tuple(jaxpr.eqns)
    )


def remove_dead_code(closed: Any) -> Any:
    """Drops equations that no output needs, inside control flow too; keeps all inputs."""
    if isinstance(closed, _core.Jaxpr):  # 0.12: constants live in the jaxpr itself
        jaxpr, _ = _partial_eval.dce_jaxpr(closed, True, True)
        return jaxpr
    jaxpr, _ = _partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), True)
    return _core.ClosedJaxpr(jaxpr, closed.consts)


def is_literal(atom: Any) -> bool:
    """Whether an operand is written into the equation."""
    return isinstance(atom, _core.Literal)


def called_body(eqn: Any) -> Any | None:
    """The jaxpr that a plain call equation wraps, or None if `eqn` is not such a call."""
    if eqn.primitive.name not in _CALL_PRIMITIVES:
        return None
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params:
            return eqn.params[key]
    return None


def barrier_mask(eqn: Any) -> tuple[bool, ...] | None:
    """Which operands of a differentiated `jax.checkpoint` sit behind an optimization barrier.

    The barrier is what keeps XLA from merging the recomputation with the original; emitting a
    checkpoint's body in place must keep it. None when there is none.
    """
    if eqn.primitive.name not in _REMAT_PRIMITIVES or not eqn.params.get("differentiated"):
        return None
    prevent_cse = eqn.params["prevent_cse"]
    if isinstance(prevent_cse, bool):
        prevent_cse = (prevent_cse,) * len(eqn.invars)
    return tuple(prevent_cse) if any(prevent_cse) else None


def is_differentiated_checkpoint(eqn: Any) -> bool:
    """Whether `eqn` recomputes a forward pass for its backward pass."""
    return eqn.primitive.name in _REMAT_PRIMITIVES and bool(eqn.params.get("differentiated"))


def scan_spec(eqn: Any) -> ScanSpec | None:
    """Splits a `scan` equation, or None if `eqn` is not one."""
    if eqn.primitive.name != "scan":
        return None
    params = eqn.params
    if "num_carry" in params:
        num_consts, num_carry = params["num_consts"], params["num_carry"]
    else:
        consts, carry, _ = params["ft_in"].unpack()
        num_consts, num_carry = len(list(consts)), len(list(carry))
    unroll = params["unroll"]
    return ScanSpec(
        num_consts,
        num_carry,
        int(params["length"]),
        bool(params["reverse"]),
        int(unroll) if not isinstance(unroll, bool) else (int(params["length"]) if unroll else 1),
        params["jaxpr"],
    )


def cond_branches(eqn: Any) -> tuple[Any, ...] | None:
    """The branches of a `cond` equation whose index is data, or None."""
    if eqn.primitive.name != "cond" or eqn.params.get("branches_platforms") is not None:
        return None
    return tuple(eqn.params["branches"])


def while_spec(eqn: Any) -> WhileSpec | None:
    """Splits a `while` or `jdynoff_while` equation, or None if `eqn` is neither."""
    if eqn.primitive.name not in ("while", "jdynoff_while"):
        return None
    params = eqn.params
    if "cond_nconsts" in params:
        cond_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
    else:
        parts = params["ft_in"].unpack()
        cond_consts, body_consts = len(list(parts[0])), len(list(parts[1]))
    return WhileSpec(cond_consts, body_consts, params["cond_jaxpr"], params["body_jaxpr"])


def uses_loop_stack(eqn: Any) -> bool:
    """Whether `eqn` is a loop whose trips push values to the buffer manager, or pop them."""
    return eqn.primitive.name in ("jdynoff_while_forward", "jdynoff_while_backward")


def counts_trips(eqn: Any) -> bool:
    """Whether a loop is the forward one of a `jdynoff.while_loop`, which returns its trips."""
    return bool(eqn.primitive.name == "jdynoff_while_forward")


_UNREPEATABLE = frozenset({"ffi_call", "infeed", "rng_uniform"})


def is_repeatable(eqn: Any) -> bool:
    """Whether an equation gives the same results for the same operands, and does nothing else."""
    name = eqn.primitive.name
    return not eqn.effects and name not in _UNREPEATABLE and "callback" not in name


def comparable_params(eqn: Any) -> str | None:
    """The parameters of an equation as text, equal only for equations that do the same.

    None where that cannot be told: with a program inside, or where the result is not a function of
    the operands.
    """
    if not is_repeatable(eqn) or any(True for _ in _core.jaxprs_in_params(eqn.params)):
        return None
    return repr(sorted((name, str(value)) for name, value in eqn.params.items()))


def loop_frame_bytes(eqn: Any) -> int | None:
    """Bytes that each trip of a forward loop pushes; None for a backward loop."""
    if eqn.primitive.name != "jdynoff_while_forward":
        return None
    return sum(map(saveable_bytes, eqn.params["trip"].kept_avals))


def bind_equation(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Binds `eqn`'s primitive to new inputs, keeping its source line and context."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    subfunctions, params = bound if isinstance(bound, tuple) else ((), bound)
    with equation_context(eqn):
        result = eqn.primitive.bind(*subfunctions, *inputs, **params)
    return list(result) if eqn.primitive.multiple_results else [result]


@contextlib.contextmanager
def equation_context(eqn: Any) -> Iterator[None]:
    """New equations made inside carry the source line, name stack and context of `eqn`."""
    stack = _source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        _source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
    ):
        yield


def source_line(eqn: Any) -> str:
    """`file:line` of the user code that made `eqn`, '' if unknown."""
    frames = _source_info_util.user_frames(eqn.source_info.traceback)
    for frame in frames:
        if not frame.file_name.startswith(_PACKAGE_DIRECTORY):
            return f"{frame.file_name}:{frame.start_line}"
    return ""


def name_stack(eqn: Any) -> str:
    """The `jax.named_scope`/module path of `eqn`, for matching by pattern."""
    return str(eqn.source_info.name_stack)


def contracted_size(eqn: Any, left_shape: Sequence[int]) -> int:
    """Of a `dot_general`: how many products each element of the result adds up."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(left_shape[axis] for axis in contracted)


def convolution_output_features(eqn: Any, kernel_shape: Sequence[int]) -> int:
    """Of a `conv_general_dilated`: its number of output channels."""
    return kernel_shape[eqn.params["dimension_numbers"].rhs_spec[0]]


def has_effects(eqn: Any) -> bool:
    """Whether running `eqn` does more than make its results (callbacks, prints)."""
    return bool(eqn.effects)


def trace_context() -> Any:
    """The options that a trace depends on beside its arguments (x64, matmul precision, ...)."""
    return _config.trace_context()


def is_top_level() -> bool:
    """Whether no JAX transformation or trace is active on this thread."""
    return bool(_core.trace_state_clean())


def jit_options(function: Any) -> JitOptions | None:
    """The options of a `jax.jit` function, or None if `function` is not one."""
    info = getattr(function, "_jit_info", None)
    if info is None:
        return None
    unflatten = jax.tree_util.tree_unflatten
    shardings: list[Any | None] = []
    for treedef, leaves in (
        (info.in_shardings_treedef, info.in_shardings_leaves),
        (info.out_shardings_treedef, info.out_shardings_leaves),
    ):
        unspecified = all(type(leaf).__name__ == "UnspecifiedValue" for leaf in leaves)
        shardings.append(None if unspecified else unflatten(treedef, leaves))
    return JitOptions(
        static_argnums=_from_the_front(function, info.static_argnums),
        static_argnames=tuple(info.static_argnames),
        donate_argnums=_from_the_front(function, info.donate_argnums),
        donate_argnames=tuple(info.donate_argnames),
        in_shardings=shardings[0],
        out_shardings=shardings[1],
        keep_unused=bool(info.keep_unused),
        compiler_options=dict(info.compiler_options_kvs) or None,
    )


def _from_the_front(function: Any, numbers: Sequence[int]) -> tuple[int, ...]:
    """Argument numbers without negative ones, which count from the last positional parameter."""
    if all(number >= 0 for number in numbers):
        return tuple(numbers)
    parameters = inspect.signature(function).parameters.values()
    positional = sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )
    return tuple(number if number >= 0 else number + positional for number in numbers)


def jit_again(function: Any, jitted: Any) -> Any:
    """Jits `function` with the options of another jitted function."""
    options = jit_options(jitted)
    assert options is not None
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return jax.jit(function, **{name: value for name, value in given.items() if value is not None})


def is_extended_dtype(aval: Any) -> bool:
    """Whether `aval` has a dtype that is not plain bytes (PRNG keys)."""
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def saveable_bytes(aval: Any) -> int:
    """Bytes of an array type; 0 for what has no plain bytes (tokens, references, PRNG keys)."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if (
        shape is None
        or dtype is None
        or type(aval).__name__ not in ("ShapedArray", "ConcreteArray")
    ):
        return 0
    if is_extended_dtype(aval) or dtype.name in _PACKED_DTYPES:
        return 0
    size = 1
    for dimension in shape:
        size *= int(dimension)
    return size * dtype.itemsize


def shaped_array(shape: tuple[int, ...], dtype: Any) -> Any:
    """The abstract value of an array."""
    return _core.ShapedArray(shape, dtype)


# For jdynoff.loops: jaxprs as functions, and the rules of its primitives


def evaluate(closed: Any, *arguments: Any) -> list[Any]:
    """Evaluates a closed jaxpr; under a trace, its equations are traced again."""
    return list(jex_core.jaxpr_as_fun(closed)(*arguments))


def out_avals(closed: Any) -> list[Any]:
    """The abstract values of a closed jaxpr's results."""
    return [atom.aval for atom in view(closed).outvars]


def jaxpr_effects(closed: Any) -> Any:
    """The JAX effects of a closed jaxpr (prints, callbacks)."""
    return closed.effects


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """An abstract value as `jax.make_jaxpr` takes it."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def trace(function: Any, avals: Sequence[Any]) -> Any:
    """The closed jaxpr of `function(*arrays)`, which returns a flat list, with its calls inline."""
    structs = [struct_of(aval) for aval in avals]
    closed = jax.make_jaxpr(function)(*structs)
    return jax.make_jaxpr(lambda *arguments: _evaluate_inline(view(closed), arguments))(*structs)


_INLINE = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})


def _evaluate_inline(body: Body, arguments: Sequence[Any]) -> list[Any]:
    def bind(eqn: Any, inputs: list[Any]) -> list[Any]:
        if eqn.primitive.name not in _INLINE:
            return bind_equation(eqn, inputs)
        with equation_context(eqn):
            return _evaluate_inline(view(called_body(eqn)), inputs)

    return evaluate_with(body, arguments, bind)


def evaluate_with(closed: Any, arguments: Sequence[Any], bind: Any) -> list[Any]:
    """Evaluates a jaxpr, or the view of one, with `bind(eqn, inputs) -> results`."""
    body = closed if isinstance(closed, Body) else view(closed)
    environment: dict[Any, Any] = dict(zip(body.constvars, body.consts, strict=True))
    environment.update(zip(body.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if is_literal(atom) else environment[atom]

    for eqn in body.eqns:
        results = bind(eqn, [read(atom) for atom in eqn.invars])
        environment.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in body.outvars]


def restrict(closed: Any, outputs: Sequence[int]) -> tuple[Any, list[int]]:
    """Keeps some results, in the given order, and what they need.

    Returns:
      The closed jaxpr, and the numbers of the inputs that it still has.
    """
    body = view(closed)
    avals = [variable.aval for variable in body.invars]

    def choose(*arguments: Any) -> list[Any]:
        results = evaluate(closed, *arguments)
        return [results[number] for number in outputs]

    chosen = jax.make_jaxpr(choose)(*map(struct_of, avals))
    if isinstance(chosen, _core.Jaxpr):
        jaxpr, used = _partial_eval.dce_jaxpr(chosen, True)
        return jaxpr, [number for number, is_used in enumerate(used) if is_used]
    jaxpr, used = _partial_eval.dce_jaxpr(chosen.jaxpr, [True] * len(outputs))
    closed = _core.ClosedJaxpr(jaxpr, chosen.consts)
    return closed, [number for number, is_used in enumerate(used) if is_used]


def needed_for(closed: Any, output: int) -> tuple[Any, list[int]]:
    """What one result needs and nothing else, inside control flow too.

    Returns:
      The closed jaxpr, and the numbers of the inputs that it still has.
    """
    number_of_outputs = len(view(closed).outvars)
    wanted = [number == output for number in range(number_of_outputs)]
    is_open = isinstance(closed, _core.Jaxpr)  # 0.12: constants live in the jaxpr itself
    inner, used = _partial_eval.dce_jaxpr(closed if is_open else closed.jaxpr, wanted)
    kept = inner if is_open else _core.ClosedJaxpr(inner, closed.consts)
    return kept, [number for number, is_used in enumerate(used) if is_used]


def reached(closed: Any, start: Sequence[bool], *, inexact_only: bool) -> list[bool]:
    """Which results depend on the inputs marked in `start`; conservative for nested bodies.

    Args:
      closed: the jaxpr.
      start: one mark for each input.
      inexact_only: whether what is not a floating-point number ends a dependence, as it does for a
        derivative.
    """
    body = view(closed)
    marked = {variable for variable, mark in zip(body.invars, start, strict=True) if mark}
    for eqn in body.eqns:
        if any(not is_literal(atom) and atom in marked for atom in eqn.invars):
            marked.update(
                variable
                for variable in eqn.outvars
                if not inexact_only or is_inexact(variable.aval)
            )
    return [not is_literal(atom) and atom in marked for atom in body.outvars]


def is_inexact(aval: Any) -> bool:
    """Whether values of this type have derivatives."""
    return bool(jax.dtypes.issubdtype(aval.dtype, np.inexact))


def plain_dtype(aval: Any) -> Any:
    """The dtype whose bytes can be moved and that holds every value of `aval`'s; None for keys."""
    if is_extended_dtype(aval):
        return None
    if aval.dtype.name not in _PACKED_DTYPES:
        return aval.dtype
    if jax.dtypes.issubdtype(aval.dtype, np.integer):
        return np.dtype(np.int8)
    return np.dtype(np.float32)


def lowering_platforms(ctx: Any) -> tuple[str, ...]:
    """Where a lowering rule's program is going to run."""
    return tuple(ctx.module_context.platforms)


def define_dead_code_rule(primitive: Any, rule: Any) -> None:
    """Registers `rule(used_outputs, eqn) -> (used inputs, equation or None)`."""

    def with_liveness(used_outputs: Any, *rest: Any) -> Any:
        return rule(list(used_outputs), rest[-1])  # 0.12 passes which inputs are live in between

    _partial_eval.dce_rules[primitive] = with_liveness


def replace_equation(eqn: Any, invars: Any, outvars: Any, primitive: Any, params: Any) -> Any:
    """A copy of `eqn` that binds another primitive."""
    return eqn.replace(
        invars=list(invars), outvars=list(outvars), primitive=primitive, params=params
    )


def define_batching_rule(primitive: Any, rule: Any) -> None:
    """Registers `rule(axis, arguments, dimensions, **params)`."""
    _batching.fancy_primitive_batchers[primitive] = rule


def batch(
    closed: Any, axis: Any, batched: Sequence[bool], at_least: Sequence[bool]
) -> tuple[Any, list[bool]]:
    """Vectorises a jaxpr along a leading axis.

    Args:
      closed: the jaxpr.
      axis: the axis that a batching rule was given.
      batched: which inputs have it.
      at_least: which results must have it.

    Returns:
      The jaxpr, and which of its results have the axis.
    """
    result, found = _batching.batch_jaxpr(closed, axis, list(batched), list(at_least))
    return result, list(found)


def to_front(value: Any, dimension: Any) -> Any:
    """Moves the batch axis to the front; what has none stays."""
    return value if dimension is None else jnp.moveaxis(value, dimension, 0)


def along_axis(value: Any, axis: Any) -> Any:
    """Repeats a value along a new leading batch axis."""
    return jnp.broadcast_to(value, (axis.size, *value.shape))


def is_unmapped(dimension: Any) -> bool:
    """Whether a batching rule's operand has no batch axis."""
    return dimension is None


def zero_tangent(primal: Any) -> Any:
    """The symbolic zero tangent of a value."""
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def is_zero(tangent: Any) -> bool:
    """Whether a tangent or cotangent is a symbolic zero."""
    return isinstance(tangent, ad.Zero)


def instantiate(tangent: Any) -> Any:
    """A tangent or cotangent as an array."""
    return ad.instantiate_zeros(tangent)


def is_linear_operand(operand: Any) -> bool:
    """In a transposition: whether the operand is what the cotangent is for."""
    return bool(ad.is_undefined_primal(operand))
