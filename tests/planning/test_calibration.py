"""Rates that real steps show replace those that were assumed, and nonsense replaces nothing."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdynoff
from jdynoff.planning.calibration import Event, Observation, corrected
from jdynoff.planning.machine import FILE_VARIABLE, Machine, read_machine, write_machine
from jdynoff.planning.predict import Load, predicted
from tests.programs.example import descend, layer, normal, quick, weights

MIB = 1 << 20
KNOWN = Machine("made up", 1e10, 1e10, 1e10, 5e9, 1e9, 1e9, 1e-6)
TRUTH = Machine("made up", 4e9, 4e9, 4e9, 2e9, 1e8, 3e8, 1e-6)
COMPUTE = 0.5  # seconds, by KNOWN's rates
ENTRIES, ENTRY_BYTES = 32, 4 * MIB


def step_on(truth: Machine, waited: bool = True, slower: float = 1.0) -> Observation:
    """A step as a machine with other rates carries it out, two transfers at a time."""
    events: list[Event] = []

    def add(operation: str, seconds: float, at: float, nbytes: int = ENTRY_BYTES) -> float:
        events.append((operation, 1, nbytes, int(at * 1e9), int((at + seconds) * 1e9)))
        return at + seconds

    copy = ENTRY_BYTES / truth.copy_bytes_per_second + truth.call_seconds
    stalls = []
    at = 10.0
    for step, transfer, rate in (
        ("offload", "write", truth.out_bytes_per_second),
        ("reload", "read", truth.back_bytes_per_second),
    ):
        for _ in range(ENTRIES):
            at = add(step, copy, at)
        each = 2 * ENTRY_BYTES / rate  # with another one beside it
        for number in range(ENTRIES):
            add(transfer, each, at + number // 2 * each)
        stalls.append(ENTRIES / 2 * each if waited else 0.0)
        if waited:
            add(step, stalls[-1], at)
        at += ENTRIES / 2 * each
    compute = COMPUTE * KNOWN.flops_per_second / truth.flops_per_second
    total = slower * (compute + 2 * ENTRIES * copy + sum(stalls))
    return Observation(predicted(KNOWN, COMPUTE, 0.0, Load()), total, *stalls, events)


def test_the_rates_of_a_throttled_machine_are_found() -> None:
    found = corrected(KNOWN, [step_on(TRUTH) for _ in range(5)])
    for field in dataclasses.fields(Machine):
        if field.name.endswith("per_second"):
            expected = getattr(TRUTH, field.name)
            assert getattr(found, field.name) == pytest.approx(expected, rel=0.02), field.name
    assert found.origin == "calibrated from 5 steps"
    assert (found.name, found.call_seconds) == (KNOWN.name, KNOWN.call_seconds)


def test_one_slow_step_moves_nothing() -> None:
    steps = [step_on(TRUTH) for _ in range(4)]
    assert corrected(KNOWN, [*steps, step_on(TRUTH, slower=30.0)]).flops_per_second == (
        pytest.approx(TRUTH.flops_per_second, rel=0.02)
    )


def test_a_link_that_nothing_waits_for_is_at_least_as_fast_as_it_was() -> None:
    slow = corrected(KNOWN, [step_on(TRUTH, waited=False)])
    assert slow.out_bytes_per_second == KNOWN.out_bytes_per_second
    assert slow.back_bytes_per_second == KNOWN.back_bytes_per_second
    fast = dataclasses.replace(TRUTH, out_bytes_per_second=3e9)
    found = corrected(KNOWN, [step_on(fast, waited=False)])
    assert found.out_bytes_per_second == pytest.approx(3e9, rel=0.02)


@pytest.mark.parametrize(
    "events",
    [
        [],
        [("write", 1, 1, 0, 1)],
        [("write", 1, 64 * MIB, 5, 5)],
        [("write", 1, 64 * MIB, 9, 5)],
        [("read", 1, 64 * MIB, 0, 1)],  # 67 PB/s
        [("offload", 1, 64 * MIB, 0, 1)],
        [("reload", 1, 0, 0, 10**9)],
        [("discard", 1, 64 * MIB, 0, 10**9)],
    ],
)
@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, 1e9])
def test_what_cannot_be_is_not_believed(events: list[Event], seconds: float) -> None:
    prediction = predicted(KNOWN, COMPUTE, 0.0, Load())
    assert corrected(KNOWN, [Observation(prediction, seconds, 0.0, 0.0, events)]) == KNOWN
    nothing = predicted(KNOWN, 0.0, 0.0, Load())
    assert corrected(KNOWN, [Observation(nothing, 1.0, 0.0, 0.0, events)]) == KNOWN
    assert corrected(KNOWN, []) == KNOWN


def test_what_is_infinite_stays_so() -> None:
    device = dataclasses.replace(
        KNOWN, copy_bytes_per_second=math.inf, fresh_bytes_per_second=math.inf
    )
    found = corrected(device, [step_on(TRUTH)])
    assert math.isinf(found.copy_bytes_per_second)
    assert math.isinf(found.fresh_bytes_per_second)


DEPTH, ROWS, WIDTH = 8, 8192, 64


def loss(parameters: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters)[0] ** 2)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "machine.json"))
    return tmp_path / "machine.json"


@pytest.mark.parametrize("budget", ["40MiB", "1GiB"])
def test_real_steps_correct_the_kept_rates(budget: str, file: Path) -> None:
    # A hundredth of any processor: what the steps show must be more.
    write_machine(dataclasses.replace(read_machine(), flops_per_second=1e9, origin="made up"))
    before = read_machine()
    arguments = weights(depth=DEPTH, width=WIDTH), normal(0, ROWS, WIDTH)
    step = jdynoff.managed(quick(descend(loss)), budget=budget, flops_per_byte=-1.0)
    plan = step.plan(*arguments)
    expected = step(*arguments)
    assert (plan.offloaded_bytes > 0) == (budget == "40MiB")
    with step.calibrate() as calibration:
        for _ in range(4):
            outputs = step(*arguments)
    assert all(
        (a == b).all()
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(outputs), strict=True)
    )
    assert len(calibration.observations) == 3  # the first has no log yet
    found = calibration.machine
    assert found == read_machine()
    assert found.origin == "calibrated from 3 steps"
    assert found.flops_per_second > before.flops_per_second
    if plan.offloaded_bytes:
        assert step.plan(*arguments).forecast == plan.forecast
        written = sum(e[2] for e in calibration.observations[-1].events if e[0] == "write")
        assert written == step.stats().bytes_written > 0
    # What was planned stays, as above; what is planned now goes by the new rates.
    again = jdynoff.managed(quick(descend(loss)), budget=budget, flops_per_byte=-1.0)
    assert again.plan(*arguments).forecast.origin == "calibrated from 3 steps"


def test_a_limited_disk_does_not_make_the_machines_slow(file: Path, spill_directory: Path) -> None:
    before = read_machine()
    arguments = weights(depth=DEPTH, width=WIDTH), normal(0, ROWS, WIDTH)
    disk = jdynoff.Disk(spill_directory, rate="200MB")
    step = jdynoff.managed(quick(descend(loss)), budget="40MiB", tiers=[disk], flops_per_byte=-1.0)
    step(*arguments)
    assert step.stats().bytes_written
    with step.calibrate():
        for _ in range(3):
            step(*arguments)
    found = read_machine()
    assert found != before
    assert found.out_bytes_per_second == before.out_bytes_per_second
    assert found.back_bytes_per_second == before.back_bytes_per_second


def test_nothing_is_kept_of_steps_that_fail_or_do_not_run(file: Path) -> None:
    step = jdynoff.managed(quick(descend(loss)), budget="1GiB")
    with step.calibrate() as calibration:
        pass
    assert calibration.machine is None

    def fails() -> None:
        for _ in range(3):
            step(weights(depth=DEPTH, width=WIDTH), normal(0, ROWS, WIDTH))
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), step.calibrate():
        fails()
    assert not file.exists()
    already = pytest.raises(jdynoff.ConfigurationError, match="already")
    with already, step.calibrate(), step.calibrate():
        pass
    with step.calibrate():
        pass
