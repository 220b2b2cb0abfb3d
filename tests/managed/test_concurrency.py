"""Several steps at once, steps that fail, and many steps in a row."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import psutil
import pytest

import jdynoff
from jdynoff.runtime.manager import manager_for
from tests.programs.example import batch, descend, layer, normal, quick, same_bits, weights

MANY_STEPS = int(os.environ.get("JDYNOFF_TEST_STEPS", "1000"))


def scan_loss(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), x, parameters)
    return jnp.mean(x**2)


def scan_sum(parameters: Any, x: jax.Array) -> jax.Array:
    x, _ = jax.lax.scan(lambda x, w: (jnp.sin(layer(x, w)), None), x, parameters, reverse=True)
    return jnp.sum(x)


def test_three_threads_and_two_functions_share_one_budget() -> None:
    arguments = (weights(width=32), normal(0, 64, 32))
    losses = (scan_loss, scan_sum)
    plain = [quick(descend(loss))(*arguments) for loss in losses]
    least = [
        jdynoff.managed(quick(descend(loss)), budget="min", min_bytes=1, flops_per_byte=0.0).plan(
            *arguments
        )
        for loss in losses
    ]
    budget = max(plan.min_feasible_bytes for plan in least)
    steps = [
        jdynoff.managed(quick(descend(loss)), budget=budget, min_bytes=1, flops_per_byte=0.0)
        for loss in losses
    ]
    wrong: list[str] = []

    def work(number: int) -> None:
        try:
            for turn in range(20):
                which = (number + turn) % 2
                found = steps[which](*arguments)
                if not jnp.allclose(found[0], plain[which][0], rtol=1e-5):
                    wrong.append(f"thread {number}, turn {turn}: {found[0]}")
        except Exception as failure:  # a thread's exception would otherwise only be printed
            wrong.append(repr(failure))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads), "a step waits for another one"
    assert wrong == []


def test_an_exception_in_a_callback_harms_no_later_step() -> None:
    broken = threading.Event()

    def check(x: Any) -> None:
        if broken.is_set():
            raise ValueError("the data are bad")

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: Any) -> tuple[jax.Array, None]:
            y = layer(x, weight)
            jax.debug.callback(check, y[0, 0])
            return y, None

        return jnp.mean(jax.lax.scan(body, x, parameters)[0] ** 2)

    step = jdynoff.managed(quick(descend(loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
    good = step(weights(), batch())
    broken.set()
    with pytest.raises((jax.errors.JaxRuntimeError, jdynoff.JdynoffError), match=r"bad|callback"):
        jax.block_until_ready((step(weights(), batch()), jax.effects_barrier()))
    broken.clear()
    assert same_bits(step(weights(), batch()), good)
    assert step.stats().bytes_offloaded > 0


def test_many_steps_do_not_grow_memory() -> None:
    step = jdynoff.managed(
        quick(descend(scan_loss, 1e-3), donate_argnums=0),
        budget="min",
        min_bytes=1,
        flops_per_byte=0.0,
    )
    parameters, x = weights(), batch()
    process = psutil.Process()
    for _ in range(20):
        _, parameters = step(parameters, x)
    jax.block_until_ready(parameters)
    before = process.memory_info().rss
    arena = manager_for(()).totals()["arena_bytes"]
    for _ in range(MANY_STEPS):
        _, parameters = step(parameters, x)
    jax.block_until_ready(parameters)
    assert process.memory_info().rss - before < 16 << 20
    assert manager_for(()).totals()["arena_bytes"] == arena
    assert step.stats().bytes_offloaded > 0


INTERRUPTED = """
import os, signal, threading
import jax, jax.numpy as jnp
import jdynoff
from tests.programs.example import batch, descend, layer, same_bits, weights

# A shell's background job, and so its children, are started with the signal ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
entered = threading.Event()
armed = threading.Event()

def announce(x):
    if armed.is_set():
        entered.set()

def loss(parameters, x):
    def body(x, weight):
        jax.debug.callback(announce, x[0, 0])
        return layer(x, weight), None
    return jnp.mean(jax.lax.scan(body, x, parameters)[0] ** 2)

step = jdynoff.managed(jax.jit(descend(loss)), budget="min", min_bytes=1, flops_per_byte=0.0)
good = jax.block_until_ready(step(weights(), batch()))
threading.Thread(
    target=lambda: (entered.wait(), os.kill(os.getpid(), signal.SIGINT)), daemon=True
).start()
armed.set()
try:
    while True:
        jax.block_until_ready(step(weights(), batch()))
except (KeyboardInterrupt, jax.errors.JaxRuntimeError) as failure:
    # Inside of the callback it reaches Python as an error of the run, as in plain JAX.
    assert "KeyboardInterrupt" in repr(failure)
    armed.clear()
assert same_bits(step(weights(), batch()), good)
assert step.stats().bytes_offloaded > 0
from jdynoff.runtime.manager import manager_for
assert manager_for(()).totals()["live_entries"] == 0
print("the next step works")
"""


def test_ctrl_c_during_a_step_leaves_the_next_one_working() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=os.getcwd(),
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "the next step works"
