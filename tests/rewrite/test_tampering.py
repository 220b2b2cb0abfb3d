"""A program whose calls are out of order, or ask for another entry, fails; it never gives data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdynoff import errors
from jdynoff._native import Manager
from jdynoff.primitives import transfer
from tests.programs import branches, loops
from tests.programs.example import Example
from tests.programs.rewritten import rewrite

Tamper = Callable[[pytest.MonkeyPatch], None]


def one_less(number: jax.Array) -> jax.Array:
    return number - jnp.uint32(1)


def reload_the_entry_before(patch: pytest.MonkeyPatch) -> None:
    """Every reload asks for the entry that was stored one call earlier."""
    true_reload = transfer.reload

    def reload(token: jax.Array, *rest: Any, **named: Any) -> Any:
        return true_reload(one_less(token), *rest, **named)

    patch.setattr(transfer, "reload", reload)


def reload_with_an_old_serial(patch: pytest.MonkeyPatch) -> None:
    true_reload = transfer.reload

    def reload(token: jax.Array, serial: jax.Array, *rest: Any, **named: Any) -> Any:
        return true_reload(token, one_less(serial), *rest, **named)

    patch.setattr(transfer, "reload", reload)


def offload_with_an_old_serial(patch: pytest.MonkeyPatch) -> None:
    true_offload = transfer.offload

    def offload(value: jax.Array, serial: jax.Array, **named: Any) -> Any:
        return true_offload(value, one_less(serial), **named)

    patch.setattr(transfer, "offload", offload)


def ask_for_another_site(patch: pytest.MonkeyPatch) -> None:
    true_reload = transfer.reload

    def reload(*arguments: Any, site: int, aval: Any) -> Any:
        return true_reload(*arguments, site=site ^ 1, aval=aval)

    patch.setattr(transfer, "reload", reload)


def announce_too_few_readers(patch: pytest.MonkeyPatch) -> None:
    true_offload = transfer.offload

    def offload(*arguments: Any, site: int, readers: int) -> Any:
        return true_offload(*arguments, site=site, readers=max(1, readers - 1))

    patch.setattr(transfer, "offload", offload)


def use_one_serial_twice(patch: pytest.MonkeyPatch) -> None:
    """Two calls take one serial, so XLA may run them in either order."""
    true_offload = transfer.offload

    def offload(value: jax.Array, serial: jax.Array, **named: Any) -> Any:
        first = true_offload(value, serial, **named)
        second = true_offload(value + 1, serial, **named)
        return jnp.maximum(first, second)

    patch.setattr(transfer, "offload", offload)


@pytest.mark.parametrize(
    ("tamper", "codes"),
    [
        (reload_the_entry_before, {"token"}),
        (reload_with_an_old_serial, {"order"}),
        (offload_with_an_old_serial, {"order"}),
        (ask_for_another_site, {"token"}),
        (announce_too_few_readers, {"token"}),
        (use_one_serial_twice, {"order"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize(
    "example", [loops.two_backwards(), branches.constant_stack()], ids=lambda e: e.name
)
def test_a_tampered_program_fails_and_gives_no_data(
    example: Example, tamper: Tamper, codes: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if tamper is announce_too_few_readers and example.name == "constant-stack":
        pytest.skip("every entry of this example is read once")
    arguments = example.arguments()
    tamper(monkeypatch)
    rewritten = rewrite(example.step, arguments)
    manager = Manager(None)
    with pytest.raises(jax.errors.JaxRuntimeError) as failure:
        rewritten.run(arguments, manager)
    known = errors.from_xla(failure.value)
    assert isinstance(known, errors.TransferError)
    assert known.code in codes
    assert manager.totals()["live_entries"] == 0
    manager.shutdown()


def test_an_entry_of_another_type_is_refused() -> None:
    """Entries carry their site, dtype and size; a reload that disagrees fails."""
    transfer.register_handlers()
    manager = Manager(None)

    @jax.jit
    def program(ticket: jax.Array, x: jax.Array) -> Any:
        serial = transfer.begin(ticket)
        token = transfer.offload(x, serial, site=5, readers=1)
        aval = jax.core.ShapedArray(x.shape, np.dtype(np.int32))
        value, serial = transfer.reload(token, token, [], site=5, aval=aval)
        return value, transfer.end(serial)

    ticket = manager.open(1 << 20, 0)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"\[jdynoff:token\]"):
        jax.block_until_ready(program(np.uint32(ticket), jnp.ones(3)))
    manager.close(ticket)
    manager.shutdown()
