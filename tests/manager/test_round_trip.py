"""What goes out through XLA's custom calls comes back, bit for bit."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jdynoff import _native
from tests.manager.stack_program import (
    MIB,
    begin,
    discard,
    end,
    offload,
    reload,
    stack_step,
    stack_values,
    ticket_of,
)

COUNT = 12


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (256, 1031))


@pytest.mark.parametrize("newest_first", [True, False], ids=["lifo", "fifo"])
@pytest.mark.parametrize("pool_bytes", [16 << 10, 300 << 10, 3 * MIB, 64 * MIB])
def test_values_return_exactly_for_any_pool_and_order(
    tmp_path: Path, x: jax.Array, pool_bytes: int, newest_first: bool
) -> None:
    manager = _native.Manager(str(tmp_path), verify=True)
    step = stack_step(COUNT, newest_first=newest_first)
    want = np.asarray(stack_values(x, COUNT))
    with ticket_of(manager, pool_bytes, COUNT * x.nbytes) as ticket:
        _, values, sentinel = jax.block_until_ready(step(ticket, x))
        stats = manager.stats(ticket)
    np.testing.assert_array_equal(np.asarray(values), want)
    assert sentinel == ticket
    assert stats["state"] == "ended"
    assert stats["pool_peak_bytes"] <= pool_bytes
    assert stats["bytes_offloaded"] == stats["bytes_reloaded"] == COUNT * x.nbytes
    assert stats["site_counts"] == {1: COUNT}
    assert (stats["bytes_read"] > 0) == (pool_bytes < COUNT * x.nbytes)
    assert manager.totals()["live_entries"] == 0


def test_results_do_not_depend_on_the_pool(tmp_path: Path, x: jax.Array) -> None:
    manager = _native.Manager(str(tmp_path), verify=True)
    step = stack_step(COUNT)
    totals = []
    for pool_bytes in (64 * MIB, 2 * MIB, 16 << 10):
        with ticket_of(manager, pool_bytes) as ticket:
            totals.append(np.asarray(step(ticket, x)[0]))
    np.testing.assert_array_equal(totals[0].view(np.uint32), totals[1].view(np.uint32))
    np.testing.assert_array_equal(totals[0].view(np.uint32), totals[2].view(np.uint32))


DTYPES = [
    np.bool_,
    np.int8,
    np.uint16,
    np.int32,
    np.float16,
    ml_dtypes.bfloat16,
    np.float32,
    np.complex64,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (129, 515)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_and_shape(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    manager = _native.Manager(str(tmp_path), verify=True)
    bits = np.random.default_rng(0).integers(0, 2, size=shape)
    value = jnp.asarray(bits.astype(dtype))

    @jax.jit
    def step(ticket: jax.Array, value: jax.Array) -> Any:
        serial = begin(ticket)
        token = offload(value, serial)
        back, serial = reload(token, token, value)
        return back, end(serial)

    with ticket_of(manager, 16 << 10) as ticket:
        back, _ = jax.block_until_ready(step(ticket, value))
    assert back.dtype == value.dtype
    np.testing.assert_array_equal(np.asarray(back), np.asarray(value))


def test_a_value_with_two_readers_is_peeked_then_popped(tmp_path: Path, x: jax.Array) -> None:
    manager = _native.Manager(str(tmp_path), verify=True)

    @jax.jit
    def step(ticket: jax.Array, x: jax.Array) -> Any:
        first = offload(x, begin(ticket), readers=2)
        second = offload(x + 1, first, site=2)
        peeked, serial = reload(first, second, x)
        other, serial = reload(second, serial, x, peeked, site=2)
        popped, serial = reload(first, serial, x, other)
        return peeked, other, popped, end(serial)

    for pool_bytes in (64 << 10, 64 * MIB):
        with ticket_of(manager, pool_bytes) as ticket:
            peeked, other, popped, _ = jax.block_until_ready(step(ticket, x))
            assert manager.stats(ticket)["entries_unread"] == 0
        np.testing.assert_array_equal(np.asarray(peeked), np.asarray(x))
        np.testing.assert_array_equal(np.asarray(other), np.asarray(x + 1))
        np.testing.assert_array_equal(np.asarray(popped), np.asarray(x))


@pytest.mark.parametrize("needed", [True, False])
def test_a_branch_reads_or_discards(tmp_path: Path, x: jax.Array, needed: bool) -> None:
    manager = _native.Manager(str(tmp_path))

    @jax.jit
    def step(ticket: jax.Array, x: jax.Array, needed: jax.Array) -> Any:
        token = offload(x, begin(ticket))

        def read(serial: jax.Array) -> Any:
            value, serial = reload(token, serial, x)
            return value.sum(), serial

        def drop(serial: jax.Array) -> Any:
            return jnp.float32(0), discard(token, serial)

        total, serial = jax.lax.cond(needed, read, drop, token)
        return total, end(serial)

    with ticket_of(manager, 8 * MIB) as ticket:
        total, _ = jax.block_until_ready(step(ticket, x, needed))
        stats = manager.stats(ticket)
    assert (float(total) != 0) == needed
    assert stats["entries_discarded"] == (not needed)
    assert stats["entries_unread"] == 0
    assert manager.totals()["live_entries"] == 0


def test_what_nobody_reads_is_freed_at_the_end_and_counted(tmp_path: Path, x: jax.Array) -> None:
    manager = _native.Manager(str(tmp_path))
    step = jax.jit(lambda ticket, x: end(offload(x, offload(x, begin(ticket)))))
    with ticket_of(manager, MIB) as ticket:
        jax.block_until_ready(step(ticket, x))
        assert manager.stats(ticket)["entries_unread"] == 2
        assert manager.totals()["live_bytes"] == 0


def test_a_backward_pass_is_read_ahead(tmp_path: Path) -> None:
    manager = _native.Manager(str(tmp_path))
    x = jnp.ones((256, 1024))
    step = stack_step(64)
    with ticket_of(manager, 16 * MIB, 64 * MIB) as ticket:
        jax.block_until_ready(step(ticket, x))
        stats = manager.stats(ticket)
    assert stats["read_ahead_hits"] > 0
    assert stats["bytes_read"] <= stats["bytes_written"] < stats["bytes_offloaded"]


def test_three_threads_and_two_steps_share_a_manager(tmp_path: Path, x: jax.Array) -> None:
    manager = _native.Manager(str(tmp_path), verify=True)
    steps = {6: stack_step(6), 9: stack_step(9, newest_first=False)}
    wants = {count: np.asarray(stack_values(x, count)) for count in steps}
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for i in range(6):
                count = (6, 9)[(index + i) % 2]
                with ticket_of(manager, 2 * MIB, count * x.nbytes) as ticket:
                    _, values, _ = steps[count](ticket, x)
                    np.testing.assert_array_equal(np.asarray(values), wants[count])
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    assert manager.totals()["live_entries"] == manager.totals()["open_tickets"] == 0


def test_a_thousand_steps_do_not_grow_memory_or_file(tmp_path: Path) -> None:
    psutil = pytest.importorskip("psutil")
    manager = _native.Manager(str(tmp_path))
    x = jnp.ones((64, 1024))
    step = stack_step(8)

    def run(times: int) -> tuple[int, dict[str, int]]:
        for _ in range(times):
            with ticket_of(manager, MIB, 2 * MIB) as ticket:
                jax.block_until_ready(step(ticket, x))
        return psutil.Process().memory_info().rss, manager.totals()

    rss_before, totals_before = run(100)
    rss_after, totals_after = run(1000)
    assert totals_after == totals_before
    assert totals_after["arena_bytes"] == MIB
    assert rss_after - rss_before < 16 * MIB
