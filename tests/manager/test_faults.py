"""When disk, directory or process fail: one clear exception, and the next step works."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdynoff import _native, errors
from tests.manager.stack_program import (
    MIB,
    begin,
    end,
    failure_of,
    offload,
    reload,
    stack_step,
    stack_values,
    ticket_of,
)

COUNT = 16
STEP = stack_step(COUNT)


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jnp.linspace(0, 1, 256 * 1024).reshape(256, 1024)


def run_good_step(manager: _native.Manager, x: jax.Array) -> None:
    with ticket_of(manager, 2 * MIB, COUNT * x.nbytes) as ticket:
        _, values, _ = STEP(ticket, x)
        np.testing.assert_array_equal(np.asarray(values), np.asarray(stack_values(x, COUNT)))
    assert manager.totals()["live_entries"] == manager.totals()["open_tickets"] == 0


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("write_eio", "io"),
        ("write_enospc", "disk-full"),
        ("write_short", "io"),
        ("read_eio", "io"),
        ("read_short", "io"),
        ("corrupt", "checksum"),
    ],
)
def test_a_failing_disk_fails_one_step_clearly(
    tmp_path: Path, x: jax.Array, kind: str, code: str
) -> None:
    manager = _native.Manager(str(tmp_path), verify=True)
    run_good_step(manager, x)
    manager.inject_fault(kind, after=2, count=-1)
    with ticket_of(manager, 2 * MIB, COUNT * x.nbytes) as ticket:
        error = failure_of(STEP, ticket, x)
        assert manager.stats(ticket)["error"].startswith(f"[jdynoff:{code}]")
    assert error.code == code
    if kind != "corrupt":
        assert str(tmp_path) in str(error)
    assert "JDYNOFF_SPILL_DIR" in str(error)
    manager.inject_fault("none")
    run_good_step(manager, x)


def test_a_failing_disk_spares_a_step_that_does_not_need_it(tmp_path: Path, x: jax.Array) -> None:
    manager = _native.Manager(str(tmp_path))
    manager.inject_fault("write_eio", count=-1)
    with ticket_of(manager, 2 * COUNT * x.nbytes) as ticket:
        _, values, _ = STEP(ticket, x)
        np.testing.assert_array_equal(np.asarray(values), np.asarray(stack_values(x, COUNT)))


@pytest.fixture
def small_filesystem(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 8 MiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(mount)]
    try:
        mounted = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode != 0:
        pytest.skip(f"mounting needs privileges: {mounted.stderr.decode().strip()}")
    yield mount
    # Lazily: the manager's file stays open until its last reference has gone.
    subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_reservation_that_the_disk_cannot_hold_changes_nothing(
    small_filesystem: Path, x: jax.Array
) -> None:
    manager = _native.Manager(str(small_filesystem))
    before = manager.totals()
    with pytest.raises(errors.SpillSpaceError, match="bytes are available there") as caught:
        manager.open(2 * MIB, 64 * MIB)
    assert isinstance(caught.value, OSError)
    assert caught.value.code == "disk-full"
    assert manager.totals() == before
    with ticket_of(manager, 16 * MIB, 4 * MIB) as ticket:
        jax.block_until_ready(STEP(ticket, x))


def test_a_disk_that_fills_up_during_the_step_is_named(
    small_filesystem: Path, x: jax.Array
) -> None:
    manager = _native.Manager(str(small_filesystem))
    with ticket_of(manager, 2 * MIB, MIB) as ticket:
        error = failure_of(STEP, ticket, x)
    assert error.code == "disk-full"
    assert str(small_filesystem) in str(error)


def test_a_limit_is_kept(tmp_path: Path) -> None:
    manager = _native.Manager(str(tmp_path), disk_limit_bytes=4 * MIB)
    with pytest.raises(errors.SpillSpaceError, match="limit of 4194304 bytes"):
        manager.open(MIB, 5 * MIB)
    manager.close(manager.open(MIB, 4 * MIB))
    assert manager.totals()["spill_file_bytes"] == 4 * MIB


def test_without_a_disk_tier_a_full_pool_is_an_error(x: jax.Array) -> None:
    manager = _native.Manager(None)
    with ticket_of(manager, 2 * MIB) as ticket:
        error = failure_of(STEP, ticket, x)
    assert error.code == "host-limit"
    assert "budget" in str(error)
    with pytest.raises(errors.ConfigurationError, match="disk tier"):
        manager.open(MIB, MIB)


@pytest.mark.parametrize("directory", ["/nonexistent/directory", "/proc"])
def test_a_directory_that_cannot_be_used_is_refused(directory: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=directory):
        _native.Manager(directory)


def test_a_symlink_in_place_of_the_file_is_impossible(tmp_path: Path, x: jax.Array) -> None:
    manager = _native.Manager(str(tmp_path))
    with ticket_of(manager, 2 * MIB, COUNT * x.nbytes) as ticket:
        jax.block_until_ready(STEP(ticket, x))
        assert list(tmp_path.iterdir()) == []  # the file has no name while it is in use
    assert manager.totals()["spill_file_bytes"] > 0


def test_an_exception_in_a_callback_leaves_nothing_behind(tmp_path: Path, x: jax.Array) -> None:
    manager = _native.Manager(str(tmp_path))

    def explode(value: Any) -> None:
        raise RuntimeError("the user's callback failed")

    @jax.jit
    def step(ticket: jax.Array, x: jax.Array) -> Any:
        serial = begin(ticket)
        tokens = []
        for _ in range(4):
            serial = offload(x, serial)
            tokens.append(serial)
        done = jax.pure_callback(
            lambda value: explode(value), jax.ShapeDtypeStruct((), jnp.float32), serial
        )
        value, serial = reload(tokens[0], serial, x, done)
        return value, end(serial)

    with ticket_of(manager, 2 * MIB, COUNT * x.nbytes) as ticket:
        with pytest.raises(jax.errors.JaxRuntimeError, match="the user's callback failed"):
            jax.block_until_ready(step(ticket, x))
        assert manager.totals()["live_entries"] == 4
    assert manager.totals()["live_entries"] == 0
    run_good_step(manager, x)


SCRIPT = """
import multiprocessing, sys, time, warnings
import jax, jax.numpy as jnp, numpy as np
from jdynoff import _native, runtime
from jdynoff.errors import ConfigurationError
from tests.manager.stack_program import MIB, stack_step, ticket_of
manager = runtime.manager_for([runtime.Disk(sys.argv[1])])
x = jnp.ones((256, 1024))

def wait_for_writing(ticket, result):
    while True:
        over = result[0].is_ready()  # first: it may be over by the time that the bytes are read
        if manager.stats(ticket)["bytes_written"]:
            return
        assert not over, "the step is over, and nothing was written"
"""


def start(script: str, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT + textwrap.dedent(script), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=100)
    finally:
        process.kill()


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    process = start(
        """
        step = stack_step(400)
        manager.enable_log(True)
        ticket = manager.open(2 * MIB, 400 * MIB)
        result = step(np.uint32(ticket), x)
        wait_for_writing(ticket, result)
        print("writing", flush=True)
        jax.block_until_ready(result)
        time.sleep(100)  # until it is killed, if it is so fast
        """,
        tmp_path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(signal.SIGKILL)
    finish(process)
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_the_interpreter_exits_while_a_step_is_in_flight(tmp_path: Path) -> None:
    process = start(
        """
        step = stack_step(400)
        ticket = manager.open(2 * MIB, 400 * MIB)
        result = step(np.uint32(ticket), x)
        wait_for_writing(ticket, result)
        print("leaving", flush=True)
        """,
        tmp_path,
    )
    output, problems = finish(process)
    assert process.returncode == 0, problems
    assert output == "leaving\n"


def test_a_forked_worker_refuses_and_the_parent_goes_on(tmp_path: Path) -> None:
    process = start(
        """
        warnings.simplefilter("ignore")
        step = stack_step(16)
        with ticket_of(manager, 2 * MIB, 16 * MIB) as ticket:
            result = step(ticket, x)
            def work():
                try:
                    manager.open(MIB, 0)
                except ConfigurationError as error:
                    sys.exit(7 if "fork" in str(error) else 8)
                sys.exit(9)
            # As a data loader's worker is started and ends.
            child = multiprocessing.get_context("fork").Process(target=work)
            child.start()
            child.join()
            jax.block_until_ready(result)
        print(child.exitcode, manager.totals()["live_entries"])
        """,
        tmp_path,
    )
    output, problems = finish(process)
    assert process.returncode == 0, problems
    assert output == "7 0\n"


def test_a_file_size_limit_is_a_clear_error(tmp_path: Path) -> None:
    process = start(
        """
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        try:
            manager.open(MIB, 64 * MIB)
        except OSError as error:
            print(type(error).__name__)
        """,
        tmp_path,
    )
    output, problems = finish(process)
    assert output == "SpillSpaceError\n", problems


def test_a_shut_down_manager_refuses_and_fails_what_runs(tmp_path: Path, x: jax.Array) -> None:
    manager = _native.Manager(str(tmp_path))
    run_good_step(manager, x)
    ticket = manager.open(2 * MIB, COUNT * x.nbytes)
    manager.shutdown()
    assert failure_of(STEP, np.uint32(ticket), x).code == "token"
    with pytest.raises(errors.ConfigurationError, match="shut down"):
        manager.open(MIB, 0)
