"""Emits the step again, by evaluating its graph, with offloads and reloads where decided.

The program is evaluated operation by operation under JAX's tracing, so everything that is not
touched is bound exactly as it was, with its source line. Control flow that a site passes through is
emitted by `lax.scan`, `lax.switch` and `lax.while_loop` with tokens in the place of arrays.

Three rules give exact results and low memory:
1. Every call takes the serial that the previous call returned; loops carry it. XLA can then not
   reorder calls, not even between the copies of an unrolled body.
2. A reload stands right before its first use and takes that use's latest operand as a dependency,
   so XLA does not hoist it. In bodies, one element is taken of what XLA may fuse into its user,
   which keeps it from being built for the dependency's sake.
3. In straight-line code a reload also depends on the results of everything that consumed an earlier
   reload: what was brought back is used up before more is brought back.

The trap: `lax.scan` may trace a body more than once, so all state of a body lives in its `_Scope`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdynoff import jax_compat
from jdynoff.planning.decisions import Decisions, Outer, Own, Replay, Site, Spill, Stored
from jdynoff.planning.recompute import is_cheap, is_elementwise, is_rearrangement
from jdynoff.planning.residency import holds_calls, residency
from jdynoff.primitives import transfer
from jdynoff.program.graph import Constant, Operand, Operation, Program, Region, Value
from jdynoff.program.structure import cone
from jdynoff.rewrite.tables import Tables, build_tables

# A dependency older than this many operations no longer pins a reload to its place.
_STALE_OPERATIONS = 3
_NOTHING: Mapping[Operation, int] = {}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Emitted:
    """What an emitted step returns.

    Attributes:
      outputs: the step's flat outputs.
      sentinel: u32[], fails when the run fails; None if nothing is moved.
      counters: i32[n] for each counted operation, how often its blocks ran.
    """

    outputs: list[Any]
    sentinel: jax.Array | None
    counters: dict[Operation, jax.Array]


def emit(
    program: Program,
    decisions: Decisions,
    ticket: jax.Array | None,
    arguments: Sequence[Any],
    *,
    counted: Mapping[Operation, int] = _NOTHING,
    expected_pages: jax.Array | None = None,
) -> Emitted:
    """Evaluates the step with its decisions carried out; to be called while tracing.

    Args:
      program: the step.
      decisions: what leaves XLA.
      ticket: u32[], names the run to the manager; None if nothing is moved.
      arguments: the step's flat arguments.
      counted: the operations to count, with the lengths of their counters (`Blocks.counted`).
      expected_pages: u32[], what the run will probably offload, in pages of the manager; None: as
        its ticket says.
    """
    state = residency(program, decisions)
    tables = build_tables(program, decisions, state, holds_calls(decisions), counted)
    emitter = _Emitter(tables)
    return emitter.step(program.top, ticket, arguments, expected_pages)


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class _Scope:
    """The values of one region while it is being emitted."""

    region: Region
    values: dict[Value, Any]
    tokens: dict[Site, Any]
    away: dict[Value, Spill] = dataclasses.field(default_factory=dict)
    made_at: dict[Value, int] = dataclasses.field(default_factory=dict)
    clock: int = 0
    last_result: Value | None = None
    last_array: Any = None
    reloaded: set[Value] = dataclasses.field(default_factory=set)
    retired: list[Any] = dataclasses.field(default_factory=list)
    replay: Replay | None = None
    outside: dict[Value, Any] = dataclasses.field(default_factory=dict)
    rebuilt: dict[Value, Any] = dataclasses.field(default_factory=dict)
    # Not in `rebuilt`, which evictions clear: an entry is reloaded only as often as announced.
    stored: dict[Value, Any] = dataclasses.field(default_factory=dict)


class _Emitter:
    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.serial: Any = None
        self.first_serial: Any = None
        self.arguments: dict[Value, Any] = {}
        self.counters: dict[Operation, Any] = {
            operation: jnp.zeros(length, np.int32) for operation, length in tables.counted.items()
        }

    def step(
        self, top: Region, ticket: Any, arguments: Sequence[Any], expected_pages: Any
    ) -> Emitted:
        self.serial = transfer.begin(ticket, expected_pages) if ticket is not None else None
        self.first_serial = self.serial
        self.arguments = dict(zip(top.inputs, arguments, strict=True))
        scope = _Scope(top, dict(self.arguments), {})
        self.operations(scope)
        outputs = [self.read(scope, output) for output in top.outputs]
        sentinel = transfer.end(self.serial) if ticket is not None else None
        return Emitted(outputs, sentinel, self.counters)

    def operations(self, scope: _Scope) -> None:
        control_flow = {"scan": self.scan, "cond": self.cond, "while": self.while_loop}
        for value in scope.region.inputs:
            self.made(scope, value)
        for operation in scope.region.operations:
            scope.clock += 1
            if operation.kind == "barrier":
                inputs = self.operands(scope, operation)
                results = list(lax.optimization_barrier(tuple(inputs)))
            elif operation.kind == "loop" and self.first_serial is not None:
                # Its stack is opened after the run has begun, and is then a part of it.
                inputs = [self.first_serial, *self.operands(scope, operation)[1:]]
                results = jax_compat.bind_equation(operation.eqn, inputs)
            elif operation not in self.tables.touched:
                inputs = self.operands(scope, operation)
                results = jax_compat.bind_equation(operation.eqn, inputs)
            else:
                with jax_compat.equation_context(operation.eqn):
                    results = control_flow[operation.kind](scope, operation)
            self.count(scope, operation, results)
            self.store(scope, operation, results)

    def count(self, scope: _Scope, operation: Operation, results: Sequence[Any]) -> None:
        """Counts the branch that was taken, or the trips of a `jdynoff.while_loop`."""
        length = self.tables.counted.get(operation)
        if length is None or operation.kind == "while":
            return
        if operation.kind == "loop":
            taken = results[-2].astype(np.int32)[None]
        else:
            index = self.read(scope, operation.operands[0], operation)
            index = jnp.clip(jnp.asarray(index, np.int32), 0, length - 1)
            taken = (jnp.arange(length) == index).astype(np.int32)
        self.counters[operation] += taken

    def counted_in(self, operation: Operation) -> list[Any]:
        """The counters that bodies of `operation` advance."""
        return [self.counters[inner] for inner in self.tables.counted_in.get(operation, ())]

    def set_counters(self, operation: Operation, counters: Sequence[Any]) -> None:
        inside = self.tables.counted_in.get(operation, ())
        self.counters.update(zip(inside, counters, strict=True))

    def store(self, scope: _Scope, operation: Operation, results: Sequence[Any]) -> None:
        consumed_reload = any(
            isinstance(operand, Value) and operand in scope.reloaded
            for operand in operation.operands
        )
        for value, result in zip(operation.results, results, strict=True):
            if result is None:
                continue  # dropped: only its token exists
            scope.values[value] = result
            scope.made_at[value] = scope.clock
            if value.nbytes:
                scope.last_result, scope.last_array = value, result
                if consumed_reload:
                    scope.retired.append(result)
            self.made(scope, value)
        for spill in self.tables.evict.get(operation, ()):
            value, site = spill.value, spill.site
            if site is not None and site not in scope.tokens:
                scope.tokens[site] = self.offload(scope.values[value], site, value)
            scope.values.pop(value, None)
            scope.reloaded.discard(value)
            scope.rebuilt.clear()
            scope.away[value] = spill

    def made(self, scope: _Scope, value: Value) -> None:
        for site in self.tables.offload.get(value, ()):
            if value not in scope.values:
                self.read(scope, value)
            scope.tokens[site] = self.offload(scope.values[value], site, value)

    def offload(self, array: Any, site: Site, leaf: Operand) -> Any:
        if site.kept:
            return array  # the budget leaves this one to XLA: the array is its own token
        self.serial = transfer.offload(
            array, self.serial, site=site.identifier, readers=site.readers_of(leaf)
        )
        return self.serial

    # Reading

    def operands(self, scope: _Scope, operation: Operation) -> list[Any]:
        return [
            self.read(scope, operand, operation)
            for number, operand in enumerate(operation.operands)
        ]

    def read(self, scope: _Scope, operand: Operand, reader: Operation | None = None) -> Any:
        if isinstance(operand, Constant):
            return operand.value
        if operand in scope.values:
            return scope.values[operand]
        replay = scope.replay
        if operand in scope.away:
            spill = scope.away[operand]
            if spill.site is None:
                value = self.evaluate_again(scope, spill, reader)
            else:
                value = self.reload(scope, spill.site, operand, reader, straight_line=True)
        elif operand in self.tables.parked:
            value = self.reload(scope, self.tables.parked[operand], operand, reader)
        elif replay is not None and operand in replay.rebuilds:
            value = self.rebuild(scope, replay.rebuilds[operand], reader)
        else:
            raise AssertionError(f"value of {operand.aval} in {scope.region.role} was never made")
        scope.values[operand] = value
        scope.made_at[operand] = scope.clock
        return value

    def reload(
        self,
        scope: _Scope,
        site: Site,
        value: Value,
        reader: Operation | None,
        straight_line: bool = False,
    ) -> Any:
        token = scope.tokens[site]
        if site.kept:
            return token
        dependencies = self.dependencies(scope, reader, straight_line)
        array, self.serial = transfer.reload(
            token, self.serial, dependencies, site=site.identifier, aval=site.aval
        )
        if straight_line:
            scope.reloaded.add(value)
        return array

    def dependencies(
        self, scope: _Scope, reader: Operation | None, straight_line: bool
    ) -> list[Any]:
        found: list[Any] = []
        latest = -1
        if reader is not None:
            ready = [
                operand
                for operand in reader.operands
                if isinstance(operand, Value) and operand in scope.values and operand.nbytes
            ]
            if ready:
                newest = max(ready, key=lambda operand: scope.made_at.get(operand, 0))
                latest = scope.made_at.get(newest, 0)
                found.append(_witness(scope, newest, scope.values[newest]))
        if scope.last_result is not None and latest < scope.clock - _STALE_OPERATIONS:
            found.append(_witness(scope, scope.last_result, scope.last_array))
        if straight_line:
            found.extend(scope.retired)
            scope.retired = []
        unique = {id(array): array for array in found}
        return list(unique.values())

    def rebuild(self, scope: _Scope, produced: Operand, reader: Operation | None) -> Any:
        """Computes a value of the producing region in the consuming one."""
        if isinstance(produced, Constant):
            return produced.value
        if produced in scope.rebuilt:
            return scope.rebuilt[produced]
        assert scope.replay is not None
        origin = scope.replay.origins.get(produced)
        if isinstance(origin, Own):
            return self.read(scope, origin.value, reader)
        if isinstance(origin, Outer):
            return scope.outside[produced]
        if isinstance(origin, Stored):
            if produced not in scope.stored:
                scope.stored[produced] = self.reload(scope, origin.site, produced, reader)
            return scope.stored[produced]
        origins = scope.replay.origins
        again = cone([produced], lambda v: v in scope.rebuilt or v in origins)
        late = self.dependencies(scope, reader, straight_line=False)[:1]
        ordered: set[Value] = set()  # what cannot be computed before `late`
        for operation in again:
            inputs = [self.rebuild(scope, operand, reader) for operand in operation.operands]
            if any(operand in ordered for operand in operation.operands):
                ordered.update(operation.results)
            elif late and not is_cheap(operation):
                ordered.update(operation.results)
                _order_after(operation, inputs, late[0])
            results = jax_compat.bind_equation(operation.eqn, inputs)
            scope.rebuilt.update(zip(operation.results, results, strict=True))
        return scope.rebuilt[produced]

    def evaluate_again(self, scope: _Scope, spill: Spill, reader: Operation | None) -> Any:
        """Computes a straight-line value a second time, from its anchors.

        What never left goes through an optimization barrier with something new, or XLA would merge
        this with the first computation and keep its result instead.
        """
        done = {anchor: self.read(scope, anchor, reader) for anchor in spill.anchors}
        stayed = [anchor for anchor in spill.anchors if anchor not in scope.away]
        if stayed:
            late = self.dependencies(scope, reader, straight_line=False)[:1]
            behind = lax.optimization_barrier((*(done[anchor] for anchor in stayed), *late))
            done.update(zip(stayed, behind, strict=False))

        for operation in cone([spill.value], lambda v: v in done):
            inputs = [
                operand.value if isinstance(operand, Constant) else done[operand]
                for operand in operation.operands
            ]
            results = jax_compat.bind_equation(operation.eqn, inputs)
            done.update(zip(operation.results, results, strict=True))
        return done[spill.value]

    # Control flow

    @contextlib.contextmanager
    def serial_inside(self, serial: Any) -> Iterator[None]:
        outside, self.serial = self.serial, serial
        try:
            yield
        finally:
            self.serial = outside

    def array(self, scope: _Scope, operand: Operand, reader: Operation) -> Any:
        value = self.read(scope, operand, reader)
        if isinstance(operand, Constant):
            return jnp.asarray(value, dtype=operand.aval.dtype) if not _is_key(operand) else value
        return value

    def child(
        self,
        region: Region,
        values: dict[Value, Any],
        tokens: Sequence[Any],
        outside: dict[Value, Any],
    ) -> _Scope:
        sites = self.tables.imports.get(region, ())
        child = _Scope(region, values, dict(zip(sites, tokens, strict=True)))
        child.replay = self.tables.replays.get(region)
        child.outside = dict(outside)
        return child

    def outside(self, scope: _Scope, region: Region) -> dict[Value, Any]:
        """What the replay of a body reads from the scope around it.

        Read before the body is traced: what is reloaded or computed for it belongs to `scope`, and
        `scope` must not keep what was made while a body of it was being traced.
        """
        replay = self.tables.replays.get(region)
        return {
            produced: self.read_again(scope, origin.operand)
            for produced, origin in (replay.origins.items() if replay is not None else ())
            if isinstance(origin, Outer) and not origin.scanned
        }

    def read_again(self, scope: _Scope, operand: Operand) -> Any:
        """Reads the operand of an `Outer` origin from the scope around the consuming body."""
        if isinstance(operand, Constant):
            return operand.value
        if operand in self.arguments:
            return self.arguments[operand]
        if operand.region is scope.region:
            return self.read(scope, operand)
        return self.rebuild(scope, operand, None)

    def outputs(self, scope: _Scope, keep: Sequence[int]) -> list[Any]:
        region = scope.region
        owner = region.owner
        assert owner is not None
        arrays = [self.array(scope, region.outputs[number], owner) for number in keep]
        for export in self.tables.exports.get(region, ()):
            if export.constant is not None:
                array = self.array(scope, export.constant, owner)
                arrays.append(self.offload(array, export.site, export.constant))
            elif export.made:
                arrays.append(scope.tokens[export.site])
            elif export.site.kept:
                aval = export.site.aval
                arrays.append(jnp.zeros(export.shape + tuple(aval.shape), aval.dtype))
            else:
                arrays.append(jnp.zeros(export.shape, np.uint32))
        return arrays

    def take_exports(self, scope: _Scope, region: Region, arrays: Sequence[Any]) -> None:
        for export, token in zip(self.tables.exports.get(region, ()), arrays, strict=True):
            scope.tokens[export.site] = token

    def scan(self, scope: _Scope, operation: Operation) -> list[Any]:
        spec, (body,) = operation.spec, operation.bodies
        first = spec.num_consts + spec.num_carry
        served = self.tables.residency.served
        constants = {
            body.inputs[number]: self.read(scope, operation.operands[number], operation)
            for number in range(spec.num_consts)
        }
        carry = [
            self.array(scope, operand, operation)
            for operand in operation.operands[spec.num_consts : first]
        ]
        sliced = [
            number
            for number in range(first, len(operation.operands))
            if (operation, number) not in served
        ]
        replay = self.tables.replays.get(body)
        again = [
            (produced, origin.operand)
            for produced, origin in (replay.origins.items() if replay is not None else ())
            if isinstance(origin, Outer) and origin.scanned
        ]
        xs = (
            [self.array(scope, operation.operands[number], operation) for number in sliced],
            [scope.tokens[site] for site in self.tables.imports.get(body, ())],
            [self.read_again(scope, operand) for _, operand in again],
        )
        keep_carry = range(spec.num_carry)
        keep = [
            number
            for number in range(spec.num_carry, len(operation.results))
            if operation.results[number] not in self.tables.residency.dropped
        ]
        calls = operation in self.tables.calling

        outside = self.outside(scope, body)

        def iteration(carried: Any, slices: Any) -> Any:
            state, serial, counters = carried
            self.set_counters(operation, counters)
            arrays, tokens, read_again = slices
            values = dict(constants)
            values.update(zip(body.inputs[spec.num_consts : first], state, strict=True))
            values.update(zip((body.inputs[number] for number in sliced), arrays, strict=True))
            with self.serial_inside(serial):
                inner = self.child(body, values, tokens, outside)
                inner.outside.update(
                    zip((produced for produced, _ in again), read_again, strict=True)
                )
                self.operations(inner)
                ys = self.outputs(inner, keep)
                state = [
                    self.array(inner, body.outputs[number], operation) for number in keep_carry
                ]
                return (state, self.serial, self.counted_in(operation)), ys

        (state, serial, counters), ys = lax.scan(
            iteration,
            (carry, self.serial if calls else None, self.counted_in(operation)),
            xs,
            length=spec.length,
            reverse=spec.reverse,
            unroll=spec.unroll,
        )
        if calls:
            self.serial = serial
        self.set_counters(operation, counters)
        self.take_exports(scope, body, ys[len(keep) :])
        results: list[Any] = [*state, *([None] * (len(operation.results) - spec.num_carry))]
        for number, array in zip(keep, ys, strict=False):
            results[number] = array
        return results

    def cond(self, scope: _Scope, operation: Operation) -> list[Any]:
        served = self.tables.residency.served
        index = self.read(scope, operation.operands[0], operation)
        operands = {
            number: self.read(scope, operand, operation)
            for number, operand in enumerate(operation.operands)
            if number and (operation, number) not in served
        }
        tokens = [scope.tokens[site] for site in self.tables.imports.get(operation.bodies[0], ())]
        keep = [
            number
            for number, result in enumerate(operation.results)
            if result not in self.tables.residency.dropped
        ]
        calls = operation in self.tables.calling
        outside = {body: self.outside(scope, body) for body in operation.bodies}
        before = self.counted_in(operation)

        def branch(body: Region) -> Any:
            def run() -> Any:
                values = {body.inputs[number - 1]: array for number, array in operands.items()}
                self.set_counters(operation, before)
                with self.serial_inside(self.serial):
                    inner = self.child(body, values, tokens, outside[body])
                    self.operations(inner)
                    arrays = self.outputs(inner, keep)
                    return arrays, self.serial if calls else None, self.counted_in(operation)

            return run

        branches = [branch(body) for body in operation.bodies]
        arrays, serial, counters = lax.switch(index, branches)
        if calls:
            self.serial = serial
        self.set_counters(operation, counters)
        self.take_exports(scope, operation.bodies[0], arrays[len(keep) :])
        results: list[Any] = [None] * len(operation.results)
        for number, array in zip(keep, arrays, strict=False):
            results[number] = array
        return results

    def while_loop(self, scope: _Scope, operation: Operation) -> list[Any]:
        spec, (cond, body) = operation.spec, operation.bodies
        operands = operation.operands
        first = spec.cond_num_consts + spec.body_num_consts
        cond_constants = [self.read(scope, operand) for operand in operands[: spec.cond_num_consts]]
        body_constants = [
            self.read(scope, operand) for operand in operands[spec.cond_num_consts : first]
        ]
        carry = [self.array(scope, operand, operation) for operand in operands[first:]]
        calls = operation in self.tables.calling

        def test(carried: Any) -> Any:
            values = dict(zip(cond.inputs, [*cond_constants, *carried[0]], strict=True))
            inner = self.child(cond, values, (), {})
            self.operations(inner)
            return self.array(inner, cond.outputs[0], operation)

        def iteration(carried: Any) -> Any:
            state, serial, counters = carried
            self.set_counters(operation, counters)
            values = dict(zip(body.inputs, [*body_constants, *state], strict=True))
            with self.serial_inside(serial):
                inner = self.child(body, values, (), {})
                self.operations(inner)
                if operation in self.tables.counted:
                    self.counters[operation] += 1
                state = self.outputs(inner, range(len(body.outputs)))
                return state, self.serial, self.counted_in(operation)

        state, serial, counters = lax.while_loop(
            test,
            iteration,
            (carry, self.serial if calls else None, self.counted_in(operation)),
        )
        if calls:
            self.serial = serial
        self.set_counters(operation, counters)
        return list(state)


def _witness(scope: _Scope, value: Value, array: Any) -> Any:
    """Something that exists only when what `array` is computed from does.

    Of what is put together from parts (concatenated, padded) that is one part, so the order is
    looser there, and the results are the same. XLA need not build then what it would else fuse, or
    multiply as it lies. In bodies only: in the long straight line of a step it is the array itself
    that keeps XLA from leaving the operations before it for later.
    """
    producer = value.producer
    fused = producer is not None and (is_elementwise(producer) or is_rearrangement(producer))
    in_body = scope.region.owner is not None
    if not (fused and in_body and array.ndim) or jax_compat.is_extended_dtype(value.aval):
        return array
    return lax.slice(array, (0,) * array.ndim, (1,) * array.ndim)


def _order_after(operation: Operation, inputs: list[Any], late: Any) -> None:
    """Keeps XLA from computing `operation` as soon as its operands are there.

    The smallest operand waits for `late`: it may have to be copied, since it is used elsewhere.
    """
    sizes = {
        number: operand.nbytes
        for number, operand in enumerate(operation.operands)
        if isinstance(operand, Value) and operand.nbytes and inputs[number] is not late
    }
    if sizes:
        smallest = min(sizes, key=lambda number: sizes[number])
        inputs[smallest] = transfer.after(inputs[smallest], late)


def _is_key(operand: Constant) -> bool:
    return jax_compat.is_extended_dtype(operand.aval)
