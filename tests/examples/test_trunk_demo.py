"""The demonstration in a short form: real proteins, a managed trunk, a falling loss, a report."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("haiku")
pytest.importorskip("gemmi")
pytest.importorskip("grain")

from rich.console import Console

from examples import protein_sources, trunk_demo
from models.alphafold.data import DataError

SMALL = trunk_demo.Sizes(
    steps=25,
    num_blocks=3,
    num_residues=32,
    num_msa=8,
    num_extra_msa=8,
    msa_channel=32,
    pair_channel=32,
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
        budget="min",
        seed=0,
        console=Console(file=text, width=150),
        compiler_options=trunk_demo.UNOPTIMISED,
    )
    first, last = trunk_demo.ends(outcome.losses["loss"])
    assert len(outcome.losses["loss"]) == SMALL.steps
    assert last < first
    assert outcome.bytes_moved > 0
    assert outcome.device_peak_bytes < outcome.plain_bytes
    printed = text.getvalue()
    for expected in ("residuals, largest first", "offload", "stall time", "steps/s", "budget"):
        assert expected in printed
    assert proteins.description in printed


def test_ends_are_means_over_the_first_and_last_fifth() -> None:
    assert trunk_demo.ends([5.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 3.0]) == (4.0, 2.0)
    assert trunk_demo.ends([2.0]) == (2.0, 2.0)


def test_a_sparkline_falls_with_its_curve() -> None:
    assert trunk_demo.sparkline([3.0, 2.2, 1.0]) == "█▅▁"
    assert trunk_demo.sparkline([1.0, 1.0]) == "▁▁"
