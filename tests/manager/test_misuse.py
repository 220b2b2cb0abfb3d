"""A program whose operations are out of order or name the wrong entry gets an error, not data."""

from __future__ import annotations

from collections.abc import Callable
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
    discard,
    end,
    failure_of,
    offload,
    reload,
    stack_step,
    ticket_of,
)

X = jnp.arange(1024.0)


def swapped_order(ticket: jax.Array) -> Any:
    first = offload(X, begin(ticket))
    second = offload(X + 1, first)
    # The second reload is given the serial that was due for the first.
    value, _ = reload(first, second, X)
    other, serial = reload(second, second, X, value)
    return value, other, end(serial)


def skipped_serial(ticket: jax.Array) -> Any:
    token = offload(X, begin(ticket))
    value, serial = reload(token, token + 1, X)
    return value, end(serial)


def unread_serial_at_the_end(ticket: jax.Array) -> Any:
    serial = begin(ticket)
    token = offload(X, serial)
    return end(serial + 0 * token)


def foreign_token(ticket: jax.Array) -> Any:
    token = offload(X, begin(ticket))
    value, serial = reload(token + 7, token, X)
    return value, end(serial)


def read_once_too_often(ticket: jax.Array) -> Any:
    token = offload(X, begin(ticket))
    value, serial = reload(token, token, X)
    again, serial = reload(token, serial, X, value)
    return again, end(serial)


def wrong_site(ticket: jax.Array) -> Any:
    token = offload(X, begin(ticket), site=3)
    value, serial = reload(token, token, X, site=4)
    return value, end(serial)


def wrong_dtype(ticket: jax.Array) -> Any:
    token = offload(X, begin(ticket))
    value, serial = reload(token, token, jax.ShapeDtypeStruct(X.shape, jnp.int32))
    return value, end(serial)


def wrong_size(ticket: jax.Array) -> Any:
    token = offload(X, begin(ticket))
    value, serial = reload(token, token, X[:512])
    return value, end(serial)


def discarded(ticket: jax.Array) -> Any:
    token = offload(X, begin(ticket))
    value, serial = reload(token, discard(token, token), X)
    return value, end(serial)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (swapped_order, "order"),
        (skipped_serial, "order"),
        (unread_serial_at_the_end, "order"),
        (foreign_token, "token"),
        (read_once_too_often, "token"),
        (wrong_site, "token"),
        (wrong_dtype, "token"),
        (wrong_size, "token"),
        (discarded, "token"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_tampering_is_caught(tmp_path: Path, program: Callable[..., Any], code: str) -> None:
    manager = _native.Manager(str(tmp_path))
    with ticket_of(manager, MIB) as ticket:
        assert failure_of(jax.jit(program), ticket).code == code
        assert manager.stats(ticket)["error"].startswith(f"[jdynoff:{code}]")
    assert manager.totals()["live_entries"] == 0
    with ticket_of(manager, MIB) as ticket:
        jax.block_until_ready(stack_step(2)(ticket, X))


def test_values_smaller_than_a_byte_are_refused(tmp_path: Path) -> None:
    manager = _native.Manager(str(tmp_path))
    step = jax.jit(lambda ticket, x: end(offload(x, begin(ticket))))
    with (
        ticket_of(manager, MIB) as ticket,
        pytest.raises(jax.errors.JaxRuntimeError, match="fewer than eight bits") as caught,
    ):
        jax.block_until_ready(step(ticket, jnp.ones(100, jnp.int4)))
    assert isinstance(errors.from_xla(caught.value), errors.ConfigurationError)


def test_a_ticket_that_was_never_opened_is_refused() -> None:
    assert failure_of(stack_step(2), np.uint32(4_000_000_000), X).code == "token"


def test_a_closed_ticket_is_refused(tmp_path: Path) -> None:
    manager = _native.Manager(str(tmp_path))
    with ticket_of(manager, MIB) as ticket:
        pass
    manager.close(ticket)
    assert failure_of(stack_step(2), ticket, X).code == "token"
    assert manager.stats(ticket)["state"] == "closed"


def test_an_operation_outside_of_a_run_is_refused() -> None:
    step = jax.jit(lambda serial: offload(X, serial))
    assert failure_of(step, jnp.uint32(0)).code == "token"


def test_statistics_of_an_unknown_ticket_are_a_key_error(tmp_path: Path) -> None:
    manager = _native.Manager(str(tmp_path))
    with pytest.raises(KeyError, match="12345678"):
        manager.stats(12345678)


def test_two_begins_in_one_program_are_refused(tmp_path: Path) -> None:
    manager = _native.Manager(str(tmp_path))
    step = jax.jit(lambda ticket: end(begin(ticket + 0 * begin(ticket))))
    with ticket_of(manager, MIB) as ticket:
        assert failure_of(step, ticket).code == "order"
