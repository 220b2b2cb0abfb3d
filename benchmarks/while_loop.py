"""`jdynoff.while_loop` against a checkpointed bounded loop and a scan to the largest count.

All three compute the same gradient of one recurrent network whose number of steps is data.
Equinox's checkpointed loop has a bound, keeps some states and computes the rest again; the scan
always takes the largest number of steps and masks what is too much.

    python -m benchmarks.while_loop [--quick] [--json FILE]

Memory is XLA's temporaries, which for the other two are reserved for the largest count, and for
`jdynoff.while_loop` additionally what its stack held on the trips taken.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np

import jdynoff
from benchmarks.harness import Claim, Timing, interleave, megabytes, parse, report

_MANAGED_BUDGET = "min"


@dataclasses.dataclass(frozen=True)
class Size:
    """Of one comparison."""

    batch: int
    width: int
    most: int  # the bound of the other two
    trips: tuple[int, ...]


_FULL = Size(batch=256, width=256, most=256, trips=(16, 64, 256))
_QUICK = Size(batch=64, width=128, most=128, trips=(8, 128))


def _cell(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) + 0.1 * x


def unbounded(most: int, w: jax.Array, x: jax.Array, n: jax.Array) -> jax.Array:
    """The loop of this package."""
    return jdynoff.while_loop(lambda c: c[1] < n, lambda c: (_cell(w, c[0]), c[1] + 1), (x, 0))[0]


def checkpointed(most: int, w: jax.Array, x: jax.Array, n: jax.Array) -> jax.Array:
    """Equinox's loop with recursive checkpoints."""
    final, _ = eqxi.while_loop(
        lambda c: c[1] < n,
        lambda c: (_cell(w, c[0]), c[1] + 1),
        (x, jnp.int32(0)),
        max_steps=most,
        kind="checkpointed",
    )
    return final


def scanned(most: int, w: jax.Array, x: jax.Array, n: jax.Array) -> jax.Array:
    """A scan to the bound."""

    def iteration(x: jax.Array, i: jax.Array) -> tuple[jax.Array, None]:
        return jnp.where(i < n, _cell(w, x), x), None

    return jax.lax.scan(iteration, x, jnp.arange(most))[0]


LOOPS: dict[str, Callable[..., jax.Array]] = {
    "jdynoff.while_loop": unbounded,
    "equinox, checkpointed": checkpointed,
    "scan to the largest count": scanned,
}


def step_of(loop: Callable[..., jax.Array], most: int) -> Any:
    """A gradient step through a loop."""

    def step(w: jax.Array, x: jax.Array, n: jax.Array) -> jax.Array:
        return w - 1e-3 * jax.grad(lambda w: jnp.mean(loop(most, w, x, n) ** 2))(w)

    return jax.jit(step)


def compare(size: Size, rounds: int) -> list[Claim]:
    """Exactness, memory and time."""
    w = jax.random.normal(jax.random.key(0), (size.width, size.width)) / size.width**0.5
    x = jax.random.normal(jax.random.key(1), (size.batch, size.width))
    steps = {name: step_of(loop, size.most) for name, loop in LOOPS.items()}
    managed = jdynoff.managed(steps["jdynoff.while_loop"], budget=_MANAGED_BUDGET)
    claims = []
    temporaries = {
        name: step.lower(w, x, 0).compile().memory_analysis().temp_size_in_bytes
        for name, step in steps.items()
    }
    ours, *others = temporaries
    described = ", ".join(f"{megabytes(temporaries[name]):.3g} MB {name}" for name in others)
    claims.append(
        Claim(
            "XLA temporaries",
            "",
            megabytes(temporaries[ours]),
            "MB",
            round(megabytes(min(temporaries[name] for name in others)), 2),
            note=f"bound: the smaller of {described}",
        )
    )
    for trips in size.trips:
        outputs = {name: np.asarray(step(w, x, trips)) for name, step in steps.items()}
        worst = max(float(np.abs(outputs[ours] - outputs[name]).max()) for name in others)
        scale = float(np.abs(outputs[ours]).max())
        claims.append(
            Claim(
                f"{trips} trips: difference of results",
                "",
                worst / scale,
                "",
                1e-5,
                note="largest, relative, to both others",
            )
        )
        jax.block_until_ready(managed(w, x, trips))
        stats = managed.stats()
        claims.append(
            Claim(
                f"{trips} trips: kept on the stack",
                "",
                megabytes(stats.bytes_offloaded),
                "MB",
                None,
                note=f"managed, budget={_MANAGED_BUDGET!r}: pool peak "
                f"{megabytes(stats.pool_peak_bytes):.3g} MB, the rest on disk",
            )
        )
        programs = {name: functools.partial(step, w, x, trips) for name, step in steps.items()}
        programs["managed"] = functools.partial(managed, w, x, trips)
        times = interleave(programs, rounds)
        claims += [_time(trips, times[ours], times[name], name) for name in others]
        median, low, high = times["managed"].ratio(times[ours])
        claims.append(
            Claim(
                f"{trips} trips: time managed, of unmanaged",
                "",
                median,
                "x",
                None,
                note=f"{low:.2f} to {high:.2f}; through the disk",
            )
        )
    return claims


def _time(trips: int, ours: Timing, other: Timing, name: str) -> Claim:
    median, low, high = ours.ratio(other)
    return Claim(
        f"{trips} trips: time, of {name}",
        f"{other.median * 1e3:.1f} ms",
        median,
        "x",
        None,
        note=f"{low:.2f} to {high:.2f} over {len(ours.seconds)} interleaved rounds",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the module's documentation."""
    options = parse(__doc__, argv)
    claims = compare(_QUICK if options.quick else _FULL, 15)
    return report("Loops with a data-dependent number of trips", claims, options.json)


if __name__ == "__main__":
    sys.exit(main())
