"""The planner: budgets from all that plain JAX needs down to a tenth, on three kinds of steps.

For each step a table of the sweep, then claims: whether every feasible budget is kept by the
compiled program, whether the smallest works and nine tenths of it does not, how the simulation
compares with XLA, and the step's time at a few budgets against the best of `jax.checkpoint` around
each layer, the same with `dots_saveable`, and moving everything, of those that fit the budget.

    python -m benchmarks.planner [--quick] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from rich.console import Console

import jdynoff
from benchmarks import steps
from benchmarks.alphafold_trunk import random_batch
from benchmarks.harness import Claim, interleave, parse, report
from jdynoff.planning.plan import MemoryUse
from models.alphafold.config import trunk_config
from models.alphafold.trunk import make_trunk_step

_TIMED_SHARES = (0.75, 0.5, 0.25)
_NOISE = 1.1
_AT_A_QUARTER = 1.15
_SIMULATION = 0.25

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


def contract_claims(case: Case, sweep: Any) -> list[Claim]:
    """Whether budgets are kept, and the least is the least."""
    plans = [row.plan for row in sweep.rows if row.plan is not None]
    fits = [row.plan is not None for row in sweep.rows]
    kept = all(plan.device_peak_bytes <= plan.budget_bytes for plan in plans)
    seconds = [plan.forecast.step_seconds for plan in plans if plan.offloaded_bytes]
    monotone = fits == sorted(fits, reverse=True) and seconds == sorted(seconds)
    least = sweep.min_feasible_bytes
    edge = jdynoff.managed(jax.jit(case.step)).plan.sweep(
        *case.arguments, budgets=[least, int(0.9 * least)]
    )
    sharp = [row.plan is not None for row in edge.rows] == [True, False]
    moving = [plan for plan in plans if plan.offloaded_bytes and plan.memory.temporary_bytes]
    ratios = [plan.simulated_bytes / plan.memory.temporary_bytes for plan in moving]
    unchanged = [plan for plan in plans if not plan.offloaded_bytes and not plan.sites]
    beside = "; ".join(
        f"plain {plan.simulated_bytes / plan.memory.temporary_bytes:.2f}" for plan in unchanged[:1]
    )
    wrong = max((abs(ratio - 1) for ratio in ratios), default=0.0)
    feasible = ", ".join(
        f"{100 * row.budget_bytes / sweep.plain_peak_bytes:.0f}%"
        for row in sweep.rows
        if row.plan is not None
    )
    return [
        Claim(
            f"{case.name}: budgets kept and monotone",
            f"{sweep.plain_peak_bytes / 2**20:.0f} MiB",
            float(kept and monotone),
            "",
            1.0,
            at_least=True,
            note=f"feasible: {feasible}; compiles at most {max(p.compiles for p in plans)}",
        ),
        Claim(
            f"{case.name}: the least works, 0.9 of it does not",
            "",
            float(sharp),
            "",
            1.0,
            at_least=True,
            note=f"{least / 2**20:.1f} MiB, {100 * least / sweep.plain_peak_bytes:.0f}% of plain",
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


def time_claims(case: Case, sweep: Any, shares: Sequence[float], rounds: int) -> list[Claim]:
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
            needs[name] = managed.plan(*case.arguments).device_peak_bytes
            programs[name] = lambda managed=managed: managed(*case.arguments)
    times = interleave(programs, rounds)
    claims = []
    for share, budget in budgets.items():
        planned = times[f"planned {100 * share:.0f}%"]
        others = [
            name
            for name, size in needs.items()
            if size <= budget and not name.startswith("planned") and name != "plain"
        ]
        best = min(others, key=lambda name: times[name].median)
        ratio, low, high = planned.ratio(times[best])
        to_plain, _, _ = planned.ratio(times["plain"])
        claims.append(
            Claim(
                f"{case.name} at {100 * share:.0f}%: step against the best that fits",
                f"{times['plain'].median * 1e3:.0f} ms",
                ratio,
                "x",
                _NOISE,
                note=f"best: {best}; {low:.2f} to {high:.2f} over {rounds} rounds; "
                f"{to_plain:.2f}x plain",
            )
        )
        if share == 0.25:
            claims.append(
                Claim(f"{case.name} at 25%: step against plain", "", to_plain, "x", _AT_A_QUARTER)
            )
    return claims


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(__doc__, argv)
    cases = [scan_mlp()] if options.quick else [scan_mlp(), unrolled_mlp(), transformer()]
    if not options.quick:
        cases.append(alphafold())
    console = Console(width=120)
    claims: list[Claim] = []
    for case in cases:
        swept = jdynoff.managed(jax.jit(case.step)).plan.sweep(*case.arguments)
        console.print(f"[bold]{case.name}[/]")
        console.print(swept)
        claims.extend(contract_claims(case, swept))
        claims.extend(time_claims(case, swept, _TIMED_SHARES, 3 if options.quick else 7))
    return report("The planner", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
