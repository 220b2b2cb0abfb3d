"""The planner: budgets from all that plain JAX needs down to a tenth, on three kinds of steps.

For each step a table with one row for each budget: what XLA and the pool need, how far the memory
of a process that runs the step really rises (`benchmarks.real_peak`), and how the simulation
compares with XLA. Then claims: whether every feasible budget is kept, by XLA's figures and really,
whether the smallest works and nine tenths of it does not, and the step's time against the best of
`jax.checkpoint` around each layer, the same with `dots_saveable`, and moving everything, of those
that fit the budget.

    python -m benchmarks.planner [--quick] [--case NAME] [--json FILE]

`--case` runs one of the steps alone: scan-mlp, unrolled-mlp, transformer or alphafold.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jdynoff
from benchmarks import steps
from benchmarks.alphafold_trunk import random_batch
from benchmarks.harness import (
    Claim,
    Timing,
    conclude,
    interleave,
    measure_rates,
    parse,
    show,
    skipped,
)
from benchmarks.memory_cgroup import run_limited, unavailable
from benchmarks.real_peak import Rise
from jdynoff.planning.plan import MemoryUse, Plan
from jdynoff.sweep import SHARES, Sweep
from models.alphafold.config import trunk_config
from models.alphafold.trunk import make_trunk_step

_TIMED_SHARES = (0.75, 0.5, 0.25)  # in quick form; else all
_NOISE = 1.1
_AT_A_QUARTER = 1.15
_SIMULATION = 0.25
# What fits unchanged is left so unless something else is faster by so much.
_WORTH_MOVING = 1.05
# What a process takes beside the arrays of its first step: pages of libraries, packed operands of
# products, stacks of threads, page tables. Plain JAX takes as much beyond XLA's figure, and where
# it takes more, so may a managed step.
_REAL_SLACK_BYTES = 32 << 20
_OF_PLAIN_SLACK = 1.25
# Or freed arrays of some MiB stay with malloc, and count as the step's.
_GIVE_BACK = "MALLOC_MMAP_THRESHOLD_=262144"
_PLAIN = 0  # in the place of a budget: plain JAX
_NO_LIMIT_BYTES = 1 << 40  # a cgroup that only measures
_TIMEOUT_SECONDS = 1800.0
_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent

Step = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One step, and what its author could have done without jdynoff."""

    name: str
    step: Step
    alternatives: dict[str, Step]
    arguments: tuple[Any, ...]


class Block(nn.Module):
    """A pre-norm transformer block."""

    heads: int = 4

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        """Attention and a two-layer perceptron on [batch, tokens, channels]."""
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads)(y, y)
        y = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(4 * x.shape[-1])(y))), None


def scan_mlp() -> Case:
    """The 16-layer perceptron of the memory table, its layers in a scan."""

    def loss(wrap: Callable[[Any], Any]) -> Step:
        def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
            return x + jax.nn.gelu(jnp.tanh(x @ w["a"]) @ w["b"]), None

        return steps.sgd(lambda w, x: jnp.mean(jax.lax.scan(wrap(layer), x, w)[0] ** 2))

    structs = steps.stacked_weights(), steps.activations()
    return Case("scan MLP", loss(lambda layer: layer), _alternatives(loss), _filled(structs))


def unrolled_mlp() -> Case:
    """The same with its layers in a list."""

    def loss(wrap: Callable[[Any], Any]) -> Step:
        def layer(x: jax.Array, w: Any) -> jax.Array:
            return x + jax.nn.gelu(jnp.tanh(x @ w["a"]) @ w["b"])

        def whole(weights: Any, x: jax.Array) -> jax.Array:
            for w in weights:
                x = wrap(layer)(x, w)
            return jnp.mean(x**2)

        return steps.sgd(whole)

    structs = steps.listed_weights(), steps.activations()
    return Case("unrolled MLP", loss(lambda layer: layer), _alternatives(loss), _filled(structs))


def transformer() -> Case:
    """A Flax transformer: 8 blocks in a scan, 8 x 256 tokens, 128 channels."""

    def loss(wrap: Callable[[Any], Any]) -> Step:
        blocks = nn.scan(
            wrap(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=8,
        )()
        return steps.sgd(lambda w, x: jnp.mean(blocks.apply(w, x, None)[0] ** 2))

    def remat(policy: Any) -> Callable[[Any], Any]:
        return lambda module: nn.remat(module, prevent_cse=False, policy=policy)

    plain = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=8)()
    x = jax.ShapeDtypeStruct((8, 256, 128), jnp.float32)
    weights = jax.eval_shape(lambda: plain.init(jax.random.key(0), jnp.zeros(x.shape), None))
    saveable = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return Case(
        "Flax transformer",
        loss(lambda module: module),
        {"checkpoint": loss(remat(None)), "dots saveable": loss(remat(saveable))},
        _filled((weights, x)),
    )


def alphafold() -> Case:
    """The AlphaFold trunk of the demonstration, two blocks deep."""
    sizes = {"num_blocks": 3, "num_extra_blocks": 2, "num_residues": 64}
    step, init, spec = make_trunk_step(trunk_config(**sizes))
    checkpointed, _, _ = make_trunk_step(trunk_config(**sizes, checkpoint_blocks=True))
    arguments = init(jax.random.key(0)), random_batch(spec)
    return Case("AlphaFold trunk", step, {"checkpoint": checkpointed}, arguments)


def _alternatives(loss: Callable[[Callable[[Any], Any]], Step]) -> dict[str, Step]:
    saveable = jax.checkpoint_policies.dots_saveable
    return {
        "checkpoint": loss(jax.checkpoint),
        "dots saveable": loss(lambda layer: jax.checkpoint(layer, policy=saveable)),
    }


def _filled(structs: Any) -> Any:
    """Small weights, so that deep stacks stay finite."""
    return jax.tree.map(lambda leaf: leaf * 0.05, steps.random_like(structs))


CASES: dict[str, Callable[[], Case]] = {
    "scan-mlp": scan_mlp,
    "unrolled-mlp": unrolled_mlp,
    "transformer": transformer,
    "alphafold": alphafold,
}


@dataclasses.dataclass(frozen=True)
class RealPeak:
    """What one process needed to run a step.

    Attributes:
        bytes: Arguments, and how far its memory rose while it ran the step twice.
        how: What was measured.
    """

    bytes: int
    how: str


def child(name: str, budget: int) -> None:
    """Runs a step within a budget and prints how far this process's memory rose, as JSON."""
    case = CASES[name]()
    step: Any = jax.jit(case.step)
    if budget != _PLAIN:
        step = jdynoff.managed(step, budget=budget)
        step.plan(*case.arguments)
    memory = MemoryUse.of(step.lower(*case.arguments).compile().memory_analysis())
    jax.block_until_ready(case.arguments)
    rise = Rise()
    for _ in range(2):
        jax.block_until_ready(step(*case.arguments))
    found = RealPeak(memory.argument_bytes + rise.bytes(), rise.how)
    print(json.dumps(dataclasses.asdict(found)))


def real_peak(name: str, budget: int) -> RealPeak:
    """Runs `child` in a memory cgroup, or without one where none can be made."""
    arguments = ["--child", name, str(budget)]
    command = ["env", _GIVE_BACK, sys.executable, "-m", "benchmarks.planner", *arguments]
    if unavailable():
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            cwd=_REPOSITORY,
            timeout=_TIMEOUT_SECONDS,
        )
        stdout = done.stdout
    else:
        limited = run_limited(command, _NO_LIMIT_BYTES, _TIMEOUT_SECONDS, _REPOSITORY)
        if limited.returncode:
            raise RuntimeError(f"{name} within {budget} bytes failed: {limited.stderr[-2000:]}")
        stdout = limited.stdout
    return RealPeak(**json.loads(stdout.strip().splitlines()[-1]))


def contract_table(
    case: Case, plans: Sequence[tuple[int, Plan | None]], plain: int, peaks: dict[int, RealPeak]
) -> Table:
    """What each budget gives, in MiB; `plans` and `peaks` by budget."""
    ways = {peak.how for peak in peaks.values()}
    table = Table(title=f"{case.name}; really: {', '.join(ways)}", title_justify="left")
    for column in (
        "budget",
        "of plain",
        "XLA + pool",
        "really",
        "simulated / XLA",
        "moved",
        "FLOPs again",
        "predicted step",
    ):
        table.add_column(column, justify="right", overflow="fold")
    for budget, plan in plans:
        row = [f"{budget / 2**20:.1f}", f"{100 * budget / plain:.0f}%"]
        if plan is None:
            table.add_row(*row, "does not fit")
            continue
        forecast = plan.forecast
        temporary = max(plan.memory.temporary_bytes, 1)
        table.add_row(
            *row,
            f"{plan.device_peak_bytes / 2**20:.1f}",
            f"{peaks[budget].bytes / 2**20:.1f}" if budget in peaks else "not measured",
            f"{plan.simulated_bytes / temporary:.2f}",
            f"{plan.traffic_bytes / 2**20:.0f}",
            f"{100 * forecast.extra_flops / max(forecast.flops, 1):.1f}%",
            f"{forecast.step_seconds / forecast.plain_seconds:.2f}x plain",
        )
    return table


def contract_claims(
    case: Case, sweep: Sweep, edge: Sweep, peaks: dict[int, RealPeak]
) -> list[Claim]:
    """Whether budgets are kept, and the least is the least.

    Args:
        case: The step.
        sweep: Over all budgets.
        edge: At the least budget and nine tenths of it.
        peaks: What processes really needed, by budget.
    """
    rows = {row.budget_bytes: row.plan for row in (*sweep.rows, *edge.rows)}
    plans = [row.plan for row in sweep.rows if row.plan is not None]
    fits = [row.plan is not None for row in sweep.rows]
    kept = all(plan.device_peak_bytes <= plan.budget_bytes for plan in plans)
    peaks_fall = _falls([float(plan.device_peak_bytes) for plan in plans])
    seconds = [plan.forecast.step_seconds for plan in plans]
    monotone = all(
        larger <= _WORTH_MOVING * smaller for larger, smaller in itertools.combinations(seconds, 2)
    )
    least = sweep.min_feasible_bytes
    sharp = [row.plan is not None for row in edge.rows] == [True, False]
    tried = [*plans, *(row.plan for row in edge.rows if row.plan is not None)]
    moving = [plan for plan in tried if plan.sites and plan.memory.temporary_bytes]
    ratios = [plan.simulated_bytes / plan.memory.temporary_bytes for plan in moving]
    unchanged = [plan for plan in plans if not plan.sites]
    beside = "; ".join(
        f"plain {plan.simulated_bytes / plan.memory.temporary_bytes:.2f}" for plan in unchanged[:1]
    )
    wrong = max((abs(ratio - 1) for ratio in ratios), default=0.0)
    feasible = ", ".join(
        f"{100 * row.budget_bytes / sweep.plain_peak_bytes:.0f}%"
        for row in sweep.rows
        if row.plan is not None
    )
    over = {
        budget: peak.bytes - (budget or sweep.plain_peak_bytes) for budget, peak in peaks.items()
    }
    of_plain = over.pop(_PLAIN, 0)
    worst = max(over, key=lambda budget: over[budget], default=0)
    real = f"{case.name}: really over the budget, at most"
    return [
        Claim(
            f"{case.name}: budgets kept and monotone",
            f"{sweep.plain_peak_bytes / 2**20:.0f} MiB",
            float(kept and fits == sorted(fits, reverse=True) and peaks_fall and monotone),
            "",
            1.0,
            at_least=True,
            note=f"feasible: {feasible}; compiles at most {max(p.compiles for p in plans)}; "
            f"predicted {', '.join(f'{1e3 * s:.0f}' for s in seconds)} ms",
        ),
        Claim(
            real,
            f"{of_plain / 2**20:.1f} MiB",
            over[worst] / 2**20,
            "MiB",
            max(_REAL_SLACK_BYTES, int(_OF_PLAIN_SLACK * of_plain)) / 2**20,
            note=f"at {worst / 2**20:.1f} MiB; {peaks[worst].how}, arguments included",
        )
        if over
        else skipped(real, "neither a memory cgroup nor the resident set's peak can be read"),
        Claim(
            f"{case.name}: the least works, 0.9 of it does not",
            "",
            float(sharp),
            "",
            1.0,
            at_least=True,
            note=f"{least / 2**20:.1f} MiB, {100 * least / sweep.plain_peak_bytes:.0f}% of plain"
            + ("; it ran" if least in peaks and rows[least] is not None else ""),
        ),
        Claim(
            f"{case.name}: simulated / XLA's temporaries, managed",
            beside,
            wrong,
            "off",
            _SIMULATION,
            note=", ".join(f"{ratio:.2f}" for ratio in ratios),
        ),
    ]


def _falls(values: Sequence[float], sign: int = 1) -> bool:
    """Whether they never rise; with `sign=-1`, never fall."""
    return list(values) == sorted(values, reverse=sign > 0)


def contract(name: str, case: Case, console: Console) -> tuple[Sweep, list[Claim]]:
    """Plans for every budget, runs what fits, and prints the table."""
    planner = jdynoff.managed(jax.jit(case.step)).plan
    sweep = planner.sweep(*case.arguments)
    least = sweep.min_feasible_bytes
    edge = planner.sweep(*case.arguments, budgets=[least, int(0.9 * least)])
    rows = sorted(
        ((row.budget_bytes, row.plan) for row in (*sweep.rows, *edge.rows)),
        key=lambda row: -row[0],
    )
    peaks = {}
    try:
        peaks[_PLAIN] = real_peak(name, _PLAIN)
        for budget, plan in rows:
            if plan is not None:
                peaks[budget] = real_peak(name, budget)
    except OSError as error:
        console.print(f"real peaks are not measured: {error}")
    console.print(contract_table(case, rows, sweep.plain_peak_bytes, peaks))
    return sweep, contract_claims(case, sweep, edge, peaks)


def time_claims(case: Case, sweep: Sweep, shares: Sequence[float], rounds: int) -> list[Claim]:
    """Step times at some budgets against the best alternative that fits."""
    budgets = {share: int(share * sweep.plain_peak_bytes) for share in shares}
    budgets = {s: size for s, size in budgets.items() if size >= sweep.min_feasible_bytes}
    programs: dict[str, Callable[[], Any]] = {}
    needs: dict[str, int] = {}
    for name, step in {"plain": case.step, **case.alternatives}.items():
        jitted = jax.jit(step)
        needs[name] = MemoryUse.of(
            jitted.lower(*case.arguments).compile().memory_analysis()
        ).total_bytes
        programs[name] = lambda jitted=jitted: jitted(*case.arguments)
    for share, budget in budgets.items():
        for kind, price in (("planned", None), ("all moved", 0.0)):
            managed = jdynoff.managed(jax.jit(case.step), budget=budget, flops_per_byte=price)
            name = f"{kind} {100 * share:.0f}%"
            try:
                needs[name] = managed.plan(*case.arguments).device_peak_bytes
            except jdynoff.BudgetError:
                if kind == "planned":
                    raise
                continue  # computing nothing again does not fit
            programs[name] = lambda managed=managed: managed(*case.arguments)
    times = interleave(programs, rounds)
    claims = []
    for share, budget in budgets.items():
        planned = times[f"planned {100 * share:.0f}%"]
        others = [
            name
            for name, size in needs.items()
            if size <= budget and not name.startswith("planned")
        ]
        to_plain, _, _ = planned.ratio(times["plain"])
        name = f"{case.name} at {100 * share:.0f}%: step against the best that fits"
        if others:
            best = min(others, key=lambda name: times[name].median)
            ratio, low, high = planned.ratio(times[best])
            note = f"best: {best}; {low:.2f} to {high:.2f} over {rounds} rounds"
            claims.append(
                Claim(
                    name,
                    f"{times['plain'].median * 1e3:.0f} ms",
                    ratio,
                    "x",
                    _NOISE,
                    note=f"{note}; {to_plain:.2f}x plain",
                )
            )
        else:
            claims.append(skipped(name, f"nothing else fits; {to_plain:.2f}x plain"))
        if share == 0.25:
            claims.append(
                Claim(f"{case.name} at 25%: step against plain", "", to_plain, "x", _AT_A_QUARTER)
            )
    claims.append(_monotone(case, [times[f"planned {100 * share:.0f}%"] for share in budgets]))
    return claims


def _monotone(case: Case, times: Sequence[Timing]) -> Claim:
    """How much faster a step is than one with more memory, at most."""
    gains = [
        larger.ratio(smaller)[0] for i, larger in enumerate(times) for smaller in times[i + 1 :]
    ]
    return Claim(
        f"{case.name}: step against one with a smaller budget, at most",
        "",
        max(gains, default=1.0),
        "x",
        _NOISE,
        note=", ".join(f"{time.median * 1e3:.0f}" for time in times) + " ms, largest budget first",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark, or one of its children."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--child", nargs=2)
    own, rest = parser.parse_known_args(arguments)
    if own.child is not None:
        child(own.child[0], int(own.child[1]))
        return 0
    options = parse(__doc__, rest)
    names = [own.case] if own.case else ["scan-mlp"] if options.quick else list(CASES)
    measure_rates()
    console = Console(width=120)
    claims: list[Claim] = []
    for name in names:
        case = CASES[name]()
        swept, found = contract(name, case, console)
        shares = _TIMED_SHARES if options.quick else SHARES
        found.extend(time_claims(case, swept, shares, 3 if options.quick else 7))
        show(f"The planner: {case.name}", found)
        claims.extend(found)
    return conclude("The planner", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
