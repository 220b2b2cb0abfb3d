"""`jdynoff.managed`: the decorator.

One call of a managed function is one call of one `jax.jit` function. It was traced from the user's
step, rewritten (`program` -> `planning` -> `rewrite`), compiled and checked against the budget when
a signature was first seen; afterwards `jax.jit` resolves the call in C++.

How a signature is resolved without computing it in Python: the jitted function takes a *program
number* as a static argument. A call first tries the last program. If its types differ, jit traces,
the trace sees that the program is for another signature and raises, and only then is the signature
computed and its program looked up or planned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jdynoff import errors, jax_compat
from jdynoff.adapters import adapt
from jdynoff.calibrate import Calibration
from jdynoff.flights import Flight, Ledger, ledger
from jdynoff.planning.budget import parse_budget
from jdynoff.planning.by_path import held_bytes
from jdynoff.planning.choice import Choice
from jdynoff.planning.decisions import Decisions
from jdynoff.planning.machine import Machine, machine_of
from jdynoff.planning.pins import check_actions, find_pins
from jdynoff.planning.plan import Compiled, MemoryUse, PlannedBlock
from jdynoff.planning.search import Search
from jdynoff.planning.sites import DEFAULT_MIN_BYTES
from jdynoff.planning.variants import Variant, find_variants
from jdynoff.primitives import transfer
from jdynoff.program.blocks import Blocks, find_blocks
from jdynoff.program.build import build
from jdynoff.program.graph import Program
from jdynoff.program.order import shorten_live_ranges
from jdynoff.rewrite.emit import emit
from jdynoff.runtime.device_memory import available_memory
from jdynoff.runtime.manager import check_tiers, manager_for
from jdynoff.runtime.stats import StepStats
from jdynoff.runtime.tiers import Disk
from jdynoff.signatures import Guess, Signature, join, signature, split
from jdynoff.stages import Bound, ManagedLowered, OtherSignature, Pilot, Planner
from jdynoff.sweep import Sweep, sweep

if TYPE_CHECKING:
    from jdynoff.pilot.guide import Guide

_ANY_TICKET = np.uint32(0)  # for lowering: only its type matters
# Another thread may plan a signature anew between finding its program and calling it.
_MOST_ATTEMPTS = 3


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Ready:
    """What a signature runs: one program, or several between which the pilot chooses."""

    options: tuple[tuple[int, Variant], ...]  # with their numbers; the first is for all paths

    @property
    def number(self) -> int:
        """Of the program for all paths."""
        return self.options[0][0]

    @property
    def choice(self) -> Choice:
        """The decisions for all paths."""
        return self.options[0][1].choice

    @property
    def uses_disk(self) -> bool:
        """Whether any of the programs may need it: they share one manager."""
        return any(variant.choice.uses_disk for _, variant in self.options)


@dataclasses.dataclass(eq=False, slots=True)
class Traced:
    """One signature's step, and after planning what it runs."""

    signature: Signature
    program: Program
    blocks: Blocks
    out_structure: Any
    arguments: list[tuple[str, Any, bool]]  # path, abstract value, whether it is donated
    index_seconds: float
    # Read and replaced as a whole: a plan may choose anew while another thread calls.
    ready: Ready | None = None
    manager: Any = None  # found at the first run: looking for a disk takes its time
    guide: Guide | None = None  # None: nothing to predict, or it is not wanted
    pilot_state: Any = None  # f32[n], of the last run that has completed
    foresee: Any = None  # the prediction alone, jitted: where there are several programs


@dataclasses.dataclass(eq=False, slots=True)
class _Candidate:
    """A program that the search compiles, or has chosen."""

    traced: Traced
    decisions: Decisions
    emit_seconds: float = 0.0


def managed(
    fun: Callable[..., Any] | None = None,
    *,
    budget: int | str | None = None,
    tiers: Sequence[Disk] | None = None,
    min_bytes: int = DEFAULT_MIN_BYTES,
    flops_per_byte: float | None = None,
    actions: Mapping[str, str] | None = None,
    pilot: Any = "auto",
    features: Callable[..., Any] | None = None,
    variants: int = 3,
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
        A price that is named falls by a twentieth over each body, so that it can divide
        products of one width; those that the search tries do not.
      actions: what is to happen to some values, by pattern: "keep" (in XLA), "offload" or
        "recompute". A pattern is matched, like a file name, against the name given by
        `jax.ad_checkpoint.checkpoint_name`, against `file.py:line`, and against the path of modules
        and named scopes with the operation at its end, as in
        `{"evoformer/*/exp": "recompute", "hidden": "offload"}`. The first that matches counts.
      pilot: what predicts how often branches and loops will run, so that the manager writes to
        disk what will not fit and nothing else: "auto" for a small network that learns while the
        step trains, a Flax module in its place (`jdynoff.pilot.network.Network` gives the call), or
        "off". It is used where the step has branches or loops that depend on data.
      features: what the pilot sees of a step: a function of the step's arguments to a 1-D array of
        floating-point numbers. Default: statistics of the batch's arrays.
      variants: the most programs that are compiled for one signature where its path varies: one
        for all paths, and others that are predicted to be at least 5% faster on short or long ones.
        Before each step the pilot picks one of them.
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
            pilot=pilot,
            features=features,
            variants=variants,
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
            pilot=pilot,
            features=features,
            variants=variants,
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
        pilot: Any,
        features: Callable[..., Any] | None,
        variants: int,
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
        self._module = _check_pilot(pilot)
        self._pilot_directory: str | os.PathLike[str] | None = None  # to start from
        self._told = False  # for experiments, see `Guide`
        self._features = features
        self._most_variants = 1 if self._module == "off" else variants
        self._verify = verify
        self._lock = threading.RLock()  # guards the fields below; held while planning
        self._programs: dict[int, _Candidate] = {}
        self._by_signature: dict[tuple[Signature, str], Traced] = {}
        self._guess: Guess | None = None  # among several signatures
        self._numbers = itertools.count()  # never reused: jit remembers them
        self._last: Traced | None = None
        self._landed_flight: Flight | None = None
        self._calibration: Calibration | None = None  # while steps are observed
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
        traced = self._probable(args, kwargs)
        for _ in range(_MOST_ATTEMPTS):
            if traced is not None:
                with contextlib.suppress(OtherSignature):
                    return self._run(traced, args, kwargs)
            traced = self._traced(args, kwargs)
        return self._run(self._traced(args, kwargs), args, kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Binds the step of a class to an object, like any function."""
        return self if instance is None else Bound(self, instance)

    def _probable(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced | None:
        """The step that a call probably needs, found without a look at every argument."""
        guess = self._guess
        if guess is None:
            return self._last
        found = guess(args, kwargs)
        return None if found is None else self._by_signature.get((found, _platform(args, kwargs)))

    def _run(self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert traced.ready is not None
        number, variant = traced.ready.options[0]
        if len(traced.ready.options) > 1:
            number, variant = self._fastest(traced, args, kwargs)
        choice, started = variant.choice, time.perf_counter()
        if not choice.moves:
            outputs = self._call(number, None, None, *args, **kwargs)[0]
            if self._calibration is not None:
                self._calibration.landed(variant.outlook, None, outputs, started)
            return outputs
        book, plan = self._ledger, choice.plan
        manager = traced.manager
        if manager is None:
            tiers = self._tiers if traced.ready.uses_disk else ()
            manager = traced.manager = manager_for(tiers, verify=self._verify)
        open_ticket = functools.partial(
            manager.open, choice.ticket_pool_bytes, plan.spill_bytes, expected_bytes=plan.held_bytes
        )
        flight = Flight(self, plan.device_peak_bytes, manager, traced)
        try:
            limit = max(plan.device_peak_bytes, plan.budget_bytes or 0)
            ticket = np.uint32(book.depart(flight, limit, open_ticket))
            outputs, sentinel, flight.counted, flight.pilot_state = self._call(
                number, ticket, traced.pilot_state, *args, **kwargs
            )
            book.dispatched(flight, sentinel)
        except BaseException as failure:
            book.cancel(flight)
            known = errors.from_xla(failure)
            if known is not None:
                raise known from failure
            raise
        if self._calibration is not None:
            self._calibration.landed(variant.outlook, flight, outputs, started)
        return outputs

    def _fastest(
        self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, Variant]:
        """Of several programs the one that is fastest on the path that the pilot predicts."""
        assert traced.ready is not None
        counters = self._foreseen(traced, args, kwargs)
        return min(
            traced.ready.options,
            key=lambda option: option[1].outlook.predict(counters).step_seconds,
        )

    def _foreseen(
        self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> np.ndarray:
        """The counters that are predicted for a step with these arguments; waits for them."""
        assert traced.guide is not None
        if traced.foresee is None:
            traced.foresee = _foresee(traced.guide, traced.arguments)
        leaves = jax.tree.leaves(split(self._options, args, kwargs)[0])
        return np.asarray(traced.foresee(traced.pilot_state, leaves))

    def _predicted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, int]:
        """See `stages.Pilot.predict`."""
        with self._lock:
            last = self._last
            traced = self._traced(args, kwargs)
            self._last = last or traced  # a save is of the signature that ran
        if traced.guide is None or traced.ready is None or not traced.ready.choice.moves:
            raise self._no_pilot(traced)
        names = [block.name for block in traced.blocks.learned]
        return dict(zip(names, self._foreseen(traced, args, kwargs).tolist(), strict=True))

    def _landed(self, flight: Flight) -> None:
        """Called by the ledger when a run of this step is over."""
        if flight.stats is not None and flight.sentinel is not None:
            self._landed_flight = flight
            if flight.failure is None and flight.pilot_state is not None:
                # On the host: the next call's arguments may be on another device.
                flight.traced.pilot_state = np.asarray(flight.pilot_state)

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

    @property
    def disk_rate(self) -> int | None:
        """The most bytes a second that go to the disk and come from it, if the user limits them."""
        return self._tiers[0].bytes_per_second if self._tiers else None

    @property
    def has_features(self) -> bool:
        """Whether the pilot is given features by a function of the user's."""
        return self._features is not None

    @property
    def pilot(self) -> Pilot:
        """What the pilot has learned: `step.pilot.save(...)`, `step.pilot.restore(...)`."""
        return Pilot(self)

    def lower(self, *args: Any, **kwargs: Any) -> ManagedLowered:
        """Lowers the managed step, like `jax.jit(...).lower`; plans it first."""
        traced = self._traced(args, kwargs)
        assert traced.ready is not None
        number, choice = traced.ready.number, traced.ready.choice
        ticket = _ANY_TICKET if choice.moves else None
        state = _like(traced.pilot_state) if choice.moves else None
        lowered = self._call.lower(number, ticket, state, *args, **kwargs)
        return ManagedLowered(self, traced, lowered)

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

    def calibrate(self) -> Calibration:
        """Corrects this machine's rates by real steps: `with step.calibrate(): ...` around some.

        Each step inside is waited for and compared with its prediction. At the end the corrected
        rates are kept where `python -m jdynoff doctor --measure` keeps its own, for later plans;
        plans that were made stay as they are.

        Returns:
          A context manager, whose `machine` afterwards holds the corrected rates.

        Raises:
          ConfigurationError: on entering, if the step does not run on a CPU.
        """
        return Calibration(self)

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
            known = [traced.ready for traced in self._by_signature.values()]
            if any(ready is not None and not ready.choice.moves for ready in known):
                return StepStats()
            raise RuntimeError(
                f"{self._name} has not completed a step yet; call it before asking for stats()."
            )
        if flight.failure is not None:
            raise flight.failure
        assert flight.stats is not None
        return StepStats.from_manager(flight.stats, **_observed(flight))

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

    def _traced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], with_minimum: bool = False
    ) -> Traced:
        """Looks the signature up, or plans it."""
        with self._lock:
            platform = _platform(args, kwargs)
            key = (signature(self._options, args, kwargs), platform)
            traced = self._by_signature.get(key)
            if traced is None:
                with _no_garbage_collection():
                    traced = self._trace(key[0], args, kwargs)
                    self._plan(traced, platform, args, kwargs, with_minimum)
                self._by_signature[key] = traced
                if len(self._by_signature) > 1:
                    known = (signature for signature, _ in self._by_signature)
                    self._guess = Guess(self._options, known)
            elif with_minimum and traced.ready is not None and not traced.ready.choice.moves:
                self._plan(traced, platform, args, kwargs, with_minimum)
            self._last = traced
            return traced

    def _trace(self, key: Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Traced:
        traced = self._jitted.trace(*args, **kwargs)
        traced_at = time.perf_counter()
        program = build(traced.jaxpr)
        for region in program.regions:
            shorten_live_ranges(region)
        for warning in program.warnings:
            self._warn(warning)
        return Traced(
            signature=key,
            program=program,
            blocks=find_blocks(program),
            out_structure=jax.tree.structure(traced.out_info),
            arguments=_described(traced.args_info, program),
            index_seconds=time.perf_counter() - traced_at,
        )

    def _plan(
        self,
        traced: Traced,
        platform: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        with_minimum: bool,
    ) -> None:
        before = set(self._programs)
        budget = self._budget
        if budget is None:
            budget = available_memory(platform, (args, kwargs))
        try:
            search = self._search(traced, args, kwargs)
            choice = search.run(budget, always_minimum=with_minimum)
            found = find_variants(search, choice, self._most_variants)
        finally:
            tried = {n: v for n, v in self._programs.items() if n not in before}
            for number in tried:
                del self._programs[number]
        numbers = {id(candidate.decisions): number for number, candidate in tried.items()}
        blocks = _planned_blocks(traced) if found[0].choice.moves else ()
        options = []
        for variant in found:
            plan = dataclasses.replace(variant.choice.plan, blocks=blocks, variants=len(found))
            described = dataclasses.replace(variant.choice, plan=plan)
            number = numbers[id(described.decisions)]
            options.append((number, dataclasses.replace(variant, choice=described)))
        self._programs.update((number, tried[number]) for number, _ in options)
        replaced, traced.ready = traced.ready, Ready(tuple(options))
        for number, _ in () if replaced is None else replaced.options:
            del self._programs[number]

    def _sweep(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], budgets: list[int] | None
    ) -> Sweep:
        with self._lock:
            key = signature(self._options, args, kwargs)
            traced = self._by_signature.get((key, _platform(args, kwargs)))
            if traced is None:  # its own budget need not be feasible
                traced = self._trace(key, args, kwargs)
            before = set(self._programs)
            try:
                search = self._search(traced, args, kwargs)
                plain = search.compile_plain().total_bytes
                return sweep(
                    lambda budget: search.run(budget, always_minimum=True).plan, plain, budgets
                )
            finally:
                for number in set(self._programs) - before:
                    del self._programs[number]

    def _search(self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Search:
        platform = _platform(args, kwargs)
        transfer.register_handlers("CUDA" if platform in ("cuda", "gpu") else platform)
        if self._call is None:
            self._call = self._build_call(len(args))

        def compile_program(decisions: Decisions) -> Compiled:
            # Each candidate gets a number of its own; the chosen one keeps its number, so that
            # calling it later finds the program that was compiled here.
            number = next(self._numbers)
            candidate = self._programs[number] = _Candidate(traced, decisions)
            moves = decisions.calls_manager()
            if moves:
                self._prepare_guide(traced, args, kwargs)
            ticket, state = (_ANY_TICKET, _like(traced.pilot_state)) if moves else (None, None)
            lowered = self._call.lower(number, ticket, state, *args, **kwargs)
            started = time.perf_counter()
            memory = lowered.compile().memory_analysis()
            return Compiled(
                MemoryUse.of(memory),
                emit_seconds=candidate.emit_seconds,
                compile_seconds=time.perf_counter() - started,
            )

        return Search(
            traced.program,
            compile_program,
            blocks=traced.blocks,
            machine=self._machine(args, kwargs),
            min_bytes=self._min_bytes,
            price=self._price,
            pins=find_pins(traced.program, self._actions),
            has_disk=self._tiers is None or bool(self._tiers),
            conditions=(repr(self._module), self._features is not None),
            index_seconds=traced.index_seconds,
        )

    def _machine(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Machine:
        """What plans reckon with: the device's rates, and the disk's no higher than it may be."""
        machine = machine_of(_device(args, kwargs))
        rate = self.disk_rate
        if rate is None:
            return machine
        return dataclasses.replace(
            machine,
            out_bytes_per_second=min(machine.out_bytes_per_second, rate),
            back_bytes_per_second=min(machine.back_bytes_per_second, rate),
        )

    def _prepare_guide(self, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Builds the pilot of a step that has something to predict, once."""
        if traced.guide is not None or self._module == "off" or not traced.blocks.learned:
            return
        from jdynoff.pilot.features import checked_features
        from jdynoff.pilot.guide import Guide
        from jdynoff.pilot.slicing import find_slices
        from jdynoff.pilot.store import restore

        machine = self._machine(args, kwargs)
        features = None
        if self._features is not None:
            checked = checked_features(self._features)
            structure = jax.tree.structure(split(self._options, args, kwargs)[0])
            # Without the arrays: they would live as long as the step.
            static = set(self._options.static_argnums)
            args = tuple(arg if n in static else None for n, arg in enumerate(args))
            names = self._options.static_argnames
            kwargs = {name: arg if name in names else None for name, arg in kwargs.items()}

            def features(leaves: Sequence[Any]) -> jax.Array:
                dynamic = jax.tree.unflatten(structure, leaves)
                given, named = join(self._options, dynamic, args, kwargs)
                return checked(*given, **named)

        traced.guide = Guide(
            traced.blocks,
            find_slices(traced.program, traced.blocks, machine),
            traced.arguments,
            [output.aval for output in traced.program.top.outputs],
            module=None if self._module == "auto" else self._module,
            features=features,
            told=self._told,
        )
        learner = traced.guide.learner
        if self._told:
            traced.pilot_state = np.zeros(len(traced.blocks.learned), np.float32)
        elif learner is not None:
            traced.pilot_state = learner.initial()
            if self._pilot_directory is not None:
                # Only once: a step with other shapes is another program.
                directory, self._pilot_directory = self._pilot_directory, None
                traced.pilot_state = restore(directory, learner)

    def _pilot_state(self) -> tuple[Any, Any]:
        """The learner and the state of the last signature's pilot."""
        self._ledger.wait(self)
        traced = self._last
        if traced is None or traced.guide is None or traced.guide.learner is None:
            raise self._no_pilot(traced)
        if traced.ready is not None and not traced.ready.options[0][1].choice.moves:
            raise self._no_pilot(traced)
        return traced.guide.learner, traced.pilot_state

    def _no_pilot(self, traced: Traced | None) -> errors.ConfigurationError:
        reason = (
            "it has been neither planned nor called. Call it once."
            if traced is None
            else "the counts of all its blocks are known without one, nothing is moved, or "
            'pilot="off". There is nothing to predict, save or restore.'
        )
        return errors.ConfigurationError(f"{self._name} has no pilot: {reason}")

    def _restore_pilot(self, directory: str | os.PathLike[str]) -> None:
        with self._lock:
            if self._last is not None:
                from jdynoff.pilot.store import restore

                learner, _ = self._pilot_state()
                self._last.pilot_state = restore(directory, learner)
            else:
                self._pilot_directory = directory

    def _build_call(self, positional: int) -> Any:
        options = self._options
        shifted: dict[str, Any] = {
            "static_argnums": (0, *(n + 3 for n in options.static_argnums)),
            "donate_argnums": tuple(n + 3 for n in options.donate_argnums),
            "donate_argnames": options.donate_argnames or None,
            "static_argnames": options.static_argnames or None,
            "keep_unused": options.keep_unused,
            "compiler_options": options.compiler_options,
        }
        if options.in_shardings is not None:
            given = options.in_shardings
            traced = positional - len(options.static_argnums)
            each = tuple(given) if isinstance(given, tuple | list) else (given,) * traced
            shifted["in_shardings"] = (None, None, *each)
        if options.out_shardings is not None:
            shifted["out_shardings"] = (options.out_shardings, None, None, None)

        def step(number: int, ticket: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
            candidate = self._programs.get(number)
            if candidate is None:
                raise OtherSignature
            traced = candidate.traced
            if signature(options, args, kwargs) != traced.signature:
                raise OtherSignature
            started = time.perf_counter()
            dynamic, _ = split(options, args, kwargs)
            results = _emit(candidate, ticket, state, jax.tree.leaves(dynamic))
            candidate.emit_seconds = time.perf_counter() - started
            return jax.tree.unflatten(traced.out_structure, results[0]), *results[1:]

        step.__name__ = step.__qualname__ = self._name
        return jax.jit(
            step, **{name: value for name, value in shifted.items() if value is not None}
        )


def _emit(
    candidate: _Candidate, ticket: Any, state: Any, leaves: list[Any]
) -> tuple[list[Any], Any, Any, Any]:
    """Emits a step between the pilot's prediction and what it learns.

    Returns:
      The step's flat outputs, the sentinel, what was counted, and the pilot's next state. Counted
      are, in i32: the counters, the predicted ones, and whether the features were finite; the last
      two only with a pilot, and nothing at all where nothing is moved.
    """
    traced, decisions = candidate.traced, candidate.decisions
    program, blocks, guide = traced.program, traced.blocks, traced.guide
    if ticket is None or not blocks.learned:
        emitted = emit(program, decisions, ticket, leaves)
        return emitted.outputs, emitted.sentinel, None, state
    foreseen = pages = None
    if guide is not None:
        foreseen = guide.foresee(state, leaves)
        pages = foreseen.expected_pages(held_bytes(program, blocks, decisions).by_path)
    emitted = emit(program, decisions, ticket, leaves, counted=blocks.counted, expected_pages=pages)
    counters = jnp.concatenate(list(emitted.counters.values()))
    if guide is None or foreseen is None:
        return emitted.outputs, emitted.sentinel, counters, state
    state = guide.learn(state, foreseen, counters)
    usable = foreseen.usable.astype(np.int32)[None]
    counted = jnp.concatenate([counters, foreseen.counters, usable])
    return emitted.outputs, emitted.sentinel, counted, state


def _foresee(guide: Guide, arguments: list[tuple[str, Any, bool]]) -> Any:
    """The prediction alone: pilot's state and flat arguments to counters."""

    def foresee(state: Any, leaves: list[Any]) -> jax.Array:
        given = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if given != [(aval.shape, aval.dtype) for _, aval, _ in arguments]:
            raise OtherSignature
        return guide.foresee(state, leaves).counters

    return jax.jit(foresee)


def _observed(flight: Flight) -> dict[str, Any]:
    """What the counters of a completed run say, as fields of `StepStats`."""
    if flight.counted is None:
        return {}
    counted = np.asarray(flight.counted).tolist()
    blocks = flight.traced.blocks
    names = [block.name for block in blocks.learned]
    counters = counted[: len(names)]
    path = {block.name: count for block, count in blocks.path(counters).items()}
    predicted = dict(zip(names, counted[len(names) : 2 * len(names)], strict=False))
    return {
        "path": path,
        "predicted": predicted,
        "blocks_predicted": len(predicted),
        "blocks_predicted_right": sum(path[name] == count for name, count in predicted.items()),
    }


def _planned_blocks(traced: Traced) -> tuple[PlannedBlock, ...]:
    """How the count of each block that depends on data is known."""
    slices = {} if traced.guide is None else traced.guide.slices
    found = []
    for block in traced.blocks.blocks:
        if block.counter is None:
            continue
        piece = slices.get(block.counter[0])
        known = "counted" if traced.guide is None else "learned"
        if block.is_twin:
            known = "follows"
        elif piece is not None:
            known = "sliced"
        cost = piece.share if piece is not None and known == "sliced" else 0.0
        found.append(PlannedBlock(block.name, block.source, block.most, known, cost))
    return tuple(found)


def _described(args_info: Any, program: Program) -> list[tuple[str, Any, bool]]:
    """Path, abstract value and donation of each flat argument."""
    found = []
    paths = jax.tree_util.tree_leaves_with_path(args_info)
    for (path, info), value in zip(paths, program.top.inputs, strict=True):
        # Without the level that separates positional arguments from named ones.
        name = jax.tree_util.keystr(path[1:])
        found.append((name, value.aval, bool(info.donated)))
    return found


def _like(state: Any) -> Any:
    return None if state is None else jax.ShapeDtypeStruct(state.shape, state.dtype)


def _check_pilot(pilot: Any) -> Any:
    if pilot in ("auto", "off") or callable(getattr(pilot, "apply", None)):
        return pilot
    raise errors.ConfigurationError(
        f'pilot={pilot!r} means nothing; give "auto", "off" or a Flax module with the call '
        "of jdynoff.pilot.network.Network."
    )


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
