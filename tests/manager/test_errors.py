"""Exceptions and statistics as a user meets them."""

from __future__ import annotations

import pytest

from jdynoff import errors
from jdynoff.runtime import StepStats


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("disk-full", errors.TransferError),
        ("io", errors.TransferError),
        ("checksum", errors.TransferError),
        ("order", errors.TransferError),
        ("token", errors.TransferError),
        ("host-limit", errors.TransferError),
        ("internal", errors.TransferError),
        ("configuration", errors.ConfigurationError),
    ],
)
def test_the_class_is_found_in_what_xla_says(code: str, kind: type[Exception]) -> None:
    text = f"INTERNAL: CustomCall failed: [jdynoff:{code}] the reason; what to do.\nmore lines"
    found = errors.from_xla(RuntimeError(text))
    assert type(found) is kind
    assert str(found) == "the reason; what to do."


def test_other_errors_are_left_alone() -> None:
    assert errors.from_xla(RuntimeError("INTERNAL: out of memory")) is None


def test_every_error_is_this_package_s_and_a_builtin_s() -> None:
    for kind, builtin in (
        (errors.BudgetError, ValueError),
        (errors.TransferError, RuntimeError),
        (errors.SpillSpaceError, OSError),
        (errors.TransformError, TypeError),
        (errors.ConfigurationError, ValueError),
    ):
        assert issubclass(kind, errors.JdynoffError)
        assert issubclass(kind, builtin)


def test_a_failed_reservation_prints_its_message_only() -> None:
    error = errors.from_code("disk-full", "no room; make some.", reservation=True)
    assert isinstance(error, errors.SpillSpaceError)
    assert str(error) == "no room; make some."


def test_a_budget_error_carries_its_numbers() -> None:
    error = errors.BudgetError("too small", budget_bytes=1, min_feasible_bytes=2, largest=["x"])
    assert (error.budget_bytes, error.min_feasible_bytes, error.largest) == (1, 2, ["x"])


def test_statistics_take_what_they_know_from_the_record_and_print() -> None:
    stats = StepStats.from_manager(
        {"bytes_offloaded": 3 << 20, "state": "ended", "site_counts": {4: 2}},
        path={"block": 2},
        blocks_predicted=3,
        blocks_predicted_right=2,
    )
    assert stats.bytes_offloaded == 3 << 20
    assert stats.to_dict()["path"] == {"block": 2}
    assert "3.0 MiB" in str(stats)
    assert "2 of 3" in str(stats)
