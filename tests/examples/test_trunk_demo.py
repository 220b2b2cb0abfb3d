"""The demonstration in a short form: real proteins, a managed trunk, a falling loss, a report."""

from __future__ import annotations

import dataclasses
import io

import pytest

pytest.importorskip("haiku")
pytest.importorskip("gemmi")
pytest.importorskip("grain")

from rich.console import Console

from examples import protein_sources, train_alphafold, trunk_demo
from models.alphafold.data import DataError

# Narrow, so that a step is short, and deep, so that what plain JAX keeps outweighs one block and
# the manager's pool eightfold. Depth costs no compile time; extra blocks, of another kind, would.
SMALL = trunk_demo.Sizes(
    steps=10,
    num_blocks=28,
    num_extra_blocks=0,
    num_residues=32,
    num_msa=16,
    num_extra_msa=8,
    msa_channel=32,
    pair_channel=16,
    extra_msa_channel=16,
)


@pytest.fixture(scope="module")
def proteins() -> protein_sources.Source:
    try:
        return protein_sources.choose_for_demo()
    except DataError as error:
        pytest.skip(f"no real proteins: {error}")


def test_the_demo_trains_real_proteins_managed_and_reports(proteins) -> None:
    text = io.StringIO()
    outcome = trunk_demo.run(
        proteins,
        sizes=SMALL,
        budget=trunk_demo.SHARE_BUDGET,
        seed=0,
        console=Console(file=text, width=150),
        compiler_options=trunk_demo.UNOPTIMISED,
    )
    first, last = trunk_demo.ends(outcome.losses["loss"])
    assert len(outcome.losses["loss"]) == SMALL.steps
    assert last < first
    assert outcome.bytes_moved > 0
    assert outcome.budget_bytes == outcome.plain_bytes // 8
    assert outcome.device_peak_bytes <= outcome.plain_bytes // 8
    assert outcome.real_peak_bytes <= outcome.plain_bytes // 8
    printed = text.getvalue()
    for expected in ("residuals, largest first", "offload", "stall time", "steps/s", "budget"):
        assert expected in printed
    assert f"{outcome.budget_bytes:,} bytes" in printed
    assert proteins.description in printed


@pytest.mark.parametrize(("planned", "real"), [(101, 100), (100, 101)])
def test_a_step_that_took_more_than_its_share_is_a_failure(planned: int, real: int) -> None:
    took = trunk_demo.Outcome(
        plain_bytes=800,
        budget_bytes=100,
        device_peak_bytes=planned,
        real_peak_bytes=real,
        resident_bytes=0,
        process_peak_bytes=0,
        losses={},
        bytes_moved=0,
        stall_seconds=0.0,
        seconds=1.0,
    )
    with pytest.raises(trunk_demo.ShareExceededError, match=r"101 bytes .* 1/8 .* 800 bytes"):
        took.check_share()
    dataclasses.replace(took, device_peak_bytes=100, real_peak_bytes=100).check_share()


def test_a_demo_beyond_its_share_ends_with_status_1(monkeypatch, capsys) -> None:
    def fail(*_: object, **__: object) -> None:
        raise trunk_demo.ShareExceededError("the real device peak is too large")

    monkeypatch.setattr(trunk_demo, "run", fail)
    monkeypatch.setattr(train_alphafold.jax.config, "update", lambda *_: None)  # for other tests
    assert train_alphafold.main(["--demo", "--synthetic"]) == 1
    assert "the real device peak is too large" in capsys.readouterr().out


def test_ends_are_means_over_the_first_and_last_fifth() -> None:
    assert trunk_demo.ends([5.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 3.0]) == (4.0, 2.0)
    assert trunk_demo.ends([2.0]) == (2.0, 2.0)


def test_a_sparkline_falls_with_its_curve() -> None:
    assert trunk_demo.sparkline([3.0, 2.2, 1.0]) == "█▅▁"
    assert trunk_demo.sparkline([1.0, 1.0]) == "▁▁"
