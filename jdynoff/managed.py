"""`jdynoff.managed`: the decorator.

One call of a managed function is one call of one `jax.jit` function. It was traced from the user's
step, rewritten (`program` -> `planning` -> `rewrite`), compiled and checked against the budget when
a signature was first seen; afterwards `jax.jit` resolves the call in C++.

How a signature is resolved without computing it in Python: the jitted function takes a *variant
number* as a static argument. A call first tries the last variant. If its types differ, jit traces,
the trace sees that the variant is for another signature and raises, and only then is the signature
computed and its variant looked up or planned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdynoff import errors, jax_compat
from jdynoff.adapters import adapt
from jdynoff.flights import Flight, Ledger, ledger
from jdynoff.planning.budget import parse_budget, parse_bytes
from jdynoff.planning.decisions import Decisions
from jdynoff.planning.machine import machine_of
from jdynoff.planning.pins import check_actions, find_pins
from jdynoff.planning.plan import Compiled, MemoryUse, Plan
from jdynoff.planning.search import Choice, Search
from jdynoff.planning.sites import DEFAULT_MIN_BYTES
from jdynoff.primitives import transfer
from jdynoff.program.build import build
from jdynoff.program.graph import Program
from jdynoff.program.order import shorten_live_ranges
from jdynoff.rewrite.emit import emit
from jdynoff.runtime.device_memory import available_memory
from jdynoff.runtime.manager import check_tiers, manager_for
from jdynoff.runtime.stats import StepStats
from jdynoff.runtime.tiers import Disk
from jdynoff.signatures import Guess, Signature, signature, split
from jdynoff.sweep import Sweep, sweep

_ANY_TICKET = np.uint32(0)  # for lowering: only its type matters
# Another thread may plan a signature anew between finding its variant and calling it.
_MOST_ATTEMPTS = 3


class _OtherSignature(Exception):
    """A trace found that the variant it was called for has other argument types."""


@dataclasses.dataclass(eq=False, slots=True)
class _Variant:
    """One signature's program, and after planning its decisions."""

    signature: Signature
    program: Program
    out_structure: Any
    index_seconds: float
    # Its number and what was chosen, read and replaced together: a plan may choose anew while
    # another thread calls.
    ready: tuple[int, Choice] | None = None
    candidate: Decisions | None = None  # being compiled by the search
    emit_seconds: float = 0.0
    manager: Any = None  # found at the first run: looking for a disk takes its time


def managed(
    fun: Callable[..., Any] | None = None,
    *,
    budget: int | str | None = None,
    tiers: Sequence[Disk] | None = None,
    min_bytes: int = DEFAULT_MIN_BYTES,
    flops_per_byte: float | None = None,
    actions: Mapping[str, str] | None = None,
    verify: bool = False,
) -> Any:
    """Makes a train step run within a budget of device memory.

    The step is traced, and values that its backward pass needs again are handed to a buffer
    manager (memory pool, then disk) instead of being held by XLA, or are computed again where
    that is cheap. Results do not change. Use it as the outermost decorator:

        @jdynoff.managed(budget="8GiB")
        @jax.jit
        def train_step(state, batch): ...

    Args:
      fun: a function made by `jax.jit` (its static arguments, donation and shardings are kept),
        `flax.nnx.jit` or `equinox.filter_jit`, or a plain function, which is then jitted.
      budget: the most device memory that the step may use in total: arguments + outputs - donated
        outputs + XLA's temporaries + the manager's pool. An int of bytes, text such as "8GiB",
        "min" for the least that is possible, or None for what the device has (on a CPU the memory
        cgroup's limit or the available memory).
      tiers: where bytes go that do not fit the pool, e.g. `[jdynoff.Disk("/scratch")]`. Default:
        a directory on a real disk, or `JDYNOFF_SPILL_DIR`.
      min_bytes: arrays smaller than this many bytes are never moved.
      flops_per_byte: how many FLOPs to spend on computing a value again rather than move one byte
        of it. None chooses by the predicted time of the step, from the figures that
        `python -m jdynoff doctor --measure` keeps of this machine. Below 0 nothing is computed
        again; at 0 only elementwise, layout and reduction operations are; at 20 attention logits of
        narrow heads too; at infinity whatever follows from arguments, carries and what is moved.
      actions: what is to happen to some values, by pattern: "keep" (in XLA), "offload" or
        "recompute". A pattern is matched, like a file name, against the name given by
        `jax.ad_checkpoint.checkpoint_name`, against `file.py:line`, and against the path of modules
        and named scopes with the operation at its end, as in
        `{"evoformer/*/exp": "recompute", "hidden": "offload"}`. The first that matches counts.
      verify: whether to check a checksum of everything that comes back from disk.

    Returns:
      A `Managed` callable with the same signature.

    Raises:
      BudgetError: on the first call or plan of a signature that cannot fit the budget.
      ConfigurationError: for an argument that means nothing; on the first call or plan for a
        pattern of `actions` that matches nothing, or asks for the impossible.
      SpillSpaceError: if spill space cannot be reserved; raised before dispatch, so donated
        arguments are still alive.
      TransferError: if bytes cannot be moved while the step runs. Where JAX has returned by then,
        reading its results raises `jax.errors.JaxRuntimeError` with the same text, and `stats()`
        raises the `TransferError`. Donated arguments are lost, as with any failure of a jitted
        function; the next step, on a fresh state, is not harmed.
      TransformError: if the managed step is called under `jit`, `grad` or `vmap`.
    """
    if fun is None:
        return functools.partial(
            managed,
            budget=budget,
            tiers=tiers,
            min_bytes=min_bytes,
            flops_per_byte=flops_per_byte,
            actions=actions,
            verify=verify,
        )

    def wrap(jitted: Callable[..., Any]) -> Managed:
        return Managed(
            jitted,
            budget=budget,
            tiers=tiers,
            min_bytes=min_bytes,
            flops_per_byte=flops_per_byte,
            actions=actions,
            verify=verify,
        )

    return adapt(fun, wrap)


class Managed:
    """A step that runs within a budget; made by `jdynoff.managed`."""

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        budget: int | str | None,
        tiers: Sequence[Disk] | None,
        min_bytes: int,
        flops_per_byte: float | None,
        actions: Mapping[str, str] | None,
        verify: bool,
    ) -> None:
        self._jitted: Any = fun if jax_compat.jit_options(fun) is not None else jax.jit(fun)
        options = jax_compat.jit_options(self._jitted)
        assert options is not None
        self._options = options
        self._budget = parse_budget(budget)
        self._tiers = None if tiers is None else check_tiers(tiers)
        self._min_bytes = min_bytes
        self._price = flops_per_byte
        self._actions = check_actions(actions or {})
        self._verify = verify
        self._lock = threading.RLock()  # guards the fields below; held while planning
        self._variants: dict[int, _Variant] = {}
        self._by_signature: dict[tuple[Signature, str], _Variant] = {}
        self._guess: Guess | None = None  # among several signatures
        self._numbers = itertools.count()  # never reused: jit remembers them
        self._last: _Variant | None = None
        self._landed_flight: Flight | None = None
        self._call: Any = None
        self._warned: set[str] = set()
        functools.update_wrapper(self, self._jitted)

    # Calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; plans it first where the arguments' types are new."""
        if not jax_compat.is_top_level():
            raise errors.TransformError(
                f"{self._name} is managed and was called inside another JAX transformation "
                "(jit, grad, vmap or scan). jdynoff rewrites a whole step after differentiation, "
                "so it must be outermost: call the transformation inside the function and put "
                "jdynoff.managed on top, or call the undecorated step here."
            )
        if jax.config.jax_disable_jit or jax.config.jax_debug_nans:  # type: ignore[attr-defined]
            return self._debug_call(args, kwargs)
        variant = self._probable(args, kwargs)
        for _ in range(_MOST_ATTEMPTS):
            if variant is not None:
                with contextlib.suppress(_OtherSignature):
                    return self._run(variant, args, kwargs)
            variant = self._variant(args, kwargs)
        return self._run(self._variant(args, kwargs), args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the step of a class to an object, like any function."""
        return self if instance is None else Bound(self, instance)

    def _probable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Variant | None:
        """The variant that a call probably needs, found without a look at every argument."""
        guess = self._guess
        if guess is None:
            return self._last
        found = guess(args, kwargs)
        return None if found is None else self._by_signature.get((found, _platform(args, kwargs)))

    def _run(self, variant: _Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert variant.ready is not None
        number, choice = variant.ready
        if not choice.moves:
            return self._call(number, None, *args, **kwargs)[0]
        book, plan = self._ledger, choice.plan
        manager = variant.manager
        if manager is None:
            tiers = self._tiers if choice.uses_disk else ()
            manager = variant.manager = manager_for(tiers, verify=self._verify)
        open_ticket = functools.partial(
            manager.open, choice.ticket_pool_bytes, plan.spill_bytes, expected_bytes=plan.held_bytes
        )
        flight = Flight(self, plan.device_peak_bytes, manager)
        try:
            limit = max(plan.device_peak_bytes, plan.budget_bytes or 0)
            ticket = np.uint32(book.depart(flight, limit, open_ticket))
            outputs, sentinel = self._call(number, ticket, *args, **kwargs)
            book.dispatched(flight, sentinel)
        except BaseException as failure:
            book.cancel(flight)
            known = errors.from_xla(failure)
            if known is not None:
                raise known from failure
            raise
        return outputs

    def _landed(self, flight: Flight) -> None:
        """Called by the ledger when a run of this step is over."""
        if flight.stats is not None and flight.sentinel is not None:
            self._landed_flight = flight

    def _debug_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            self._warn(
                f"jax_disable_jit is on: {self._name} runs unmanaged, operation by operation, and "
                "keeps no budget."
            )
            return self._jitted(*args, **kwargs)
        with jax.debug_nans(False):
            outputs = self(*args, **kwargs)
        for path, leaf in jax.tree_util.tree_leaves_with_path(outputs):
            inexact = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(
                leaf.dtype, jax.numpy.inexact
            )
            if inexact and bool(jax.numpy.isnan(leaf).any()):
                raise FloatingPointError(
                    f"output {jax.tree_util.keystr(path)} of the managed step {self._name} holds "
                    "NaN. A managed step cannot be run again operation by operation; to find the "
                    "equation, call the undecorated step (`step.__wrapped__`) under jax_debug_nans."
                )
        return outputs

    # Planning

    @property
    def plan(self) -> Planner:
        """Plans the step without running it: `step.plan(...)`, `step.plan.sweep(...)`."""
        return Planner(self)

    def lower(self, *args: Any, **kwargs: Any) -> ManagedLowered:
        """Lowers the managed step, like `jax.jit(...).lower`; plans it first."""
        variant = self._variant(args, kwargs)
        assert variant.ready is not None
        number, choice = variant.ready
        ticket = _ANY_TICKET if choice.moves else None
        lowered = self._call.lower(number, ticket, *args, **kwargs)
        return ManagedLowered(self, variant, lowered)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Shapes and types of the step's results, like `jax.jit(...).eval_shape`."""
        return self._jitted.eval_shape(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Raises: the managed step belongs to this process's manager and cannot be exported."""
        raise errors.TransformError(
            f"{self._name} is managed: its program calls the buffer manager of this process, so it "
            "can be neither traced into another program nor exported. Use the undecorated step "
            "(`step.__wrapped__`) for jax.export, or `step.lower(...)` to see the program."
        )

    def stats(self) -> StepStats:
        """What the last completed step moved, and how long it waited for it.

        Waits for steps of this function that are in flight.

        Raises:
          TransferError: if the last step failed because bytes could not be moved.
          RuntimeError: if no step that moves anything has completed yet.
        """
        self._ledger.wait(self)
        flight = self._landed_flight
        if flight is None:
            known = [variant.ready for variant in self._by_signature.values()]
            if any(ready is not None and not ready[1].moves for ready in known):
                return StepStats()
            raise RuntimeError(
                f"{self._name} has not completed a step yet; call it before asking for stats()."
            )
        if flight.failure is not None:
            raise flight.failure
        assert flight.stats is not None
        return StepStats.from_manager(flight.stats)

    @functools.cached_property
    def _ledger(self) -> Ledger:
        return ledger(jax.devices()[0])

    @property
    def _name(self) -> str:
        return getattr(self._jitted, "__name__", "the step")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=4)

    def _variant(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], with_minimum: bool = False
    ) -> _Variant:
        """Looks the signature up, or plans it."""
        with self._lock:
            platform = _platform(args, kwargs)
            key = (signature(self._options, args, kwargs), platform)
            variant = self._by_signature.get(key)
            if variant is None:
                with _no_garbage_collection():
                    variant = self._trace(key[0], args, kwargs)
                    self._plan(variant, platform, args, kwargs, with_minimum)
                self._by_signature[key] = variant
                if len(self._by_signature) > 1:
                    known = (signature for signature, _ in self._by_signature)
                    self._guess = Guess(self._options, known)
            elif with_minimum and variant.ready is not None and not variant.ready[1].moves:
                self._plan(variant, platform, args, kwargs, with_minimum)
            self._last = variant
            return variant

    def _trace(self, key: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Variant:
        traced = self._jitted.trace(*args, **kwargs)
        traced_at = time.perf_counter()
        program = build(traced.jaxpr)
        for region in program.regions:
            shorten_live_ranges(region)
        for warning in program.warnings:
            self._warn(warning)
        return _Variant(
            signature=key,
            program=program,
            out_structure=jax.tree.structure(traced.out_info),
            index_seconds=time.perf_counter() - traced_at,
        )

    def _plan(
        self,
        variant: _Variant,
        platform: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        with_minimum: bool,
    ) -> None:
        before = set(self._variants)
        budget = self._budget
        if budget is None:
            budget = available_memory(platform, (args, kwargs))
        try:
            search = self._search(variant, args, kwargs)
            choice = search.run(budget, always_minimum=with_minimum)
        finally:
            tried = {n: v for n, v in self._variants.items() if n not in before}
            for number in tried:
                del self._variants[number]
        number = next(n for n, v in tried.items() if v.candidate is choice.decisions)
        self._variants[number] = tried[number]
        replaced, variant.ready = variant.ready, (number, choice)
        if replaced is not None:
            del self._variants[replaced[0]]

    def _sweep(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], budgets: list[int] | None
    ) -> Sweep:
        with self._lock:
            key = signature(self._options, args, kwargs)
            variant = self._by_signature.get((key, _platform(args, kwargs)))
            if variant is None:  # its own budget need not be feasible
                variant = self._trace(key, args, kwargs)
            before = set(self._variants)
            try:
                search = self._search(variant, args, kwargs)
                plain = search.compile_plain().total_bytes
                return sweep(
                    lambda budget: search.run(budget, always_minimum=True).plan, plain, budgets
                )
            finally:
                for number in set(self._variants) - before:
                    del self._variants[number]

    def _search(self, variant: _Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Search:
        platform = _platform(args, kwargs)
        transfer.register_handlers("CUDA" if platform in ("cuda", "gpu") else platform)
        if self._call is None:
            self._call = self._build_call(len(args))

        def compile_program(decisions: Decisions) -> Compiled:
            # Each candidate gets a number of its own; the chosen one keeps its number, so that
            # calling it later finds the program that was compiled here.
            number = next(self._numbers)
            candidate = dataclasses.replace(variant, candidate=decisions)
            self._variants[number] = candidate
            ticket = _ANY_TICKET if decisions.calls_manager() else None
            lowered = self._call.lower(number, ticket, *args, **kwargs)
            started = time.perf_counter()
            memory = lowered.compile().memory_analysis()
            return Compiled(
                MemoryUse.of(memory),
                emit_seconds=candidate.emit_seconds,
                compile_seconds=time.perf_counter() - started,
            )

        return Search(
            variant.program,
            compile_program,
            machine=machine_of(_device(args, kwargs)),
            min_bytes=self._min_bytes,
            price=self._price,
            pins=find_pins(variant.program, self._actions),
            has_disk=self._tiers is None or bool(self._tiers),
            index_seconds=variant.index_seconds,
        )

    def _build_call(self, positional: int) -> Any:
        options = self._options
        shifted: dict[str, Any] = {
            "static_argnums": (0, *(n + 2 for n in options.static_argnums)),
            "donate_argnums": tuple(n + 2 for n in options.donate_argnums),
            "donate_argnames": options.donate_argnames or None,
            "static_argnames": options.static_argnames or None,
            "keep_unused": options.keep_unused,
            "compiler_options": options.compiler_options,
        }
        if options.in_shardings is not None:
            given = options.in_shardings
            traced = positional - len(options.static_argnums)
            each = tuple(given) if isinstance(given, tuple | list) else (given,) * traced
            shifted["in_shardings"] = (None, *each)
        if options.out_shardings is not None:
            shifted["out_shardings"] = (options.out_shardings, None)

        def step(number: int, ticket: Any, *args: Any, **kwargs: Any) -> Any:
            variant = self._variants.get(number)
            if variant is None or signature(options, args, kwargs) != variant.signature:
                raise _OtherSignature
            started = time.perf_counter()
            dynamic, _ = split(options, args, kwargs)
            decisions = variant.candidate
            assert decisions is not None
            outputs, sentinel = emit(variant.program, decisions, ticket, jax.tree.leaves(dynamic))
            variant.emit_seconds = time.perf_counter() - started
            return jax.tree.unflatten(variant.out_structure, outputs), sentinel

        step.__name__ = step.__qualname__ = self._name
        return jax.jit(
            step, **{name: value for name, value in shifted.items() if value is not None}
        )


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans of a managed step; nothing is run."""

    step: Managed
    leading: tuple[Any, ...] = ()  # arguments in front of those that are given

    def __call__(self, *args: Any, **kwargs: Any) -> Plan:
        """Plans the step for these arguments.

        Args:
          *args: arrays or `jax.ShapeDtypeStruct`s (static arguments as in a call). Structs with a
            sharding on a described GPU plan for that GPU.
          **kwargs: the same.

        Returns:
          The plan; it prints as a table.

        Raises:
          BudgetError: if the step cannot fit the budget.
        """
        ready = self.step._variant((*self.leading, *args), kwargs, with_minimum=True).ready
        assert ready is not None
        return ready[1].plan

    def sweep(self, *args: Any, budgets: Sequence[int | str] | None = None, **kwargs: Any) -> Sweep:
        """Plans the step for several budgets, whatever its own is.

        Args:
          *args: as in a call.
          budgets: bytes or text such as "8GiB"; None for 100, 75, 50, 35, 25, 15 and 10% of what
            plain JAX needs.
          **kwargs: as in a call.

        Returns:
          The plans; they print as a table, and `.plot(path)` draws them.
        """
        given = None if budgets is None else [parse_bytes(budget) for budget in budgets]
        return self.step._sweep((*self.leading, *args), kwargs, given)


@dataclasses.dataclass(frozen=True)
class Bound:
    """The managed step of a class, bound to one of its objects."""

    step: Managed
    instance: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        return self.step(self.instance, *args, **kwargs)

    @property
    def plan(self) -> Planner:
        """Plans the step without running it."""
        return Planner(self.step, (self.instance,))

    def lower(self, *args: Any, **kwargs: Any) -> ManagedLowered:
        """Lowers the managed step."""
        return self.step.lower(self.instance, *args, **kwargs)

    def stats(self) -> StepStats:
        """What the last completed step moved, of whichever object."""
        return self.step.stats()


@dataclasses.dataclass(frozen=True)
class ManagedLowered:
    """A lowered managed step; `compile()` gives its executable."""

    step: Managed
    variant: _Variant
    lowered: Any

    def compile(self) -> ManagedCompiled:
        return ManagedCompiled(self.step, self.variant, self.lowered.compile())

    def as_text(self, *args: Any, **kwargs: Any) -> str:
        return self.lowered.as_text(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class ManagedCompiled:
    """A compiled managed step, like `jax.stages.Compiled`; calling it runs it."""

    step: Managed
    variant: _Variant
    compiled: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not jax_compat.is_top_level():
            return self.step(*args, **kwargs)  # which says what to do instead
        try:
            return self.step._run(self.variant, args, kwargs)
        except _OtherSignature:
            given, expected = signature(self.step._options, args, kwargs), self.variant.signature
            raise TypeError(
                "this compiled step was lowered for arguments of other types or structure: "
                f"{expected.types} with static {expected.static}; it was called with {given.types} "
                f"and static {given.static}. Call the step itself, or lower it for these."
            ) from None

    def memory_analysis(self) -> Any:
        """XLA's figures for the managed program, without the manager's pool."""
        return self.compiled.memory_analysis()

    def cost_analysis(self) -> Any:
        return self.compiled.cost_analysis()

    def as_text(self) -> str:
        """The scheduled HLO of the managed program."""
        return self.compiled.as_text()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Planning makes a million small objects that live, among a traced program that lives."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the step is compiled for: where its arguments are, or are described to be."""
    for leaf in jax.tree.leaves((args, kwargs)):
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None:
            return next(iter(sharding.device_set))
    return jax.local_devices()[0]


def _platform(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    return str(_device(args, kwargs).platform)


__all__ = ["Managed", "managed"]
